"""The finisher: what makes a bucket's gradients the same on every rank.

An all-reduce, unless a communication hook takes its place (:mod:`paceline.ddp.transport.comm_hook`), or an algorithm
of :mod:`paceline.comm.algorithms`. The control block and late deltas never pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.buckets import Bucket
from paceline.comm import algorithms
from paceline.comm.shm.header import Note
from paceline.comm.topology import host_number
from paceline.ddp.agreement.control_block import ControlBlock
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.agreement.weighting import compute_scale
from paceline.ddp.config import Algorithm
from paceline.ddp.transport.channel import Channel, Launched
from paceline.tracing import BUCKET_WAIT, Recorder

CONTROL = "exchange of control blocks"
Notes = Sequence[tuple[float, float]]
"""Weight and weighting of every rank; see :class:`~paceline.ddp.agreement.control_block.Status`."""


class Finisher(Protocol):
    """Called for every bucket of a backward, in the order of launch, on every rank alike."""

    steps_inside: bool
    """Whether an optimizer steps with each bucket as soon as that is reduced."""

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold all that it does, which are operations of the device then."""

    @property
    def failed(self) -> bool:
        """Whether a launch of this backward failed on this rank, which the others learn from the control block."""

    def launches_at_end(self, *, shadowed: bool) -> bool:
        """Whether buckets are to be launched when backward has ended rather than as they fill.

        `shadowed` if ranks that ran out of data inside ``join`` take part. Where it is true, no collective of a layer
        comes between those of the finisher, on any rank.
        """

    def launch(self, bucket: Bucket, at: int, *, last: bool) -> Launched:
        """Hand bucket number `at` to communication."""

    def wait(
        self,
        buckets: Sequence[Launched],
        block: Launched,
        channel: Channel,
        control: ControlBlock,
        recorder: Recorder,
    ) -> None:
        """Wait for all that :meth:`launch` returned, in its order, and for the control block."""

    def scale(self, bucket: Bucket, notes: Notes) -> None:
        """Make what came back into a bucket the average, or the part of it that this rank is to hold."""


class Sums(Protocol):
    """Sums buckets over the ranks: a channel, or an algorithm in its place."""

    size: int
    scales: bool
    blocks: bool
    """Whether :meth:`all_reduce` returns only when every rank has taken part."""

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""


class AllReduce:
    """The sum over the ranks, scaled to the mean or by the weights."""

    steps_inside = False

    def __init__(self, channel: Sums, ledger: Ledger) -> None:
        self._channel, self._ledger = channel, ledger

    @property
    def is_capturable(self) -> bool:
        """Whether sums are the backend's own."""
        return not self._channel.blocks

    @property
    def failed(self) -> bool:
        """Never: what fails here raises."""
        return False

    def launches_at_end(self, *, shadowed: bool) -> bool:
        """Where sums block, so that they overlap with nothing: then a layer's collective may come first elsewhere."""
        return self._channel.blocks

    def launch(self, bucket: Bucket, at: int, *, last: bool) -> Launched:
        """Launch the sum, in place."""
        if bucket.flat.dtype is torch.float16:  # a sum of N may overflow where the mean does not
            bucket.flat.mul_(1 / self._channel.size)
            return self._channel.all_reduce(bucket.flat)
        return self._channel.all_reduce(bucket.flat, self._ledger.status.note)

    def wait(
        self,
        buckets: Sequence[Launched],
        block: Launched,
        channel: Channel,
        control: ControlBlock,
        recorder: Recorder,
    ) -> None:
        """Wait for them in the order of launch."""
        for at, launched in enumerate(buckets):
            with recorder.span(BUCKET_WAIT, at):
                channel.wait(launched, f"all-reduce of gradient bucket {at}")
        channel.wait(block, CONTROL)

    def scale(self, bucket: Bucket, notes: Notes) -> None:
        """Multiply the sums, unless the channel has done so."""
        if bucket.flat.dtype is torch.float16:
            bucket.flat.mul_(compute_scale(notes) * self._channel.size)
        elif not self._channel.scales:
            bucket.flat.mul_(compute_scale(notes))


class AlreadyDone:
    """A collective that was finished when its launch returned."""

    def wait(self) -> None:
        """Return."""


class Algorithms:
    """Takes a channel's place for the sums of buckets; its ranks make it together."""

    scales = False
    blocks = True

    def __init__(self, channel: Channel, algorithm: Algorithm) -> None:
        self._group, self.size = channel.group, channel.size
        self._run = getattr(algorithms, f"{algorithm.replace('-', '_')}_all_reduce")
        self._options: dict[str, Any] = {}
        if algorithm == "hierarchical":
            self._options["hosts"] = channel.all_gather_object(host_number(channel.rank, channel.size))
        self._checked = False

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> AlreadyDone:
        """Sum `tensor` over all ranks, in place. Only the first is compared between ranks: the layouts are equal."""
        self._run(tensor, group=self._group, check=not self._checked, **self._options)
        self._checked = True
        return AlreadyDone()
