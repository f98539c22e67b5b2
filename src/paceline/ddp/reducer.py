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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from paceline.buckets import arrival_order
from paceline.compiling import class_never_compiled, expect_eager_backward
from paceline.ddp.apart import average_apart
from paceline.ddp.arrivals import Arrivals
from paceline.ddp.autograd import Accumulators, GraphTask, queue_callback
from paceline.ddp.backward import Backward, Gear
from paceline.ddp.by_algorithm import Algorithms
from paceline.ddp.channel import Channel, Launched
from paceline.ddp.control import ControlBlock, scale_of
from paceline.ddp.finisher import AllReduce, Finisher
from paceline.ddp.in_backward import InBackward
from paceline.ddp.ledger import Ledger
from paceline.ddp.newcomers import Newcomers, Settled
from paceline.ddp.options import Options
from paceline.ddp.replica_check import ReplicaCheck
from paceline.ddp.shadowing import Event
from paceline.ddp.sharded import as_local, release
from paceline.ddp.sparse import elements_of
from paceline.ddp.storage import BucketSet
from paceline.ddp.unused import UnusedReport
from paceline.errors import CommunicationError, ReplicaMismatch, UsageError
from paceline.events import Recorder


class Phase(Enum):
    """Where the reducer is: idle → backward → settling → idle; from the two in the middle also aborted or broken."""

    IDLE = "no synchronized backward is under way"
    BACKWARD = "gradients arrive, complete buckets are launched"
    SETTLING = "everything is launched, results are waited for"
    ABORTED = "an exception ended backward; what the other ranks count on is still owed"
    BROKEN = "a collective failed"


