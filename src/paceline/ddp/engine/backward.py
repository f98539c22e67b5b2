"""One synchronized backward: what this rank launched, what it lacked, what came back, and where it stands."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from paceline.buckets import Bucket, arrival_order
from paceline.ddp.agreement.control_block import Status
from paceline.ddp.agreement.join_events import Event
from paceline.ddp.agreement.weighting import compute_scale
from paceline.ddp.engine.many_gradients import are_dense, gradients_of, present
from paceline.ddp.engine.new_parameters import AgreedChange
from paceline.ddp.engine.parts import EngineParts
from paceline.ddp.engine.second_pass import run_second_pass
from paceline.ddp.engine.shared_parameters import NOTHING_SHARED, Share
from paceline.ddp.engine.sparse import stored_elements
from paceline.ddp.transport.channel import Launched, Pausing
from paceline.errors import UsageError
from paceline.torch_internals.autograd import GraphTask, without_gradients
from paceline.torch_internals.tensors import copy_each
from paceline.tracing import CONTROL, LAUNCH, WAIT


class Phase(Enum):
    """The phase of a backward; :data:`_NEXT` lists those that may follow each."""

    IDLE = "no synchronized backward is under way"
    LAUNCHING = "gradients arrive, complete buckets are launched"
    WAITING = "everything is launched, results are waited for"
    ABORTED = "an exception ended backward; what the other ranks count on is still owed"
    BROKEN = "a collective failed"


_NEXT = {
    Phase.IDLE: {Phase.LAUNCHING, Phase.BROKEN},  # broken where new parameters could not be taken in
    Phase.LAUNCHING: {Phase.WAITING, Phase.ABORTED, Phase.BROKEN},
    Phase.WAITING: {Phase.IDLE, Phase.ABORTED, Phase.BROKEN},
    Phase.ABORTED: {Phase.LAUNCHING, Phase.WAITING},  # when what is owed is carried out
    Phase.BROKEN: set[Phase](),
}


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The findings of a backward that has come to its end."""

    statuses: list[Status]
    """What every rank reported."""
    new: AgreedChange | None
    """What all ranks found of parameters that the module got later."""
    unused: str | None
    """What is to be said of unused parameters."""
    drift: str | None
    """What differs between replicas."""


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
    exposed_seconds: float = 0.0
    """Time waited for communication."""
    _launched: list[Launched] = field(default_factory=list)
    """Buckets in the order of launch, then the control block."""
    _non_finite: list[int] = field(default_factory=list)
    """Parameters whose gradient on this rank holds NaN or Inf, where that is looked for."""
    _sparse_in_buckets: list[int] = field(default_factory=list)
    """Parameters in buckets whose gradient was found to be sparse, so that zeros were launched."""
    _task: weakref.ref[GraphTask] | None = None
    """Dies with autograd's graph task; None without one, as in ``sync_gradients()``."""

    # -- where it stands ----------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Go on to `phase`."""
        if phase not in _NEXT[self.phase]:
            raise AssertionError(f"a backward that is {self.phase.name} cannot become {phase.name}")
        self.phase = phase

    @property
    def is_under_way(self) -> bool:
        """Whether it has begun and neither come to its end nor failed."""
        return self.phase in (Phase.LAUNCHING, Phase.WAITING)

    @property
    def next(self) -> int:
        """The bucket to be launched next; their number when all are."""
        return len(self._launched)

    def follow(self, task: GraphTask) -> None:
        """Notice when autograd drops the graph `task`: if this backward is under way then, an exception ended it."""
        this = weakref.ref(self)  # no reference back, so that what was launched goes with the last reference
        self._task = weakref.ref(task, lambda _: _task_gone(this()))

    def forget_task(self) -> None:
        """Take no exception for this rank's own any more, as the wrapper is gone; the end of backward raises then."""
        self._task = None

    @torch.no_grad()
    def advance(self) -> bool:
        """Run the end of backward up to its next pause; returns whether there was one."""
        return next(self.ending, False)

    # -- 5. a bucket is complete --------------------------------------------------------------------------------

    @without_gradients
    def launch(self, bucket: Bucket, gradients: list[Tensor | None] | None = None) -> None:
        """Move the `gradients` in, free the parameters' own, and hand the bucket to communication."""
        parts, number = self.parts, self.next
        with parts.recorder.span(LAUNCH, number):
            parts.storage.claim(number, self.share.elsewhere.keys())
            parameters = [parts.parameters[index] for index in bucket.indices]
            if gradients is None:
                gradients = gradients_of(parameters)
            if self.clear and not self.share.elsewhere and are_dense(gradients):
                copy_each(bucket.views, gradients)
                for parameter in parameters:
                    parameter.grad = None
            else:
                self._move_in_one_by_one(bucket)
            if parts.check_finite and not torch.isfinite(bucket.flat.sum()):
                pairs = zip(bucket.indices, bucket.views, strict=True)
                self._non_finite += [index for index, view in pairs if not torch.isfinite(view).all()]
            is_last = number + 1 == len(parts.storage)
            self._launched.append(parts.finisher.launch(bucket, number, last=is_last))

    def _move_in_one_by_one(self, bucket: Bucket) -> None:
        """Move gradients in where some are absent, sparse, or were there before."""
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
                self._expect_dense(index, gradient)
                sources.append(gradient)
                targets.append(view)
                if not self.clear:
                    self.held[index] = gradient
            self.parts.parameters[index].grad = None
        if sources:
            copy_each(targets, sources)

    def _expect_dense(self, index: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"rank {self.parts.channel.rank}: parameter {self.parts.names[index]!r} has a {gradient.layout} "
                "gradient, which buckets cannot hold; use a layer with dense gradients"
            )

    # -- 6. backward ends ---------------------------------------------------------------------------------------

    def end(self) -> Pausing[Outcome]:
        """Launch the rest, wait, average what is in no bucket, check, and publish the averages."""
        parts = self.parts
        if parts.join.is_active:
            parts.join.tell(Event.END)
        parts.ledger.status.changed = parts.new_parameters.have_gradients()
        mine = self.launch_rest()
        parts.buffers.launch()
        parts.sharing.launched(self.absent)
        self.enter(Phase.WAITING)
        yield True
        statuses = self.wait()
        parts.buffers.wait()
        # 8. the second pass, and checks
        scale = compute_scale([status.note for status in statuses])
        apart = yield from run_second_pass(parts, mine, scale)
        new = yield from parts.new_parameters.agree(statuses, scale, parts)
        unused = yield from parts.unused.look(parts.control.missing_somewhere(statuses), self.absent)
        drift = None
        if parts.replica_check is not None:
            drift = yield from parts.replica_check.run(statuses)
        self._publish(apart)
        self._adopt_order()
        return Outcome(statuses, new, unused, drift)

    def launch_rest(self) -> dict[int, Tensor]:
        """Launch what is left, then the control block; returns this rank's gradients that are in no bucket.

        These are, by parameter, late deltas and sparse gradients.
        """
        parts = self.parts
        for bucket in parts.storage.buckets[self.next :]:
            self.launch(bucket)
        self.gradients_came()
        elsewhere = self.share.elsewhere
        gradients = present(parts.parameters).items()
        apart = {index: gradient for index, gradient in gradients if index not in elsewhere}
        if parts.sharing:
            self._take_common(apart)
        # A sparse gradient that comes after a dense one was launched is a late delta as any other.
        alone = {*self.absent, *self._sparse_in_buckets, *parts.storage.unbucketed}
        sparse = [index for index, gradient in apart.items() if gradient.is_sparse and index in alone]
        late = [index for index in apart if index not in sparse] if len(sparse) < len(apart) else []
        if parts.check_finite:
            finite = {index: bool(torch.isfinite(stored_elements(gradient)).all()) for index, gradient in apart.items()}
            self._non_finite += [index for index in apart if not finite[index]]
        # What comes late is present, too: its parameter must not end as None.
        outside = [index for index in parts.storage.unbucketed if index not in elsewhere]
        self.absent = [index for index in (*self.absent, *outside) if index not in apart]
        self.absent += [index for index in elsewhere if parts.sharing.lacks(index, self.share)]
        status = parts.ledger.report(parts.control.size, aborted=self.is_cut_short, hook_failed=parts.finisher.failed)
        order = self._observed_order()
        with parts.recorder.span(CONTROL):
            block = parts.control.fill(self.absent, self._non_finite, late, status, sparse, order)
            self._launched.append(parts.channel.all_reduce(block))
        return apart

    def _observed_order(self) -> list[int]:
        """Rank 0's order of arrival, for the first backward's control block; empty if there is none to tell."""
        arrivals = self.parts.arrivals
        is_asked = self.parts.channel.rank == 0 and not arrivals.order_known and not self.is_cut_short
        return arrival_order(arrivals.observed, len(self.parts.parameters)) if is_asked and arrivals.observed else []

    def _take_common(self, apart: dict[int, Tensor]) -> None:
        """Leave no gradient of `apart` where another wrapper could take it for its own."""
        for index in self.parts.sharing.common & apart.keys():
            self.parts.parameters[index].grad = None

    # -- 7. wait and scale --------------------------------------------------------------------------------------

    def wait(self) -> list[Status]:
        """Wait for everything launched, and scale the sums; returns what every rank reported.

        Raises:
            CommunicationError: if a rank ended or did not come.
            HookError: if a communication hook failed here.
            DesyncError: if one failed on another rank.
        """
        parts = self.parts
        with parts.recorder.span(WAIT):
            start = time.perf_counter()
            *buckets, block = self._launched
            parts.finisher.wait(buckets, block, parts.channel, parts.control, parts.recorder)
            self.exposed_seconds = time.perf_counter() - start
        statuses = parts.control.statuses()
        notes = [status.note for status in statuses]
        for bucket in parts.storage.buckets:
            parts.finisher.scale(bucket, notes)
        return statuses

    # -- 9. averages are published ------------------------------------------------------------------------------

    def _publish(self, apart: dict[int, Tensor]) -> None:
        """Show the averages: ``p.grad`` is the bucket's view, or what came `apart`; None where no rank had any."""
        parts = self.parts
        averages = parts.storage.averages(self.held)
        parts.published.publish(averages, apart, parts.control.absent_everywhere(), self.share)
        if not parts.ledger.status.joined:  # else nothing was to be expected
            parts.arrivals.end(self.absent)
        parts.ledger.synchronized()
        self._launched.clear()
        self.held.clear()

    def _adopt_order(self) -> None:
        """Rebuild the buckets in rank 0's order of arrival, once nothing of ours refers to the old ones' memory.

        An order that is empty says that rank 0 had no data, so it is asked for again next time.
        """
        parts = self.parts
        if not parts.arrivals.order_known and (order := parts.control.order()):
            parts.storage.assign_in(order)
            parts.follow_layout()
            sizes = ", ".join(f"{bucket.flat.nbytes:,}" for bucket in parts.storage.buckets)
            logger.info("rank %d: buckets are in rank 0's order of arrival; bytes: %s", parts.channel.rank, sizes)


def _task_gone(backward: Backward | None) -> None:
    """Autograd has dropped the graph task of `backward`."""
    if backward is not None and backward.is_under_way:
        backward.is_cut_short = backward.phase is Phase.LAUNCHING
        backward.enter(Phase.ABORTED)
        if backward.on_abort is not None:
            backward.on_abort(backward)
