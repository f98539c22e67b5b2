"""The finisher: makes a bucket's gradients the same on every rank.

By default it is an all-reduce. A communication hook (:mod:`paceline.ddp.comm_hook`) can replace it. Control
blocks and late deltas never pass through the finisher.

Decision 0007 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.arithmetic import reduce_into
from paceline.core.device_streams import is_queued
from paceline.core.spans import BUCKET_WAIT, COLLECTIVE, DONE, SENT, BucketWatch, recorder
from paceline.core.torch_internals import is_profiling, multiply_each
from paceline.ddp.buckets import Bucket
from paceline.ddp.channel import Channel, Launched
from paceline.ddp.control_block import Notes
from paceline.ddp.ledger import Ledger
from paceline.ddp.weights import WEIGHTED, compute_correction, compute_scale

BUCKET_REDUCTION = "all-reduce of gradient bucket"
_LARGE_BYTES = 64 * 1024
"""Bucket size in bytes above which a pass over the bucket takes longer than launching another operation."""
NOT_RECORDED = nullcontext()


class Finisher(Protocol):
    """Averages the buckets of a backward pass. Called for each bucket in launch order, on every rank."""

    carries_tail: bool
    """Whether the tail of the last bucket is summed along with the bucket."""

    has_failed: bool = False
    """Whether a launch failed on this rank, so that it may have launched fewer collectives than the others."""
    is_capturable: bool
    """Whether a CUDA graph can capture its work, that is, whether everything runs on the device."""

    def launches_at_end(self, *, shadowed: bool) -> bool:
        """Return whether buckets must be launched after backward has ended rather than as they fill.

        `shadowed` is true if ranks that ran out of data inside ``join`` take part. If this returns True, no rank runs a
        layer's collective between the finisher's collectives.
        """

    def prepare(self, bucket: Bucket) -> None:
        """Decide how a bucket is turned into averages: sets ``prescale`` and ``is_averaged``."""

    def launch(self, bucket: Bucket, number: int) -> Launched:
        """Start communicating a bucket; `number` is its index in launch order."""

    def wait(self, buckets: Sequence[Launched]) -> None:
        """Wait for the results of :meth:`launch` in launch order."""

    def scale(self, buckets: Sequence[Bucket], notes: Notes) -> None:
        """Turn the sums in the buckets into averages."""


class Sums(Protocol):
    """Sums buckets over the ranks; implemented by channels and :class:`TreeSums`."""

    size: int
    blocks: bool
    """Whether :meth:`all_reduce` returns only when every rank has taken part."""

    def all_reduce(self, tensor: Tensor) -> Launched:
        """Launch the sum of `tensor` over all ranks, in place."""


class AllReduce(Finisher):
    """The sum over the ranks, scaled to the mean or by the weights."""

    is_capturable = True

    def __init__(self, channel: Channel, ledger: Ledger, sums: Sums | None = None, *, prescales: bool = True) -> None:
        self._channel, self._ledger = channel, ledger
        self._prescales = prescales
        self.sums: Sums = channel if sums is None else sums
        """Sums tensors over the ranks."""
        self.carries_tail = sums is None

    def launches_at_end(self, *, shadowed: bool) -> bool:
        """Return True if sums block, because another rank may run a layer's collective before this bucket's."""
        return self.sums.blocks

    def prepare(self, bucket: Bucket) -> None:
        """Let the collective average if possible; otherwise scale by 1/N during the copy if that is faster."""
        bucket.prescale, bucket.is_averaged = 1.0, False
        if not self._prescales:
            return
        # On CPUs only for powers of two: multiplying before the sum then gives bit-identical results, except for
        # numbers near the smallest that the dtype can represent.
        flat, size = bucket.flat, self.sums.size
        bucket.is_averaged = self.sums is self._channel and self._channel.averages(flat.dtype)
        divides = is_queued(flat.device) or (flat.nbytes >= _LARGE_BYTES and size & (size - 1) == 0)
        if divides and not bucket.is_averaged:
            bucket.prescale = 1 / size

    def launch(self, bucket: Bucket, number: int) -> Launched:
        """Launch the sum or mean, in place."""
        if recorder.bucket_watch is not None:
            show_own(recorder.bucket_watch, self._ledger, bucket.flat, bucket.prescale)
        if not (bucket.is_averaged or bucket.prescale != 1.0) and bucket.flat.dtype is torch.float16:
            bucket.flat.mul_(1 / self.sums.size)  # a sum of N may overflow, so divide first
        launched: Launched
        if bucket.is_averaged:
            launched = self._channel.all_reduce(bucket.memory, averages=True)
        else:
            launched = self.sums.all_reduce(bucket.memory)
        if recorder.detailed:
            recorder.mark(SENT, number)
        if recorder.detailed and isinstance(launched, dist.Work) and bucket.flat.device.type == "cpu":
            # In shared memory, the reduction records this itself; on a GPU, torch's profiler does.
            launched.get_future().add_done_callback(lambda _: recorder.mark(DONE, number))
        return launched

    def wait(self, buckets: Sequence[Launched]) -> None:
        """Wait for the buckets in the order of launch."""
        wait = self._channel.wait
        box, is_recorded = recorder.box, recorder.on or is_profiling()
        # If collectives end in order, the last bucket is enough.
        first = len(buckets) - 1 if self._channel.is_ordered and buckets and not is_recorded else 0
        self._channel.outstanding.count -= first
        # If only the black box records, all buckets share one context manager.
        shared = None if box is None or is_recorded else box.span(BUCKET_WAIT)
        for number, launched in enumerate(buckets[first:], first):
            if box is not None:
                box.bucket = number
            with recorder.span(BUCKET_WAIT, number) if is_recorded else shared or NOT_RECORDED:
                wait(launched, BUCKET_REDUCTION, number)

    def scale(self, buckets: Sequence[Bucket], notes: Notes) -> None:
        """Scale the sums to means, and correct existing means if ranks have different weights."""
        sums: list[Bucket] = []
        means: list[Bucket] = []
        for bucket in buckets:
            (means if bucket.holds_means else sums).append(bucket)
        for summed, compute in ((sums, compute_scale), (means, compute_correction)):
            if summed and (factor := compute(notes)) != 1.0:
                multiply_each([bucket.flat for bucket in summed], factor)
        if (watch := recorder.bucket_watch) is not None:
            for bucket in buckets:
                watch.averaged(bucket.flat)


def show_own(watch: BucketWatch, ledger: Ledger, flat: Tensor, prescale: float) -> None:
    """Pass this rank's gradients in a bucket to `watch`; they were copied with the factor `prescale`."""
    ledger.add_up()
    weight, weighting = ledger.status.note
    watch.launched(flat, prescale * (weight if int(weighting) & WEIGHTED else 1.0))


