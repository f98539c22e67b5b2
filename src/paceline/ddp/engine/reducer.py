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

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from paceline.buckets import arrival_order
from paceline.ddp.agreement.control_block import ControlBlock
from paceline.ddp.agreement.join_events import Event, JoinEvents
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.agreement.weighting import scale_of
from paceline.ddp.config import Options
from paceline.ddp.consistency.buffer_sync import BufferSync
from paceline.ddp.consistency.gradient_check import expect_equal_gradients
from paceline.ddp.consistency.replica_check import ReplicaCheck
from paceline.ddp.consistency.unused_parameters import UnusedReport
from paceline.ddp.engine.arrivals import Arrivals
from paceline.ddp.engine.backward import Backward, Gear
from paceline.ddp.engine.bucket_set import BucketSet
from paceline.ddp.engine.concurrent_wrappers import begin_others, enter, settle_all
from paceline.ddp.engine.gradient_engine import GradientEngine
from paceline.ddp.engine.new_parameters import Newcomers, Settled
from paceline.ddp.engine.optimizer_in_backward import InBackward
from paceline.ddp.engine.pending_forwards import Forward, Forwards
from paceline.ddp.engine.published_gradients import Shown
from paceline.ddp.engine.second_pass import average_apart
from paceline.ddp.engine.shared_parameters import Share, Sharing
from paceline.ddp.transport.channel import Channel
from paceline.ddp.transport.finisher import Algorithms, AllReduce, Finisher
from paceline.errors import CommunicationError, ReplicaMismatch, UsageError
from paceline.torch_internals.autograd import Accumulators, GraphTask, queue_callback
from paceline.torch_internals.compile import class_never_compiled, expect_eager_backward
from paceline.torch_internals.dtensor import as_local, release
from paceline.tracing import Recorder


class Phase(Enum):
    """Where the reducer is: idle → backward → settling → idle; from the two in the middle also aborted or broken."""

    IDLE = "no synchronized backward is under way"
    BACKWARD = "gradients arrive, complete buckets are launched"
    SETTLING = "everything is launched, results are waited for"
    ABORTED = "an exception ended backward; what the other ranks count on is still owed"
    BROKEN = "a collective failed"


