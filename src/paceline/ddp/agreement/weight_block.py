"""A block in which a micro-batch's weight was given."""

from __future__ import annotations

import math

from torch import Tensor

from paceline.core.state.device_streams import is_queued, read_later
from paceline.errors import UsageError


class Block:
    """One ``model.weight()`` block.

    Args:
        weight: a number, or a tensor of one element. From a GPU it travels to the host until :attr:`weight` is read.
        is_mean: whether the loss inside is a mean.

    Raises:
        UsageError: if `weight` is negative or not finite; for one on a GPU, where :attr:`weight` is read.
    """

    def __init__(self, weight: float | Tensor, *, is_mean: bool) -> None:
        self.is_mean = is_mean
        self.has_forward = False
        """Whether a forward of the wrapper ran inside."""
        self.is_on_its_way = isinstance(weight, Tensor) and is_queued(weight.device)
        """Whether reading the weight may have to wait."""
        if isinstance(weight, Tensor) and self.is_on_its_way:
            self._read = read_later(weight)
        else:
            self._weight = _checked(float(weight))

    @property
    def weight(self) -> float:
        """The weight."""
        if self.is_on_its_way:
            self._weight = _checked(self._read())
            self.is_on_its_way = False
        return self._weight

    @property
    def factor(self) -> float:
        """Factor of gradients in its backwards: 1 for a summed loss, the weight for a mean."""
        return self.weight if self.is_mean else 1.0


def _checked(weight: float) -> float:
    if not math.isfinite(weight) or weight < 0:
        raise UsageError(f"model.weight() takes a finite number >= 0, such as a count of tokens, not {weight!r}")
    return weight
