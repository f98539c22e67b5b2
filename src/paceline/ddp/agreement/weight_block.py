"""Weights of micro-batches (``model.weight(w)``): their blocks, and the resulting scale of the gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor

from paceline.core.state.device_streams import is_queued, read_later
from paceline.errors import UsageError

UNWEIGHTED, WEIGHTED, UNCOUNTED, BY_SLICE = 1, 2, 4, 8
"""Bits of :attr:`~paceline.ddp.agreement.control_block.Status.weighting`. ``BY_SLICE`` means that the weight is this
rank's number of slices rather than a weight given by the program. Without ``WEIGHTED`` the rank ran no backward, and
its slices count only if no rank has weights from the program."""


def compute_scale(notes: Sequence[tuple[float, float]]) -> float:
    """Return the factor that turns sums over ranks into means: 1/N, or 1/Σw if micro-batches were weighted.

    N counts the ranks except ``UNCOUNTED`` ones, which have no data.

    Args:
        notes: weight and weighting of each rank, see :class:`~paceline.ddp.agreement.control_block.Status`. If all
            weights are zero, the gradient is zero.
    """
    bits, counted = 0, 0
    for _, weighting in notes:
        bits |= int(weighting)
        counted += not int(weighting) & UNCOUNTED
    if bits & WEIGHTED:
        total = total_weight(notes)
        return 1.0 / total if total else 0.0
    return 1.0 / max(1, counted)


def total_weight(notes: Sequence[tuple[float, float]]) -> float:
    """Return the sum of the weights given by the program or, without any, of the numbers of slices."""
    is_given = any(int(weighting) & (WEIGHTED | BY_SLICE) == WEIGHTED for _, weighting in notes)
    return sum((weight for weight, weighting in notes if not (is_given and int(weighting) & BY_SLICE)), 0.0)


def compute_correction(notes: Sequence[tuple[float, float]]) -> float:
    """Return the factor that converts a mean over all ranks to the mean of :func:`compute_scale`; 1.0 if equal."""
    if any(int(weighting) & (WEIGHTED | UNCOUNTED) for _, weighting in notes):
        return compute_scale(notes) * len(notes)
    return 1.0


class Block:
    """One ``model.weight()`` block.

    Args:
        weight: a number, or a tensor of one element. From a GPU it is copied in the background; reading :attr:`weight`
            waits for it.
        is_mean: whether the loss inside is a mean.
    """

    def __init__(self, weight: float | Tensor, *, is_mean: bool) -> None:
        self.is_mean = is_mean
        self.has_forward = False
        """Whether a forward of the wrapper ran inside."""
        self.is_claimed = False
        """Whether its backward has begun."""
        self.is_on_its_way = isinstance(weight, Tensor) and is_queued(weight.device)
        """Whether reading the weight may have to wait."""
        if isinstance(weight, Tensor) and self.is_on_its_way:
            self._read = read_later(weight)
        else:
            self._weight = _checked(float(weight))

    @property
    def weight(self) -> float:
        if self.is_on_its_way:
            self._weight = _checked(self._read())
            self.is_on_its_way = False
        return self._weight

    @property
    def factor(self) -> float:
        """Factor of gradients in its backwards: 1 for a summed loss, the weight for a mean."""
        return self.weight if self.is_mean else 1.0


class Blocks:
    """A wrapper's ``model.weight()`` blocks whose backward has not begun."""

    def __init__(self) -> None:
        self.open: list[Block] = []
        """Blocks that the program is inside of, the innermost last."""
        # Blocks with a forward, in order; weak references, because a block whose loss was dropped has no backward.
        self._with_forward: list[weakref.ref[Block]] = []
        self.unused: list[Block] = []
        """Blocks that were exited without a forward, since the last forward and synchronization."""

    @contextmanager
    def inside(self, block: Block) -> Iterator[None]:
        self.open.append(block)
        try:
            yield
        finally:
            self.open.pop()
        # With gradients disabled, the block belongs to an evaluation and has no backward.
        if not (block.has_forward or block.is_claimed) and torch.is_grad_enabled():
            self.unused.append(block)

    def forward_ended(self) -> Block | None:
        """Return the block around a forward that has just ended, or None if there is none."""
        if self.unused:
            self.unused.clear()
        if not self.open:
            return None
        block = self.open[-1]
        if not block.has_forward:
            block.has_forward = True
            self._with_forward = [each for each in self._with_forward if _waits(each())]
            self._with_forward.append(weakref.ref(block))
        return block

    def of_backward(self, block: Block | None) -> Block | None:
        """Return the block of a backward, or None; its forward ran in `block` (None if outside any block)."""
        if self.open and (block is None or block.is_claimed):
            return self.open[-1]
        if block is None and self.unused:
            return self.unused.pop(0)
        return block

    def waiting(self) -> Block | None:
        """Return the block whose backward is expected next: the open one, or the first that was exited.

        Returns None if no block has a forward whose backward has not begun.
        """
        blocks = self.open[-1:] if self.open else (each() for each in self._with_forward)
        return next((block for block in blocks if _waits(block)), None)

    def without_forward(self) -> list[Block]:
        """Return the blocks without a forward of the wrapper; their backward may have bypassed it."""
        return [*self.unused, *(block for block in self.open if not block.has_forward)]


def _waits(block: Block | None) -> TypeGuard[Block]:
    return block is not None and block.has_forward and not block.is_claimed


def _checked(weight: float) -> float:
    if not math.isfinite(weight) or weight < 0:
        raise UsageError(f"model.weight() takes a finite number >= 0, such as a count of tokens, not {weight!r}")
    return weight
