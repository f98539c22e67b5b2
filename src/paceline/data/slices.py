"""The order of a dataset's indices in each epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.core.state.data_position import short
from paceline.core.state.digests import quick_digest
from paceline.core.state.rng import derive_seed, epoch_order, preserved, sow
from paceline.errors import UsageError

Indices = Sequence[int] | torch.Tensor


class EpochOrder:
    """The order of each epoch: sequential, shuffled by (seed, epoch), or user-defined.

    Args:
        size: number of samples in the dataset; may change between epochs.
        users: a user-defined order, or a function that maps an epoch to an order; None for a sequential or shuffled
            order.
        shuffle: whether the order is shuffled.
        seed: determines the permutations, and seeds the global generators for the user's function.
    """

    def __init__(self, size: int, users: Indices | Callable[[int], Indices] | None, shuffle: bool, seed: int) -> None:
        self.size, self.users, self._shuffle, self._seed = size, users, shuffle, seed
        self._cached: tuple[int, int, torch.Tensor] | None = None  # epoch, size and indices of the latest order

    def of(self, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch, shape (samples,), int64. The result for the latest epoch is cached."""
        if self._cached is None or self._cached[:2] != (epoch, self.size):
            self._cached = (epoch, self.size, self._make(epoch))
        return self._cached[2]

    def length(self, epoch: int) -> int:
        """Return the number of indices of an epoch."""
        return self.size if self.users is None else len(self.of(epoch))

    def fingerprint(self, epoch: int) -> str | None:
        """Return a fingerprint of the user's order, to be saved; None if (seed, epoch) determines the order."""
        return None if self.users is None else hashlib.sha256(self.of(epoch).numpy().tobytes()).hexdigest()[:16]

    def digest(self, epoch: int) -> int:
        """Return a digest of the user's order or, without one, of `shuffle`; ranks compare it along with the seed."""
        return int(self._shuffle) if self.users is None else short(int(quick_digest(self.of(epoch))))

    def _make(self, epoch: int) -> torch.Tensor:
        if self.users is None:
            return epoch_order(self.size, self._seed, epoch) if self._shuffle else torch.arange(self.size, device="cpu")
        if not callable(self.users):
            return _checked(self.users, self.size, epoch)
        with preserved():  # the same random numbers on every rank and after a resume
            sow(derive_seed("order", self._seed, epoch))
            return _checked(self.users(epoch), self.size, epoch)


def _checked(users_order: Any, size: int, epoch: int) -> torch.Tensor:
    """Check the user's order, and return it as int64 indices."""
    if not (hasattr(users_order, "__len__") and hasattr(users_order, "__getitem__")):
        raise UsageError(
            f"order must be a sequence of indices, or a function of the epoch that returns one, not a "
            f"{type(users_order).__name__}; for a sampler give a function, such as lambda epoch: list(sampler)"
        )
    if len(users_order) == 0:
        raise UsageError(f"the order of epoch {epoch} is empty; give at least one index")
    order = torch.as_tensor(users_order, device="cpu")
    if order.dim() != 1 or order.is_floating_point() or order.dtype == torch.bool:
        raise UsageError(
            f"the order of epoch {epoch} has dtype {order.dtype} and shape {tuple(order.shape)}; give whole numbers"
        )
    low, high = int(order.min()), int(order.max())
    if low < 0 or high >= size:
        raise UsageError(
            f"the order of epoch {epoch} has index {low if low < 0 else high}, but the dataset has {size} "
            f"samples; give indices in 0..{size - 1}"
        )
    return order.to(torch.int64)
