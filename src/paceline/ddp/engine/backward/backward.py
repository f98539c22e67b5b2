"""One synchronized backward: this rank's launches, its missing gradients, the results, and the phase."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.state.buckets import Bucket, arrival_order
from paceline.core.telemetry.failpoints import strike
from paceline.core.telemetry.spans import CONTROL, LAUNCH
from paceline.core.torch_internals.autograd import GraphTask, has_ended, without_gradients
from paceline.core.torch_internals.tensors import copy_scaled
from paceline.ddp.agreement.digest import Position
from paceline.ddp.agreement.weighting import UNWEIGHTED, WEIGHTED
from paceline.ddp.engine.backward.phase import NEXT, Phase
from paceline.ddp.engine.gradients.bulk_checks import are_dense, gradients_of, present
from paceline.ddp.engine.gradients.finite_check import FiniteCheck
from paceline.ddp.engine.parameters.shared_parameters import NOTHING_SHARED, Share
from paceline.ddp.engine.parts import EngineParts
from paceline.ddp.transport.channel import Launched
from paceline.ddp.transport.sparse import stored_elements
from paceline.errors import UsageError

_ENDING = threading.RLock()
"""Held while a backward becomes one that an exception has ended."""


@dataclass(eq=False)
class Backward:
    """From the first gradient to the scaled sums. Buckets are launched in order, each once."""

    parts: EngineParts
    clear: bool = True
    """Whether no parameter had a gradient when it began."""
    share: Share = NOTHING_SHARED
    """The parameters that other wrappers have, too."""
    at_end: bool = False
    """Whether buckets are launched when backward has ended rather than as they fill."""
    untouched: bool = False
    """Whether users referred to nothing in buckets when it began; nor do they since, as no parameter showed any."""
    always_exchanges: bool = True
    """Whether the control block is launched at the end of backward, rather than only where digests differ."""
    is_steady: bool = False
    """Whether it runs on the path of ordinary steps, :mod:`.steady_step`, for now."""
    gradients_came: Callable[[], None] = lambda: None
    """Ends its span in traces; there is none in ``sync_gradients()``."""
    on_abort: Callable[[Backward], None] | None = None
    """Called when an exception has ended it."""
    ending: Iterator[bool] = field(default_factory=lambda: iter(()))
    """The end of backward, which is run from pause to pause; see :data:`~paceline.ddp.transport.channel.Pausing`."""
    phase: Phase = Phase.IDLE
    """Changed by :meth:`enter` alone."""
    is_cut_short: bool = False
    """Whether an exception ended it before all was launched, which the control block tells the other ranks."""
    is_settling: bool = False
    """Whether it is carried to its end after an exception, which the user has seen."""
    absent: list[int] = field(default_factory=list)
    """Parameters for which this rank had no gradient."""
    held: dict[int, Tensor] = field(default_factory=dict)
    """Gradients that were there before, and were launched; they come back if an exception ends backward."""
    launched: list[Launched] = field(default_factory=list)
    """Buckets in the order of launch."""
    block: Launched | None = None
    """The control block, once it is launched and until it is read."""
    _finite_check: FiniteCheck = field(default_factory=FiniteCheck)
    """Finds gradients of this rank that hold NaN or Inf, where that is looked for."""
    _apart: dict[int, Tensor] = field(default_factory=dict)
    """This rank's gradients that are in no bucket, by parameter: late deltas and sparse gradients."""
    _late: list[int] = field(default_factory=list)
    """Parameters with a late delta."""
    _sparse: list[int] = field(default_factory=list)
    """Parameters with a sparse gradient."""
    _sparse_in_buckets: list[int] = field(default_factory=list)
    """Parameters in buckets whose gradient was found to be sparse, so that zeros were launched."""
    _task: weakref.ref[GraphTask] | None = None
    """Dies with autograd's graph task; None without one, as in ``sync_gradients()``."""
    _task_number: int = -1
    """That of the graph task."""

    # -- where it stands ----------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Go on to `phase`."""
        if phase not in NEXT[self.phase]:
            raise AssertionError(f"a backward that is {self.phase.name} cannot become {phase.name}")
        self.phase = phase

    @property
    def is_under_way(self) -> bool:
        """Whether it has begun and neither come to its end nor failed."""
        return self.phase in (Phase.LAUNCHING, Phase.WAITING)

    @property
    def next(self) -> int:
        """The bucket to be launched next; their number when all are."""
        return len(self.launched)

    def follow(self, task: GraphTask) -> None:
        """Notice when autograd drops the graph `task`: if this backward is under way then, an exception ended it."""
        this = weakref.ref(self)  # no reference back, so that what was launched goes with the last reference
        self._task = weakref.ref(task, lambda _: _task_ended(this()))
        self._task_number = task.number

    def notice_exception(self) -> None:
        """Notice an exception that has ended it where a thread of autograd still holds on to the graph task."""
        if self._task is not None and self.is_under_way and has_ended(self._task_number):
            self._task = None
            _task_ended(self)

    @property
    def has_sparse(self) -> bool:
        """Whether a gradient in a bucket was found to be sparse."""
        return bool(self._sparse_in_buckets)

    @property
    def is_followed(self) -> bool:
        """Whether autograd runs it, not ``sync_gradients()``."""
        return self._task is not None

    def leave_unread(self) -> None:
        """Never read control blocks that were to be read later, as the wrapper is gone; its reducer can go, too."""
        if self.phase is Phase.UNREAD and isinstance(self.ending, Generator):
            self.ending.close()
            if self.block is not None:
                self.parts.channel.leave(self.block)

    def forget_task(self) -> None:
        """Take no exception for this rank's own any more: the wrapper is gone, or backward has ended without one."""
        self._task = None

    @torch.no_grad()
    def advance(self) -> bool:
        """Run the end of backward up to its next pause; returns whether there was one."""
        return next(self.ending, False)

    # -- 5. a bucket is complete --------------------------------------------------------------------------------

    @property
    def is_next_early(self) -> bool:
        """Whether the next bucket is launched as soon as it is full.

        One that carries a digest is not: until backward has ended, this rank may get something to report.
        """
        return not self.at_end and (self.always_exchanges or self.next + 1 < len(self.parts.storage))

    @without_gradients
    def launch(self, bucket: Bucket, gradients: list[Tensor | None] | None = None) -> None:
        """Move the `gradients` in, free the parameters' own, and hand the bucket to communication."""
        number = self.next
        if number == 1:
            strike("bucket")
        with self.parts.recorder.span(LAUNCH, number):
            self._fill(bucket, gradients)
            if bucket.tail.numel():
                self.parts.digest.write(bucket.tail, None)
            self._hand_over(bucket)

    def _fill(self, bucket: Bucket, gradients: list[Tensor | None] | None) -> None:
        parts = self.parts
        if not self.untouched:
            parts.storage.claim(self.next, self.share.elsewhere.keys())
        parameters = [parts.parameters[index] for index in bucket.indices]
        if gradients is None:
            gradients = gradients_of(parameters)
        if self.clear and not self.share.elsewhere and are_dense(gradients):
            copy_scaled(bucket.views, gradients, parts.finisher.prescale(bucket.flat))
            for parameter in parameters:
                parameter.grad = None
        else:
            self._move_in_one_by_one(bucket)
        if parts.check_finite:
            self._finite_check.add_bucket(bucket)

    def _hand_over(self, bucket: Bucket) -> None:
        parts, number = self.parts, self.next
        if (watch := parts.recorder.bucket_watch) is not None:
            watch.launched(bucket.flat, self._factor(bucket))
        self.launched.append(parts.finisher.launch(bucket, number, last=number + 1 == len(parts.storage)))

    def _factor(self, bucket: Bucket) -> float:
        """Return the factor between the bucket and the mean over this rank's samples."""
        weight, weighting = self.parts.ledger.status.note
        return self.parts.finisher.prescale(bucket.flat) * (weight if int(weighting) & WEIGHTED else 1.0)

    def _move_in_one_by_one(self, bucket: Bucket) -> None:
        """Move gradients in where some are absent, sparse, or were there before."""
        factor = self.parts.finisher.prescale(bucket.flat)
        sources, targets = [], []
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            if index in self.share.elsewhere:
                view.zero_()
                continue
            gradient = self.parts.parameters[index].grad
            if gradient is None:
                self.absent.append(index)
                view.zero_()
                continue
            if gradient.is_sparse:
                self._sparse_in_buckets.append(index)
                view.zero_()
                continue
            if gradient is not view:
                self._check_dense(index, gradient)
                if not self.clear:
                    self.held[index] = gradient
            if gradient is not view or factor != 1.0:
                sources.append(gradient)
                targets.append(view)
            self.parts.parameters[index].grad = None
        if sources:
            copy_scaled(targets, sources, factor)

    def _check_dense(self, index: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"rank {self.parts.channel.rank}: parameter {self.parts.names[index]!r} has a {gradient.layout} "
                "gradient, which buckets cannot hold; use a layer with dense gradients"
            )

    # -- 6. backward ends ---------------------------------------------------------------------------------------

    def launch_rest(self) -> dict[int, Tensor]:
        """Launch the rest, the last bucket with this rank's digest; returns its gradients that are in no bucket.

        These are, by parameter, late deltas and sparse gradients.
        """
        parts, rest = self.parts, self.parts.storage.buckets[self.next :]
        if self.always_exchanges or not rest:
            for bucket in rest:
                self.launch(bucket)
            self._find_apart()
        else:
            *full, last = rest
            for bucket in full:
                self.launch(bucket)
            with parts.recorder.span(LAUNCH, self.next):
                self._fill(last, None)
                self._find_apart()
                parts.digest.write(last.tail, self._position())
                self._hand_over(last)
        self.gradients_came()
        return self._apart

    def _find_apart(self) -> None:
        """Find this rank's gradients that are in no bucket, and the parameters that have none."""
        parts, elsewhere = self.parts, self.share.elsewhere
        gradients = present(parts.parameters).items()
        self._apart = apart = {index: gradient for index, gradient in gradients if index not in elsewhere}
        if parts.sharing:
            self._take_common(apart)
        # A sparse gradient that comes after a dense one was launched is a late delta as any other.
        alone = {*self.absent, *self._sparse_in_buckets, *parts.storage.unbucketed}
        self._sparse = sparse = [index for index, gradient in apart.items() if gradient.is_sparse and index in alone]
        self._late = [index for index in apart if index not in sparse] if len(sparse) < len(apart) else []
        if parts.check_finite:
            self._finite_check.add(apart.keys(), list(map(stored_elements, apart.values())))
        # What comes late is present, too: its parameter must not end as None.
        outside = [index for index in parts.storage.unbucketed if index not in elsewhere]
        self.absent = [index for index in (*self.absent, *outside) if index not in apart]
        self.absent += [index for index in elsewhere if parts.sharing.lacks(index, self.share)]

    def _position(self) -> Position | None:
        """This rank's position where that is all it has to say, as in most steps; None where it has more to report."""
        parts = self.parts
        has_more = (
            self.absent
            or self._apart
            or self.is_cut_short
            or parts.sharing
            or parts.ledger.status.weighting != UNWEIGHTED
            or parts.ledger.status.changed
            or (parts.replica_check is not None and parts.replica_check.is_due)
            or (parts.check_finite and self._finite_check.found())
        )
        return None if has_more else parts.ledger.position(parts.channel.size)

    def launch_block(self) -> None:
        """Launch the control block, on all ranks, with what this rank has to report."""
        parts = self.parts
        order = self._observed_order()
        status = parts.ledger.report(parts.control.size, aborted=self.is_cut_short, hook_failed=parts.finisher.failed)
        with parts.recorder.span(CONTROL):
            block = parts.control.fill(self.absent, self._finite_check.found(), self._late, status, self._sparse, order)
            self.block = parts.channel.host.all_reduce(block)

    def _observed_order(self) -> list[int]:
        """Rank 0's order of arrival, for the first backward's control block; empty if there is none to tell."""
        arrivals = self.parts.arrivals
        is_asked = self.parts.channel.rank == 0 and not arrivals.order_known and not self.is_cut_short
        return arrival_order(arrivals.observed, len(self.parts.parameters)) if is_asked and arrivals.observed else []

    def _take_common(self, apart: dict[int, Tensor]) -> None:
        """Leave no gradient of `apart` where another wrapper could take it for its own."""
        for index in self.parts.sharing.common & apart.keys():
            self.parts.parameters[index].grad = None


def _task_ended(backward: Backward | None) -> None:
    """An exception has ended `backward`, which is learned once: in a thread of autograd, or before in our own."""
    with _ENDING:
        if backward is None or not backward.is_under_way:
            return
        backward.is_cut_short = backward.phase is Phase.LAUNCHING
        backward.enter(Phase.ABORTED)
        if backward.on_abort is not None:
            backward.on_abort(backward)
