"""A module's buffers, made equal to rank 0's before every training forward, or as a buffer hook does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from paceline.ddp.channel import Channel
from paceline.shards import local_of


class Buffers:
    """The buffers of `module` without the `ignored` ones, by name."""

    def __init__(self, module: nn.Module, ignored: set[str]) -> None:
        # Places rather than tensors: a module may assign a new tensor to a buffer's name (pytorch issue 63916).
        self._places: list[tuple[str, nn.Module, str]] = []
        seen: set[int] = set()
        for prefix, part in module.named_modules():
            for name, buffer in part._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full not in ignored and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((full, part, name))

    def __len__(self) -> int:
        return len(self._places)

    def named(self) -> dict[str, Tensor]:
        """The tensors as of now."""
        pairs = ((full, part._buffers[name]) for full, part, name in self._places)
        return {full: buffer for full, buffer in pairs if buffer is not None}

    def broadcast(self, channel: Channel, source: int = 0) -> None:
        """Make all equal to those of rank `source`.

        Through ``.data``, so that autograd's version counters do not see it: two forwards may precede a backward.
        """
        channel.broadcast([local_of(buffer.data) for buffer in self.named().values()], source)

    @torch.no_grad()
    def run_hook(self, hook: Callable[[Any, dict[str, Tensor]], Any], state: Any) -> None:
        """Synchronize as a user's hook does it, ``hook(state, buffers by name)``, and wait for its futures."""
        buffers = self.named()
        with _unsafe_preserve_version_counter(tuple(buffers.values())):
            futures = hook(state, buffers)
            for future in futures if isinstance(futures, list) else [futures]:
                if future is not None:
                    future.wait()
