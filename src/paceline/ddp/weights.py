"""Weights of micro-batches (``model.weight(w)``), and the factor by which they scale gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor

from paceline.core.state.device_streams import is_queued, read_later
from paceline.errors import UsageError

UNWEIGHTED, WEIGHTED, UNCOUNTED, BY_SLICE = 1, 2, 4, 8
"""Bits of :attr:`~paceline.ddp.agreement.control_block.Status.weighting`. ``BY_SLICE`` means that the weight is this
rank's number of slices rather than a weight set by the program. Without ``WEIGHTED`` the rank ran no backward pass, and
its slices count only if the program sets no weights on any rank."""


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
    """Return the sum of the weights set by the program or, if there are none, of the numbers of slices."""
    is_given = any(int(weighting) & (WEIGHTED | BY_SLICE) == WEIGHTED for _, weighting in notes)
    return sum((weight for weight, weighting in notes if not (is_given and int(weighting) & BY_SLICE)), 0.0)


def compute_correction(notes: Sequence[tuple[float, float]]) -> float:
    """Return the factor that converts a mean over all ranks to the mean that :func:`compute_scale` defines."""
    if any(int(weighting) & (WEIGHTED | UNCOUNTED) for _, weighting in notes):
        return compute_scale(notes) * len(notes)
    return 1.0


class Block:
    """One ``model.weight()`` block.

    Args:
        weight: a number, or a tensor of one element. A GPU tensor is copied in the background, and reading
            :attr:`weight` waits for the copy.
    """

    def __init__(self, weight: float | Tensor) -> None:
        self.has_forward = False
        """Whether a forward pass of the wrapper ran inside the block."""
        self.is_claimed = False
        """Whether the block's backward pass has begun."""
        self.is_on_its_way = isinstance(weight, Tensor) and is_queued(weight.device)
        """Whether reading the weight may have to wait."""
        self.drops: list[Callable[[], bool]] = []
        """Functions that wait for the device and return whether the program has dropped the block's gradients."""
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


class Blocks:
    """A wrapper's ``model.weight()`` blocks whose backward pass has not begun."""

    def __init__(self) -> None:
        self.open: list[Block] = []
        """The ``with`` blocks that are currently open, the innermost last."""
        # Blocks with a forward, in order. Weak references, because a block whose loss was dropped never runs backward.
        self._with_forward: list[weakref.ref[Block]] = []
        self.unused: list[Block] = []
        """Blocks that were closed without a forward pass, since the last forward or synchronization."""

    @contextmanager
    def inside(self, block: Block) -> Iterator[None]:
        self.open.append(block)
        try:
            yield
        finally:
            self.open.pop()
        # A block with gradients disabled belongs to an evaluation, so it never runs backward.
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
            self._with_forward = [reference for reference in self._with_forward if _waits(reference())]
            self._with_forward.append(weakref.ref(block))
        return block

    def of_backward(self, block: Block | None) -> Block | None:
        """Return the block of a backward pass whose forward ran in `block` (None if outside any block); may be None."""
        if self.open and (block is None or block.is_claimed):
            return self.open[-1]
        if block is None and self.unused:
            return self.unused.pop(0)
        return block

    def waiting(self) -> Block | None:
        """Return the block whose backward pass is expected next: the open one, or the first one closed.

        Returns None if no block is waiting for its backward pass.
        """
        blocks = self.open[-1:] if self.open else (reference() for reference in self._with_forward)
        return next((block for block in blocks if _waits(block)), None)

    def without_forward(self) -> list[Block]:
        """Return the blocks without a forward pass of the wrapper; their backward pass may have bypassed it."""
        return [*self.unused, *(block for block in self.open if not block.has_forward)]


def _waits(block: Block | None) -> TypeGuard[Block]:
    return block is not None and block.has_forward and not block.is_claimed


def _checked(weight: float) -> float:
    if not math.isfinite(weight) or weight < 0:
        raise UsageError(f"model.weight() takes a finite number >= 0, such as a count of tokens, not {weight!r}")
    return weight
