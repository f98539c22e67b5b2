"""The buffers of a module that are synchronized between ranks, by name."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

import torch
from torch import Tensor, nn


class Buffers:
    """Finds the buffers of `module` by name, except the `ignored` ones; the model's gradients are on `device`."""

    def __init__(self, module: nn.Module, ignored: set[str], device: torch.device) -> None:
        self.device = device
        # Modules and names instead of tensors, because a module may assign a new tensor to a buffer (pytorch issue
        # 63916).
        self.places: list[tuple[str, nn.Module, str]] = []
        self._left_out: list[tuple[str, nn.Module, str]] = []
        self._ignored = ignored
        # Modules whose buffers are known; buffers that they register later stay local.
        self._parts: WeakSet[nn.Module] = WeakSet()
        self.renew(module)

    def renew(self, module: nn.Module) -> None:
        """Add the buffers of new submodules of `module`, and drop the buffers of removed ones.

        A persistent buffer that is still None, such as a codebook filled by the first batch, is also added, and is
        synchronized once it is a tensor. A buffer that is registered later, or that is None and not persistent, stays
        local: it is usually a cache, and its size may differ between ranks.
        """
        previous = {(id(part), name) for _, part, name in self.places}
        known_parts, self.places = self._parts, []
        self._parts = WeakSet(module.modules())
        visited: set[int] = set()
        self._left_out = []
        for prefix, part in module.named_modules():
            for name, buffer in part._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if full in self._ignored:
                    self._left_out.append((full, part, name))
                # Norm layers without statistics keep these buffer names with the value None.
                is_left_out = name in part._non_persistent_buffers_set or not getattr(part, "track_running_stats", True)
                if (buffer is None and is_left_out) or full in self._ignored or id(buffer) in visited:
                    continue
                if buffer is not None:
                    visited.add(id(buffer))  # broadcast only once if two modules share it
                if part not in known_parts or (id(part), name) in previous:
                    self.places.append((full, part, name))

    def __len__(self) -> int:
        return len(self.places)

    def named(self) -> dict[str, Tensor]:
        """Return the current tensors, by name."""
        return _present(self.places)

    def ignored(self) -> dict[str, Tensor]:
        """Return the current tensors of ignored buffers, by name."""
        return _present(self._left_out)


def _present(places: Iterable[tuple[str, nn.Module, str]]) -> dict[str, Tensor]:
    pairs = ((full, part._buffers.get(name)) for full, part, name in places)
    return {full: buffer for full, buffer in pairs if buffer is not None}
