"""The reducer: averages gradients over the ranks while backward is still running.

    output hook ──► begin ──► gradient arrives ──► bucket complete ──► launch ─┐   (every bucket, in order)
                                                                               │
    p.grad is the bucket's view ◄── publish ◄── second pass ◄── wait ◄─────────┴── end of backward: launch
                                                                                   the rest, control block last

Every synchronized backward launches every bucket exactly once and in the same order on every rank, whatever part of
the model the rank used; a rank without a gradient contributes zero. So unused parameters can neither hang nor raise,
and the autograd graph is never searched for them. Buckets and hooks follow Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from paceline.buckets import CAPACITY, FIRST_CAPACITY, Bucket, arrival_order
from paceline.ddp.arrivals import Arrivals
from paceline.ddp.autograd import Accumulators, GraphTask, queue_callback
from paceline.ddp.channel import Channel, Launched
from paceline.ddp.control import ControlBlock, Status, scale_of
from paceline.ddp.late import launch_late, settle_late
from paceline.ddp.ledger import Ledger
from paceline.ddp.storage import BucketSet
from paceline.errors import CommunicationError, UsageError
from paceline.events import Recorder


class Phase(Enum):
    """Where the reducer is: idle → backward → settling → idle; from the two in the middle also aborted or broken."""

    IDLE = "no synchronized backward is under way"
    BACKWARD = "gradients arrive, complete buckets are launched"
    SETTLING = "everything is launched, results are waited for"
    ABORTED = "an exception ended backward; what the other ranks count on is still owed"
    BROKEN = "a collective failed"


@dataclass(frozen=True)
class Options:
    """Capacities of the first, second, … bucket in bytes, and whether gradients are checked for NaN and Inf."""

    capacities: tuple[int, ...] = (FIRST_CAPACITY, CAPACITY)
    check_finite: bool = False


class Reducer:
    """Owns the buckets of one wrapper and carries each synchronized backward from its start to its end."""

    sync_enabled: bool
    """False inside ``no_sync``: a backward that starts now stays local."""
    exposed_seconds: float
    """Time waited for communication at the end of backwards, in seconds, since the wrapper was made."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        channel: Channel,
        ledger: Ledger,
        options: Options,
        recorder: Recorder,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.sync_enabled = True
        self.exposed_seconds = 0.0
        self.storage = BucketSet(self.names, self.parameters, options.capacities, channel)
        self._channel, self._ledger, self._options, self._recorder = channel, ledger, options, recorder
        self._control = ControlBlock(self.names, channel.rank, channel.size, channel.allocate)
        self._phase = Phase.IDLE
        self._aborted = False
        self._order_known = False
        self._accumulators = Accumulators(self.parameters)
        self._arrivals = Arrivals(self.parameters, self._hooked)
        self._arrivals.use_layout(self.storage.layout, order_known=False)
        self._arrivals.begin(clear=True)

    def restore_layout(self, layout: list[list[str]]) -> None:
        """Take over a checkpoint's layout, by parameter names, instead of observing the order of arrival.

        Raises:
            CheckpointMismatch: if it does not fit this model.
        """
        self.storage.use_named(layout)
        self._order_known = True
        self._arrivals.observed = []
        self._arrivals.use_layout(self.storage.layout, order_known=True)

    # -- 1. backward starts -------------------------------------------------------------------------------------

    def watch(self, outputs: Sequence[Tensor], on_local: Callable[[], None]) -> None:
        """Hook the outputs of a forward: the first sign of its backward, before any gradient of ours is there.

        `on_local` is called if that backward turns out to be local, inside ``no_sync``.
        """
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(partial(self._output_hook, on_local))

    def _output_hook(self, on_local: Callable[[], None], _gradient: Tensor) -> None:
        if self._phase in (Phase.BACKWARD, Phase.SETTLING) or not self._accumulators.are_meant():
            return
        self.settle_aborted()
        self._ledger.backward_began()
        if not self.sync_enabled:
            on_local()
            return
        self._begin()
        self._queue_finish()

    def _begin(self) -> None:
        self._phase = Phase.BACKWARD
        self._works: list[Launched] = []
        self._absent: list[int] = []
        self._non_finite: list[int] = []
        self._held: dict[int, Tensor] = {}
        self._clear = all(parameter.grad is None for parameter in self.parameters)
        self._arrivals.begin(clear=self._clear)
        self._finishing = self._finish()

    def _queue_finish(self) -> None:
        """Have autograd run the end of backward, part by part.

        Between the parts the callbacks of other wrappers run. So all wrappers launch everything before one of them
        waits, and ranks that end their wrappers in different order do not wait for each other in a circle.
        """
        task = GraphTask()
        self._task = weakref.ref(task, self._task_gone)
        queue_callback(partial(self._advance_and_queue, task))

    def _advance_and_queue(self, task: GraphTask) -> None:
        if self._advance():
            queue_callback(partial(self._advance_and_queue, task))

    @torch.no_grad()
    def _advance(self) -> bool:
        return next(self._finishing, False)

    # -- 2. gradients arrive ------------------------------------------------------------------------------------

    def _hooked(self, index: int, _parameter: Tensor) -> None:
        """A gradient was accumulated into parameter `index`."""
        if not self.sync_enabled:
            return
        if self._phase not in (Phase.BACKWARD, Phase.SETTLING):
            # Forward went past the wrapper (model.module.loss(…)): begin here. Gradients that came unnoticed
            # before are found at the end, as nothing is launched that has not been seen.
            self.settle_aborted()
            self._begin()
            self._queue_finish()
        self._arrivals.arrived(index)
        while len(self._works) < len(self.storage) and self._arrivals.complete(len(self._works)):
            self._launch(self.storage.buckets[len(self._works)])
        self._channel.progress()

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        """Move the gradients in, free the parameters' own, and hand the bucket to communication."""
        with self._recorder.span("launch"):
            sources, targets = [], []
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                gradient = self.parameters[index].grad
                if gradient is None:
                    self._absent.append(index)
                    view.zero_()
                    continue
                if gradient is not view:
                    self._expect_dense(index, gradient)
                    sources.append(gradient)
                    targets.append(view)
                    if not self._clear:
                        self._held[index] = gradient
                self.parameters[index].grad = None
            if sources:
                torch._foreach_copy_(targets, sources)
            if self._options.check_finite and not torch.isfinite(bucket.flat.sum()):
                pairs = zip(bucket.indices, bucket.views, strict=True)
                self._non_finite += [index for index, view in pairs if not torch.isfinite(view).all()]
            self._works.append(self._channel.all_reduce(bucket.flat, self._ledger.status.note))

    def _expect_dense(self, index: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"rank {self._channel.rank}: parameter {self.names[index]!r} has a {gradient.layout} gradient, which "
                "buckets cannot hold; build its layer with sparse=False"
            )

    # -- 3. end of backward -------------------------------------------------------------------------------------

    def _finish(self) -> Iterator[bool]:
        """The end of a synchronized backward; pauses where the callbacks of other wrappers may go first."""
        try:
            mine_late = self._launch_rest()
            yield True
            statuses = self._wait()
            late = launch_late(self._control.late(), mine_late, self.storage.views, self._channel)
            order = None if self._order_known else self._launch_order()
            if late or order:
                yield True
                settle_late(late, self.storage.views, _scale(statuses), self._channel)
        except BaseException:  # KeyboardInterrupt, too: the others' collectives are not met any more
            self._phase = Phase.BROKEN
            raise
        self._publish()
        if order:
            self._adopt_order(*order)
        self._phase = Phase.IDLE
        self._control.check(statuses)

    def _launch_rest(self) -> dict[int, Tensor]:
        """Launch what is left, then the control block; returns this rank's late deltas by parameter."""
        early = len(self._works)
        for bucket in self.storage.buckets[early:]:
            self._launch(bucket)
        late: dict[int, Tensor] = {}
        for bucket in self.storage.buckets[:early]:
            for index in bucket.indices:
                if (gradient := self.parameters[index].grad) is not None:
                    late[index] = gradient
        # A late gradient is a present one, too: its parameter must not end as None.
        self._absent = [index for index in self._absent if index not in late]
        block = self._control.fill(
            self._absent, self._non_finite, list(late), self._ledger.report(aborted=self._aborted)
        )
        self._works.append(self._channel.all_reduce(block))
        self._phase = Phase.SETTLING
        return late

    def _wait(self) -> list[Status]:
        """Wait for everything launched, and scale the sums."""
        with self._recorder.span("wait"):
            start = time.perf_counter()
            for at, work in enumerate(self._works):
                what = f"all-reduce of gradient bucket {at}" if at < len(self.storage) else "exchange of control blocks"
                self._channel.wait(work, what)
            self.exposed_seconds += time.perf_counter() - start
        statuses = self._control.statuses()
        if not self._channel.scales:
            torch._foreach_mul_([bucket.flat for bucket in self.storage.buckets], _scale(statuses))
        return statuses

    def _launch_order(self) -> tuple[Tensor, Launched]:
        """Send rank 0's order of arrival to all, as a sum to which only rank 0 contributes."""
        order = torch.zeros(len(self.parameters), dtype=torch.int64)
        if self._channel.rank == 0 and self._arrivals.observed:
            order += torch.tensor(arrival_order(self._arrivals.observed, len(order))) + 1
        return order, self._channel.all_reduce(order)

    def _adopt_order(self, order: Tensor, launched: Launched) -> None:
        """Rebuild the buckets in rank 0's order; all zeros say that it had no data, so try again next time."""
        self._channel.wait(launched, "exchange of the order of arrival")
        if order.any():
            self._order_known = True
            self.storage.assign_in((order - 1).tolist())
            self._arrivals.use_layout(self.storage.layout, order_known=True)

    def _publish(self) -> None:
        """Show the averages: ``p.grad`` is the bucket's view, or None where no rank had a gradient."""
        for parameter, view in zip(self.parameters, self.storage.views, strict=True):
            parameter.grad = view
        for index in self._control.absent_everywhere():
            self.parameters[index].grad = None
        self._arrivals.end(self._absent)
        self._held = {}
        self._ledger.synchronized()

    # -- without a backward, and after one that failed ----------------------------------------------------------

    def synchronize(self) -> None:
        """Average what ``p.grad`` holds now, without a backward; a parameter without gradient counts as zero."""
        self.settle_aborted()
        self._begin()
        while self._advance():
            pass

    def _task_gone(self, _: object) -> None:
        """Autograd dropped the graph task. If backward has not come to its end, an exception ended it."""
        if self._phase not in (Phase.BACKWARD, Phase.SETTLING):
            return
        self._owes_launch = self._phase is Phase.BACKWARD
        self._phase = Phase.ABORTED
        for index, parameter in enumerate(self.parameters):
            if self._clear:
                parameter.grad = None
            elif index in self._held:
                parameter.grad = self._held[index]

    def settle_aborted(self) -> None:
        """Take part in what the other ranks wait for since this rank's backward was ended by an exception.

        They learn of it from the control block, and raise; here the exception has been seen already.

        Raises:
            CommunicationError: if a collective has failed before, or fails now.
        """
        if self._phase is Phase.BROKEN:
            raise CommunicationError(
                f"rank {self._channel.rank}: a step of this model has failed in the middle before, so ranks no longer "
                "agree on where they are; start again from the last checkpoint"
            )
        if self._phase is not Phase.ABORTED:
            return
        gradients = [parameter.grad for parameter in self.parameters]
        self._phase = Phase.BACKWARD if self._owes_launch else Phase.SETTLING
        self._aborted = self._owes_launch
        try:
            for parameter in self.parameters:
                parameter.grad = None
            while self._advance():
                pass
        finally:
            self._aborted = False
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient

    def local_gradient(self) -> str | None:
        """The name of a parameter whose gradient is this rank's own, not an average; None if there is none."""
        for name, parameter, view in zip(self.names, self.parameters, self.storage.views, strict=True):
            if parameter.grad is not None and parameter.grad is not view:
                return name
        return None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        self._arrivals.close()


def _scale(statuses: Sequence[Status]) -> float:
    return scale_of([status.note for status in statuses])