@class_never_compiled
class Reducer(GradientEngine):
    """Owns the buckets of one wrapper and carries each synchronized backward from its start to its end."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        channel: Channel,
        ledger: Ledger,
        options: Options,
        recorder: Recorder,
        newcomers: Newcomers,
        buffers: BufferSync,
        *,
        join_events: JoinEvents,
        replica_check: ReplicaCheck | None,
    ) -> None:
        self._name(named_parameters)
        self.storage = BucketSet(
            self.names,
            self.parameters,
            options.capacities,
            channel,
            newcomers.watch.sparse(self._given),
            options.reduce_dtype,
        )
        self.sync_enabled = True
        self.exposed_seconds = 0.0
        self._join_events = join_events
        self._channel, self._ledger = channel, ledger
        self._options, self._newcomers, self._buffers = options, newcomers, buffers
        self.sharing = Sharing(self.names, self._given, self.parameters, ledger, channel.members)
        self._control = ControlBlock(self.names, channel.rank, channel.size, channel.allocate)
        self._gear = Gear(
            self.names,
            self.parameters,
            self.storage,
            channel,
            ledger,
            self._control,
            recorder,
            options.check_finite,
            AllReduce(Algorithms(channel, options.algorithm) if options.algorithm else channel, ledger),
            self.sharing,
        )
        self.replica_check = replica_check
        self._phase = Phase.IDLE
        self._aborted = self._owes_launch = self._is_settling_abort = False
        self._forwards = Forwards(ledger, self.backward_reached)
        self._task: weakref.ref[GraphTask] | None = None
        self._backward = Backward(self._gear, clear=True)
        self._finishing: Iterator[bool] = iter(())
        self._expect_all()
        enter(self)

    def _name(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._given = [parameter for _, parameter in named_parameters]
        self._local = [as_local(parameter) for parameter in self._given]
        self.parameters = list(self._local)
        self.names = [name for name, _ in named_parameters]

    def _expect_all(self) -> None:
        """Wait for the gradients of all parameters, in an order of arrival that is not known yet."""
        self._shown = Shown(self.names, self.parameters, self.storage, self.sharing)
        self._unused = UnusedReport(self._options.unused, self.names, self.parameters, self._channel)
        self._in_backward, self._accumulators = InBackward(self._given), Accumulators(self._given)
        self._order_known = False
        self._arrivals = Arrivals(self.parameters, self._hooked)
        self._arrivals.use_layout(self.storage.layout, order_known=False)
        self._arrivals.begin(clear=True)

    def restore_layout(self, layout: list[list[str]]) -> None:
        """Take over a checkpoint's layout, by parameter names, instead of observing the order of arrival.

        Raises:
            CheckpointMismatch: if it does not fit this model.
        """
        self.settle_aborted()
        self.storage.use_named(layout)
        self._order_known = True
        self._control.forget_order()
        self._arrivals.observed = []
        self._arrivals.use_layout(self.storage.layout, order_known=True)

    def check_finite(self, enabled: bool) -> None:
        """Look for NaN and Inf in gradients, or not, from the next backward on."""
        self._gear = replace(self._gear, check_finite=enabled)

    def finish_with(self, finisher: Finisher) -> None:
        """Let `finisher` take the place of the buckets' all-reduce, from the next backward on; on all ranks alike."""
        self.settle_aborted()
        self._gear = replace(self._gear, finisher=finisher)

    # -- 1. backward starts -------------------------------------------------------------------------------------

    def watch_outputs(self, outputs: Sequence[Tensor], on_local: Callable[[], None]) -> None:
        """Hook the outputs of a forward: the first sign of its backward, before any gradient of ours is there.

        `on_local` is called if that backward turns out to be local, inside ``no_sync``.
        """
        self._in_backward.take_over()
        self._forwards.watch(outputs, on_local, self._ledger.forward_in_block())

    def backward_reached(self, on_local: Callable[[], None], forward: Forward | None, _gradient: Tensor) -> None:
        """A backward has reached an output of the wrapper."""
        expect_eager_backward(self._channel.rank)
        block = forward.block if forward is not None else None
        if self._is_under_way:
            self._ledger.expect_one_mean(block)
        elif self._is_meant():
            self.settle_aborted()
            try:
                self._ledger.backward_began(block)
                self._ledger.forget_dropped(self.parameters, in_backward=True)
                if self.sync_enabled:
                    self._begin_in_task()
                else:
                    self._stay_local(on_local)
            finally:
                begin_others(self)
        self._forwards.came(forward)
        if self._phase is Phase.IDLE and torch.is_grad_enabled():  # autograd.grad(…, create_graph=True)
            self._arrivals.hook_all()

    @property
    def tell(self) -> Callable[[Event], bool] | None:
        """Inside ``join``, tells ranks that ran out of data how this backward goes; returns whether there are any."""
        return self._join_events.tell if self._join_events.is_active else None

    def connected(self) -> Reducer:
        """Return this reducer."""
        return self

    def bucket_bytes(self) -> list[int]:
        """Size of each bucket, in the order of launch."""
        return [bucket.flat.numel() * bucket.flat.element_size() for bucket in self.storage.buckets]

    def named_layout(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order of launch."""
        return self.storage.named_layout()

    def _stay_local(self, on_local: Callable[[], None]) -> None:
        self.sharing.expect_no_average()
        self._ledger.local_backwards += 1
        on_local()
        if self.tell is not None:
            queue_callback(partial(self.tell, Event.LOCAL))

    def is_expected(self) -> bool:
        """Whether the backward under way is going to reach a forward of this wrapper, and to be synchronized."""
        if self._phase is not Phase.IDLE or not self.sync_enabled or not self._forwards:
            return False
        self._look_for_newcomers()
        return self._accumulators.are_reached(self.sharing.common)

    def begin_early(self) -> None:
        """Begin in a backward that has reached another wrapper first, so that an exception ends both alike."""
        self._ledger.backward_began()
        self._ledger.forget_dropped(self.parameters, in_backward=True)
        self._begin_in_task()

    def _begin_in_task(self) -> None:
        self._begin()
        self._queue_finish()

    def _begin(self) -> None:
        self._channel.expect_open()
        share = self.sharing.begin()
        try:
            self._expect_no_optimizer_inside(share)
            shadowed = self.tell is not None and self.tell(Event.BACKWARD)
            self._look_for_newcomers()
            self._newcomers.begin()
        except BaseException:
            self.sharing.abort(share)
            raise
        self._phase = Phase.BACKWARD
        self._forwards.is_unseen = False
        self._in_backward.take_over()  # where no forward has, as in a copy that has just woken up
        clear = all(parameter.grad is None for parameter in self.parameters)
        at_end = self._gear.finisher.launches_at_end(shadowed=shadowed)
        self._backward = Backward(self._gear, clear, share, at_end)
        self._arrivals.begin(clear=clear and not share.elsewhere, hook_all=self._forwards.are_differentiated)
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

    @property
    def _is_under_way(self) -> bool:
        return self._phase in (Phase.BACKWARD, Phase.SETTLING)

    @property
    def _is_launching(self) -> bool:
        return self._phase is Phase.BACKWARD

    # -- 2. gradients arrive ------------------------------------------------------------------------------------

    def _hooked(self, index: int, parameter: Tensor) -> None:
        """A gradient was accumulated into parameter `index`."""
        if not self.sync_enabled:
            return
        if not self._is_under_way:
            # A backward of something else than this wrapper's outputs, which is meant if a forward waits for it.
            # Gradients that came unnoticed before are found at the end, as nothing is launched that was not seen.
            is_mine = index not in self.sharing.common or self._forwards.are_differentiated
            is_meant = self._forwards.is_unseen or (self._forwards and is_mine)
            if not is_meant or self.sharing.is_partner_active:
                return
            self.backward_reached(_nothing, None, parameter)
            if not self._is_launching:
                return
        self._arrivals.arrived(index)
        backward, buckets = self._backward, self.storage.buckets
        while not backward.at_end and backward.next < len(buckets) and self._arrivals.complete(backward.next):
            backward.launch(buckets[backward.next])
        self._channel.progress()

    # -- 3. end of backward -------------------------------------------------------------------------------------

    def _finish(self) -> Iterator[bool]:
        """The end of a synchronized backward; pauses where the callbacks of other wrappers may go first."""
        backward = self._backward
        try:
            if self.tell is not None:
                self.tell(Event.END)
            self._ledger.status.changed = self._newcomers.have_gradients()
            mine = backward.launch_rest(aborted=self._aborted, order=self._observed_order())
            self._buffers.launch()
            self.sharing.launched(backward.absent)
            self._phase = Phase.SETTLING
            yield True
            statuses = backward.wait()
            self._buffers.settle()
            self.exposed_seconds += backward.exposed_seconds
            scale = scale_of([one.note for one in statuses])
            apart = yield from average_apart(self._gear, mine, scale)
            new = yield from self._newcomers.settle(statuses, scale, self._gear)
            unused = yield from self._unused.look(self._control.missing_somewhere(statuses), backward.absent)
            drift = None
            if self.replica_check is not None:
                drift = yield from self.replica_check.run(statuses)
            self._publish(apart)
            if not self._order_known:
                self._adopt_order(self._control.order())
        except BaseException:  # KeyboardInterrupt, too: the others' collectives are not met any more
            self._phase = Phase.BROKEN
            raise
        self._phase = Phase.IDLE
        self.sharing.end()
        if self._is_settling_abort:  # the exception that ended this backward has been seen
            return
        self._control.check(statuses)
        self._unused.say(unused)
        if drift is not None:
            raise ReplicaMismatch(drift)
        if new is not None:
            self._take_in(new)
        if not any(one.aborted for one in statuses):
            self._in_backward.step(self._ledger)

    def _observed_order(self) -> list[int]:
        """Rank 0's order of arrival, for the first backward's control block; empty if there is none to tell."""
        if self._channel.rank != 0 or self._order_known or self._aborted or not self._arrivals.observed:
            return []
        return arrival_order(self._arrivals.observed, len(self.parameters))

    def _adopt_order(self, order: list[int]) -> None:
        """Rebuild the buckets in rank 0's order; an empty one says that it had no data, so try again next time."""
        if order:
            self._order_known = True
            self._control.forget_order()
            self.storage.assign_in(order)
            self._arrivals.use_layout(self.storage.layout, order_known=True)

    def _publish(self, apart: dict[int, Tensor]) -> None:
        """Show the averages: ``p.grad`` is the bucket's view, or what came `apart`; None where no rank had any."""
        averages = self.storage.averages(self._backward.held)
        self._shown.show(averages, apart, self._control.absent_everywhere(), self._backward.share)
        if not self._ledger.status.joined:  # else nothing was to be expected
            self._arrivals.end(self._backward.absent)
        self._backward = Backward(self._gear, clear=True)  # what was launched, and what hooks returned, is let go
        self._ledger.synchronized()

    # -- parameters that the module got after it was wrapped, see paceline.ddp.engine.module_changes ---------------

    def _is_meant(self) -> bool:
        self._look_for_newcomers()  # first, as all that trains may be new
        return self._accumulators.are_meant()

    def _look_for_newcomers(self) -> None:
        if self._newcomers.look():
            together = [*self._given, *self._newcomers.parameters()]
            self._in_backward, self._accumulators = InBackward(together), Accumulators(together)
            pairs = zip(self._given, self._local, strict=True)
            self.parameters[:] = [self._newcomers.stand_in(given, local) for given, local in pairs]

    def _take_in(self, new: Settled) -> None:
        """Average from now on what the module has now."""
        named = self._newcomers.accept(new)
        self._phase = Phase.BROKEN  # until all is in its place
        self._release()
        self._name(named)
        self.storage.use_parameters(self.names, self.parameters, self._newcomers.watch.sparse(self._given))
        self._channel.free(self._control.vector)
        self._control = ControlBlock(self.names, self._channel.rank, self._channel.size, self._channel.allocate)
        self.sharing = self.sharing.renewed(self.names, self._given, self.parameters)
        self._gear = replace(
            self._gear, names=self.names, parameters=self.parameters, control=self._control, sharing=self.sharing
        )
        self._backward = Backward(self._gear, clear=True)
        self._expect_all()
        gradients = ((index, parameter.grad) for index, parameter in enumerate(self.parameters))
        self._shown.note({index: gradient for index, gradient in gradients if gradient is not None})
        self._phase = Phase.IDLE

    # -- without a backward, and after one that failed ----------------------------------------------------------

    def synchronize(self) -> None:
        """Average what ``p.grad`` holds now, without a backward; a parameter without gradient counts as zero."""
        self.settle_aborted()
        self._ledger.forget_dropped(self.parameters, in_backward=False)
        self._begin()
        self.finish()

    def launch_all(self) -> None:
        """Begin to average what ``p.grad`` holds now; :meth:`finish` is due later, and launches what is to wait."""
        self._begin()
        if not self._backward.at_end:
            self._advance()

    def finish(self) -> None:
        """Carry a synchronization to its end."""
        while self._advance():
            pass

    def _task_gone(self, _: object) -> None:
        """Autograd dropped the graph task. If backward has not come to its end, an exception ended it."""
        if not self._is_under_way:
            return
        self._owes_launch = self._is_launching
        self._phase = Phase.ABORTED
        for index, parameter in enumerate(self.parameters):
            if index in self._backward.share.elsewhere:
                continue
            if self._backward.clear:
                parameter.grad = None
            elif index in self._backward.held:
                parameter.grad = self._backward.held[index]
        self._newcomers.restore()
        self._backward.held.clear()  # these keep their values while the others' collectives are met
        self.sharing.abort(self._backward.share)

    @property
    def is_aborted(self) -> bool:
        """Whether an exception ended a backward, of which peers still wait for this rank's part."""
        return self._phase is Phase.ABORTED

    def settle_aborted(self) -> None:
        """Take part in what the other ranks wait for since this rank's backward was ended by an exception.

        So do all wrappers that it ran through. The other ranks learn of it from the control block, and raise.

        Raises:
            CommunicationError: if a collective has failed before, or fails now.
        """
        if self._phase is Phase.BROKEN:
            raise CommunicationError(
                f"rank {self._channel.rank}: a step of this model has failed in the middle before, so ranks no longer "
                "agree on where they are; start again from the last checkpoint"
            )
        settle_all()

    def settle(self) -> Generator[None, None, None]:
        """Carry the backward that an exception ended to its end: launch what is owed, pause, then wait."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._phase = Phase.BACKWARD if self._owes_launch else Phase.SETTLING
        self._aborted, self._is_settling_abort = self._owes_launch, True
        try:
            for parameter in self.parameters:
                parameter.grad = None
            if self._owes_launch:
                self._advance()
            yield  # the other wrappers launch, too
            self.finish()
            yield  # the gradients stay away until the others have finished, too
        finally:
            self._aborted = self._is_settling_abort = False
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient

    def _expect_no_optimizer_inside(self, share: Share) -> None:
        inside = bool(self._in_backward) or self._gear.finisher.steps_inside
        if inside and share.elsewhere:
            name = self.names[min(share.elsewhere)]
            raise UsageError(
                f"one backward runs through two DistributedDataParallel that share {name!r}, and an optimizer steps "
                "inside it, which would see only one's part; use an optimizer outside of backward"
            )

    def expect_idle(self) -> None:
        """Refuse to go on where a backward has not come to its end.

        Raises:
            UsageError: says where the backward is.
        """
        if self._phase is not Phase.IDLE:
            raise UsageError(f"rank {self._channel.rank}: the last backward has not ended: {self._phase.value}")

    def expect_equal(self) -> None:
        """Refuse gradients that are not the same on every rank.

        Raises:
            UsageError: names one that differs, or says that a backward has not ended.
        """
        self.settle_aborted()
        self.expect_idle()
        expect_equal_gradients(self.names, self.parameters, self._channel)

    def local_gradient(self) -> str | None:
        """The name of a parameter whose gradient the wrapper has not averaged; None if there is none."""
        return self._shown.local_gradient()

    def close(self) -> None:
        """Take the hooks off the parameters, and let go of what refers back to the reducer."""
        self._release()
        self._newcomers.close()
        self._forwards.close()
        self.sharing.close()
        self._task = None

    def _release(self) -> None:
        self._arrivals.close()
        for parameter in self._local:
            release(parameter)


def _nothing() -> None:
    """For a backward that began without an output."""