@class_never_compiled
class Reducer:
    """Owns the buckets of one wrapper and carries each synchronized backward from its start to its end."""

    sync_enabled: bool
    """False inside ``no_sync``: a backward that starts now stays local."""
    exposed_seconds: float
    """Time waited for communication at the end of backwards, in seconds, since the wrapper was made."""
    tell: Callable[[Event], None] | None
    """Inside ``join``, tells ranks that ran out of data how this rank's backward goes."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        channel: Channel,
        ledger: Ledger,
        options: Options,
        recorder: Recorder,
        newcomers: Newcomers,
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
        self.tell = None
        self._channel, self._ledger = channel, ledger
        self._options, self._newcomers = options, newcomers
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
        )
        self.replica_check: ReplicaCheck | None = None
        self._phase = Phase.IDLE
        self._aborted = self._owes_launch = False
        self._task: weakref.ref[GraphTask] | None = None
        self._backward = Backward(self._gear, clear=True)
        self._finishing: Iterator[bool] = iter(())
        # Averages that are no bucket's view; weak, as a gradient's memory goes when the user drops it.
        self._apart: dict[int, weakref.ref[Tensor]] = {}
        self._expect_all()

    def _name(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._given = [parameter for _, parameter in named_parameters]
        self._local = [as_local(parameter) for parameter in self._given]
        self.parameters = list(self._local)
        self.names = [name for name, _ in named_parameters]

    def _expect_all(self) -> None:
        """Wait for the gradients of all parameters, in an order of arrival that is not known yet."""
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
        self._arrivals.observed = []
        self._arrivals.use_layout(self.storage.layout, order_known=True)

    def finish_with(self, finisher: Finisher) -> None:
        """Let `finisher` take the place of the buckets' all-reduce, from the next backward on; on all ranks alike."""
        self.settle_aborted()
        self._gear = replace(self._gear, finisher=finisher)

    # -- 1. backward starts -------------------------------------------------------------------------------------

    def watch(self, outputs: Sequence[Tensor], on_local: Callable[[], None]) -> None:
        """Hook the outputs of a forward: the first sign of its backward, before any gradient of ours is there.

        `on_local` is called if that backward turns out to be local, inside ``no_sync``.
        """
        self._in_backward.take_over()
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(partial(self.backward_reached, on_local))

    def backward_reached(self, on_local: Callable[[], None], _gradient: Tensor) -> None:
        """A backward has reached an output of the wrapper."""
        expect_eager_backward(self._channel.rank)
        if self._phase in (Phase.BACKWARD, Phase.SETTLING):
            return
        self._look_for_newcomers()  # first, as all that trains may be new
        if not self._accumulators.are_meant():
            return
        self.settle_aborted()
        self._ledger.backward_began()
        self._ledger.forget_dropped(self.parameters, in_backward=True)
        if not self.sync_enabled:
            self._ledger.local_backwards += 1
            on_local()
            if self.tell is not None:
                queue_callback(partial(self.tell, Event.LOCAL))
            return
        self._begin()
        self._queue_finish()

    def _begin(self) -> None:
        if self.tell is not None:
            self.tell(Event.BACKWARD)
        self._look_for_newcomers()
        self._newcomers.begin()
        self._phase = Phase.BACKWARD
        self._in_backward.take_over()  # where no forward has, as in a copy that has just woken up
        clear = all(parameter.grad is None for parameter in self.parameters)
        self._backward = Backward(self._gear, clear)
        self._arrivals.begin(clear=clear)
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
            expect_eager_backward(self._channel.rank)
            self.settle_aborted()
            self._begin()
            self._queue_finish()
        self._arrivals.arrived(index)
        backward, buckets = self._backward, self.storage.buckets
        while backward.next < len(buckets) and self._arrivals.complete(backward.next):
            backward.launch(buckets[backward.next])
        self._channel.progress()

    # -- 3. end of backward -------------------------------------------------------------------------------------

    def _finish(self) -> Iterator[bool]:
        """The end of a synchronized backward; pauses where the callbacks of other wrappers may go first."""
        backward = self._backward
        try:
            self._ledger.status.changed = self._newcomers.have_gradients()
            mine = backward.launch_rest(aborted=self._aborted)
            if self.tell is not None:
                self.tell(Event.END)
            self._phase = Phase.SETTLING
            yield True
            statuses = backward.wait()
            self.exposed_seconds += backward.exposed_seconds
            scale = scale_of([one.note for one in statuses])
            order = None if self._order_known else self._launch_order()
            if order:
                yield True
            apart = yield from average_apart(self._gear, mine, scale)
            new = yield from self._newcomers.settle(statuses, scale, self._gear)
            unused = yield from self._unused.look(self._control.missing_somewhere(statuses), backward.absent)
            drift = None
            if self.replica_check is not None:
                drift = yield from self.replica_check.run(statuses)
            self._publish(apart)
            if order:
                self._adopt_order(*order)
        except BaseException:  # KeyboardInterrupt, too: the others' collectives are not met any more
            self._phase = Phase.BROKEN
            raise
        self._phase = Phase.IDLE
        self._control.check(statuses)
        self._unused.say(unused)
        if drift is not None:
            raise ReplicaMismatch(drift)
        if new is not None:
            self._take_in(new)
        if not any(one.aborted for one in statuses):
            self._in_backward.step(self._ledger)

    def _launch_order(self) -> tuple[Tensor, Launched]:
        """Send rank 0's order of arrival to all, as a sum to which only rank 0 contributes."""
        order = torch.zeros(len(self.parameters), dtype=torch.int64)
        if self._channel.rank == 0 and self._arrivals.observed and not self._aborted:
            order += torch.tensor(arrival_order(self._arrivals.observed, len(order))) + 1
        return order, self._channel.all_reduce(order)

    def _adopt_order(self, order: Tensor, launched: Launched) -> None:
        """Rebuild the buckets in rank 0's order; all zeros say that it had no data, so try again next time."""
        self._channel.wait(launched, "exchange of the order of arrival")
        if order.any():
            self._order_known = True
            self.storage.assign_in((order - 1).tolist())
            self._arrivals.use_layout(self.storage.layout, order_known=True)

    def _publish(self, apart: dict[int, Tensor]) -> None:
        """Show the averages: ``p.grad`` is the bucket's view, or what came `apart`; None where no rank had any."""
        self._apart = {index: weakref.ref(average) for index, average in apart.items()}
        for index, average in enumerate(self.storage.averages()):
            if index not in self.storage.outside:
                self.parameters[index].grad = average
        for index, average in apart.items():
            self.parameters[index].grad = average
        for index in self._control.absent_everywhere():
            self.parameters[index].grad = None
        if not self._ledger.status.joined:  # else nothing was to be expected
            self._arrivals.end(self._backward.absent)
        self._backward = Backward(self._gear, clear=True)  # what was launched, and what hooks returned, is let go
        self._ledger.synchronized()

    # -- parameters that the module got after it was wrapped, see paceline.ddp.module_changes -----------------------

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
        shown = [(index, parameter.grad) for index, parameter in enumerate(self.parameters)]
        self._apart = {index: weakref.ref(gradient) for index, gradient in shown if gradient is not None}
        self._channel.free(self._control.vector)
        self._control = ControlBlock(self.names, self._channel.rank, self._channel.size, self._channel.allocate)
        self._gear = replace(self._gear, names=self.names, parameters=self.parameters, control=self._control)
        self._backward = Backward(self._gear, clear=True)
        self._expect_all()
        self._phase = Phase.IDLE

    # -- without a backward, and after one that failed ----------------------------------------------------------

    def synchronize(self) -> None:
        """Average what ``p.grad`` holds now, without a backward; a parameter without gradient counts as zero."""
        self.settle_aborted()
        self._ledger.forget_dropped(self.parameters, in_backward=False)
        self._begin()
        self.finish()

    def launch_all(self) -> None:
        """Begin to average what ``p.grad`` holds now; :meth:`finish` is due later."""
        self._begin()
        self._advance()

    def finish(self) -> None:
        """Carry a synchronization to its end."""
        while self._advance():
            pass

    def _task_gone(self, _: object) -> None:
        """Autograd dropped the graph task. If backward has not come to its end, an exception ended it."""
        if self._phase not in (Phase.BACKWARD, Phase.SETTLING):
            return
        self._owes_launch = self._phase is Phase.BACKWARD
        self._phase = Phase.ABORTED
        for index, parameter in enumerate(self.parameters):
            if self._backward.clear:
                parameter.grad = None
            elif index in self._backward.held:
                parameter.grad = self._backward.held[index]
        self._newcomers.restore()

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

    def expect_idle(self) -> None:
        """Refuse to go on where a backward has not come to its end.

        Raises:
            UsageError: says where the backward is.
        """
        if self._phase is not Phase.IDLE:
            raise UsageError(f"rank {self._channel.rank}: the last backward has not ended: {self._phase.value}")

    def local_gradient(self) -> str | None:
        """The name of a parameter whose gradient is this rank's own, not an average; None if there is none.

        Zeros do not count: torch sets them itself, to have an optimizer make its state.
        """
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            gradient = parameter.grad
            if gradient is None or self.storage.is_average(index, gradient):
                continue
            if index in self._apart and gradient is self._apart[index]():
                continue
            if bool(elements_of(gradient).any()):
                return name
        return None

    def close(self) -> None:
        """Take the hooks off the parameters, and let go of what refers back to the reducer."""
        self._release()
        self._newcomers.close()
        self._task = self.tell = None

    def _release(self) -> None:
        self._arrivals.close()
        for parameter in self._local:
            release(parameter)
