"""The finisher: what makes a bucket's gradients the same on every rank.

An all-reduce, unless a communication hook takes its place (:mod:`paceline.ddp.transport.comm_hook`), an algorithm of
:mod:`paceline.comm.algorithms`, or what a sharded optimizer puts there. The control block and late deltas never pass
through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import algorithms
from paceline.comm.shm.header import Note
from paceline.comm.topology import host_number
from paceline.core.state.buckets import Bucket
from paceline.core.state.device_streams import is_queued
from paceline.core.telemetry.spans import BUCKET_WAIT, COLLECTIVE, DONE, SENT, BucketWatch, Recorder, recorder
from paceline.core.torch_internals.profiler import is_profiling
from paceline.core.torch_internals.tensors import multiply_each
from paceline.ddp.agreement.control_block import ControlBlock
from paceline.ddp.agreement.digest import Notes
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.agreement.weighting import WEIGHTED, compute_correction, compute_scale
from paceline.ddp.options.config import Algorithm
from paceline.ddp.transport.channel import Channel, Launched

CONTROL = "exchange of control blocks"
BUCKET = "all-reduce of gradient bucket"
NOT_TOLD = nullcontext()
NO_STAND_INS: Mapping[int, Tensor] = MappingProxyType({})


class Finisher(Protocol):
    """Called for every bucket of a backward, in the order of launch, on every rank."""

    owner: str
    """Whoever has put it in the place of the wrapper's all-reduce, for messages; empty for the all-reduce itself."""
    reads_late: bool
    """Whether :meth:`wait` may be called without the control block, which is read later."""
    carries_tail: bool
    """Whether the tail of the last bucket is summed along with it."""

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold all that it does, which are operations of the device then."""

    @property
    def failed(self) -> bool:
        """Whether a launch of this backward failed on this rank, which the others learn from the control block."""

    def check_shared(self, name: str) -> None:
        """Refuse a backward through two wrappers that share parameter `name`, where that cannot be exact.

        Raises:
            UsageError: says why.
        """

    def launches_at_end(self, *, shadowed: bool) -> bool:
        """Whether buckets are to be launched when backward has ended rather than as they fill.

        `shadowed` if ranks that ran out of data inside ``join`` take part. Where it is true, no collective of a layer
        comes between those of the finisher, on any rank.
        """

    def prescale(self, flat: Tensor) -> float:
        """Return the factor with which gradients are to be copied into the bucket `flat`."""

    def launch(self, bucket: Bucket, at: int) -> Launched:
        """Hand bucket number `at` to communication."""

    def wait(self, buckets: Sequence[Launched], block: Launched | None, control: ControlBlock) -> None:
        """Wait for all that :meth:`launch` returned, in its order, and for the `block` that becomes `control`.

        None where the block is read later, which only a finisher may be asked for that :attr:`reads_late`.
        """

    def scale(self, buckets: Sequence[Bucket], notes: Notes) -> None:
        """Turn the sums in the buckets into averages, or into this rank's parts of them."""

    def stand_ins(self, buckets: Sequence[Bucket]) -> Mapping[int, Tensor]:
        """Return, by parameter, the stand-in shown in ``p.grad`` in place of averages that this rank has only in part.

        Called once at the end of a backward.
        """


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

    owner = ""
    reads_late = True
    failed = False
    """Never: what fails here raises."""

    def __init__(self, channel: Channel, ledger: Ledger, recorder: Recorder, sums: Sums | None = None) -> None:
        self._channel, self._ledger, self._recorder = channel, ledger, recorder
        self._sums = channel if sums is None else sums
        self.carries_tail = sums is None
        if isinstance(sums, Algorithms):
            self.owner = f"algorithm={sums.name!r}"

    @property
    def is_capturable(self) -> bool:
        """Whether sums are the backend's own."""
        return not self._sums.blocks

    def check_shared(self, name: str) -> None:
        """Refuse nothing."""

    def launches_at_end(self, *, shadowed: bool) -> bool:
        """Return True where sums block, and so overlap with nothing: a layer's collective may come first elsewhere."""
        return self._sums.blocks

    def prescale(self, flat: Tensor) -> float:
        """1/N where the copy is a pass over memory that another multiplication would cost again.

        On CPUs for powers of two alone, where the order of sum and multiplication changes no bit.
        """
        size = self._sums.size
        divides = not self._sums.scales and (is_queued(flat.device) or size & (size - 1) == 0)
        return 1 / size if divides else 1.0

    def launch(self, bucket: Bucket, at: int) -> Launched:
        """Launch the sum, in place."""
        recorder = self._recorder
        if recorder.bucket_watch is not None:
            show_own(recorder.bucket_watch, self._ledger, bucket.flat, bucket.prescale)
        note: Note | None = None
        if bucket.flat.dtype is torch.float16:
            if bucket.prescale == 1.0:  # a sum of N may overflow, so that means are summed
                bucket.flat.mul_(1 / self._sums.size)
        elif self._sums.scales:
            self._ledger.add_up()  # a weight that is on its way from a GPU belongs into the note
            note = self._ledger.status.note
        if recorder.detailed:
            return self._launch_in_detail(bucket, at, note)
        return self._reduce(bucket, at, note)

    def _launch_in_detail(self, bucket: Bucket, at: int, note: Note | None) -> Launched:
        self._recorder.mark(SENT, at)
        launched = self._reduce(bucket, at, note)
        if isinstance(launched, dist.Work) and bucket.flat.device.type == "cpu":
            # Elsewhere others record it: who reduces in shared memory, and torch's profiler on a GPU.
            launched.get_future().add_done_callback(lambda _: self._recorder.mark(DONE, at))
        return launched

    def _reduce(self, bucket: Bucket, _at: int, note: Note | None) -> Launched:
        return self._sums.all_reduce(bucket.memory, note)

    def wait(self, buckets: Sequence[Launched], block: Launched | None, control: ControlBlock) -> None:
        """Wait for them in the order of launch."""
        recorder, wait = self._recorder, self._channel.wait
        is_told = recorder.box is not None or recorder.on or is_profiling()
        for at, launched in enumerate(buckets):
            with recorder.span(BUCKET_WAIT, at) if is_told else NOT_TOLD:
                wait(launched, BUCKET, at)
        if block is not None:
            wait(block, CONTROL)

    def scale(self, buckets: Sequence[Bucket], notes: Notes) -> None:
        """Multiply the sums, unless they are averages already."""
        sums: list[Bucket] = []
        means: list[Bucket] = []
        for bucket in buckets:
            holds_means = bucket.prescale != 1.0 or bucket.flat.dtype is torch.float16
            (means if holds_means else sums).append(bucket)
        # Of buckets that are scattered this rank may have nothing.
        if sums and not self._sums.scales and (factor := compute_scale(notes)) != 1.0 and (own := self._averaged(sums)):
            multiply_each(own, factor)
        if means and (factor := compute_correction(notes)) != 1.0 and (own := self._averaged(means)):
            multiply_each(own, factor)
        if (watch := self._recorder.bucket_watch) is not None:
            self._show_averages(watch, buckets)

    def _show_averages(self, watch: BucketWatch, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            watch.averaged(bucket.flat)

    def _averaged(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Return the tensors that hold the sums."""
        return [bucket.flat for bucket in buckets]

    def stand_ins(self, buckets: Sequence[Bucket]) -> Mapping[int, Tensor]:
        """None: averages are whole."""
        return NO_STAND_INS


def show_own(watch: BucketWatch, ledger: Ledger, flat: Tensor, prescale: float) -> None:
    """Show this rank's gradients in a bucket, copied with the factor `prescale`, to somebody who measures."""
    weight, weighting = ledger.status.note
    watch.launched(flat, prescale * (weight if int(weighting) & WEIGHTED else 1.0))


class AlreadyDone:
    """A collective that was finished when its launch returned."""

    def wait(self) -> None:
        """Return."""


class Algorithms:
    """Takes a channel's place for the sums of buckets; its ranks make it together."""

    scales = False
    blocks = True

    def __init__(self, channel: Channel, algorithm: Algorithm) -> None:
        self._channel, self._group, self.size, self.name = channel, channel.group, channel.size, algorithm
        self._run = getattr(algorithms, f"{algorithm.replace('-', '_')}_all_reduce")
        self._options: dict[str, Any] = {}
        if algorithm == "hierarchical":
            self._options["hosts"] = channel.all_gather_object(host_number(channel.rank, channel.size))
        self._checked = False

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> AlreadyDone:
        """Sum `tensor` over all ranks, in place. Only the first is compared between ranks: the layouts are equal."""
        with recorder.span(COLLECTIVE, group=self._channel.name):
            self._run(tensor, group=self._group, check=not self._checked, **self._options)
        self._checked = True
        self._channel.count_launch()  # which is waited for there
        return AlreadyDone()
