"""The finisher: what makes a bucket's gradients the same on every rank.

An all-reduce, unless a communication hook takes its place (:mod:`paceline.ddp.comm_hook`). The control block and late
deltas never pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.buckets import Bucket
from paceline.comm.header import Note
from paceline.ddp.channel import Launched
from paceline.ddp.control import scale_of
from paceline.ddp.ledger import Ledger

Notes = Sequence[tuple[float, float]]
"""Weight and weighting of every rank; see :class:`~paceline.ddp.control.Status`."""


class Finisher(Protocol):
    """Called for every bucket of a backward, in the order of launch, on every rank alike."""

    steps_inside: bool
    """Whether an optimizer steps with each bucket as soon as that is reduced."""

    def launch(self, bucket: Bucket, at: int, *, last: bool) -> Launched:
        """Hand bucket number `at` to communication."""

    def scale(self, flat: Tensor, notes: Notes) -> None:
        """Make what came back into a bucket the average."""


class Sums(Protocol):
    """What sums buckets: a channel, or an algorithm in its place."""

    size: int
    scales: bool

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""


class AllReduce:
    """The sum over the ranks, scaled to the mean or by the weights."""

    steps_inside = False

    def __init__(self, channel: Sums, ledger: Ledger) -> None:
        self._channel, self._ledger = channel, ledger

    def launch(self, bucket: Bucket, at: int, *, last: bool) -> Launched:
        """Launch the sum, in place."""
        if bucket.flat.dtype is torch.float16:  # a sum of N may overflow where the mean does not
            bucket.flat.mul_(1 / self._channel.size)
            return self._channel.all_reduce(bucket.flat)
        return self._channel.all_reduce(bucket.flat, self._ledger.status.note)

    def scale(self, flat: Tensor, notes: Notes) -> None:
        """Multiply the sums, unless the channel has done so."""
        if flat.dtype is torch.float16:
            flat.mul_(scale_of(notes) * self._channel.size)
        elif not self._channel.scales:
            flat.mul_(scale_of(notes))
