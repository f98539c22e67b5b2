"""Modules and parameter names without wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from paceline.core.torch_internals import original_of


@runtime_checkable
class AveragingWrapper(Protocol):
    """A data-parallel wrapper, for checkpoints: its bucket layout by parameter names, and whether it is accumulating.

    Gloo's and NCCL's order of summation depends on an element's position in its bucket, so a resumed run is
    bit-equal only with the same layout.
    """

    def bucket_layout(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket, in launch order, without the wrapper's prefix."""

    def load_bucket_layout(self, layout: list[list[str]]) -> None:
        """Rebuild the buckets according to `layout`, if it fits the parameters that are averaged."""

    def holds_local_gradients(self) -> bool:
        """Return whether gradients of a local backward pass (under ``no_sync``) are not synchronized yet."""


@runtime_checkable
class Communicates(Protocol):
    """A layer whose collectives can also be joined by a rank without data."""

    announce: Callable[[int], object] | None
    """Function to call before each collective, with its code; None if collectives need not be announced."""

    def ranks(self) -> Sequence[int]:
        """Return the world ranks that its collectives involve."""

    def shadow(self, code: int, device: torch.device) -> None:
        """Take part in the collective `code` without values, with tensors on `device`."""


def joins(object: Any) -> bool:
    """Return whether `object` is a wrapper inside ``join``."""
    return bool(getattr(vars(object).get("_join_config"), "enable", False))


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that ``torch.compile`` adds."""
    return name.replace("_orig_mod.", "")


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside any nesting of data-parallel wrappers and ``torch.compile``."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif (original := original_of(module)) is not None:
            module = original
        else:
            return module