class AlreadyDone:
    """A collective that had already finished when its launch returned."""

    def wait(self) -> None:
        """Return immediately."""


class TreeSums:
    """Sums in the order of :func:`paceline.comm.arithmetic.reduce_into`, for backends that use a different order.

    Every rank receives its share of the elements from all other ranks, sums it, and sends the result to all. This is an
    all-to-all followed by an all-gather, which together move as many bytes as a ring all-reduce. It needs memory for a
    second bucket and does not overlap with backward.
    """

    blocks = True

    def __init__(self, channel: Channel) -> None:
        self._channel, self.size = channel, channel.size

    def all_reduce(self, tensor: Tensor) -> AlreadyDone:
        """Sum `tensor` over all ranks, in place."""
        if tensor.is_complex():  # Gloo has no all-to-all of complex numbers
            tensor = torch.view_as_real(tensor).view(-1)
        channel, count = self._channel, tensor.numel()
        padded = tensor.new_zeros(-(-count // self.size) * self.size)
        padded[:count] = tensor
        parts = torch.empty_like(padded)
        with recorder.span(COLLECTIVE, group=channel.name):
            channel.count_launch()
            channel.wait(channel.group.alltoall_base(parts, padded, [], []), "all-to-all of a gradient bucket")
            rows = list(parts.view(self.size, -1))
            reduce_into([channel.shard(padded)], rows, dist.ReduceOp.SUM)
            channel.wait(channel.all_gather(padded), "all-gather of a gradient bucket")
        tensor.copy_(padded[:count])
        channel.count_launch()  # the finisher waits for it on the channel, which counts it as done there
        return AlreadyDone()
