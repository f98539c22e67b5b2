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

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.telemetry.spans import BACKWARD, GRADIENT, Recorder
from paceline.core.torch_internals.autograd import Accumulators, queue_callback
from paceline.core.torch_internals.compile import check_eager_backward, class_never_compiled
from paceline.ddp.agreement.join_events import Event
from paceline.ddp.consistency.gradient_check import check_equal_gradients
from paceline.ddp.engine.backward.backward import Backward
from paceline.ddp.engine.backward.concurrent_wrappers import begin_others, enter
from paceline.ddp.engine.backward.finish import Ending
from paceline.ddp.engine.backward.new_parameters import AgreedChange
from paceline.ddp.engine.backward.pending_forwards import Forward, PendingForwards
from paceline.ddp.engine.backward.phase import AGREED, Outcome, Phase
from paceline.ddp.engine.backward.restore import restore_gradients
from paceline.ddp.engine.gradients.bucket_set import BucketSet
from paceline.ddp.engine.gradients.bulk_checks import none_has_gradient
from paceline.ddp.engine.parameters.optimizer_in_backward import OptimizersInBackward, optimizer_inside
from paceline.ddp.engine.parts import EngineParts, GradientHook
from paceline.ddp.engine.steady_step import SteadyStep
from paceline.ddp.transport.channel import Channel, Pausing
from paceline.ddp.transport.finisher import Finisher
from paceline.ddp.transport.scattered_gradients import scattered_and_shared
from paceline.errors import ReplicaMismatch


@class_never_compiled
class Reducer(SteadyStep):
    """Owns the buckets of one wrapper and carries each synchronized backward from its start to its end.

    Args:
        make: makes the parts that it works with, given the hook that is called for every gradient.
    """

    def __init__(self, make: Callable[[GradientHook], EngineParts]) -> None:
        self._parts = make(self._gradient_arrived)
        self.exposed_time = self._parts.exposed_time
        self._forwards = PendingForwards(self._parts.ledger, self.backward_reached)
        """The forwards whose backward has not come yet."""
        self._backward = Backward(self._parts)
        self._notice(self._parts.given)
        enter(self)

    def _notice(self, parameters: Sequence[nn.Parameter]) -> None:
        """Look out for `parameters` of the module, the new ones included, when a backward begins."""
        # Whether the graph under way accumulates into any of them; optimizers that step at the end of backward.
        self._accumulators = Accumulators(parameters)
        self._in_backward = OptimizersInBackward(parameters)

    @property
    def storage(self) -> BucketSet:
        """The buckets."""
        return self._parts.storage

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are averaged; of a DTensor, what stands for this rank's shard."""
        return self._parts.parameters

    @property
    def parts(self) -> EngineParts:
        """The parts that it works with now; replaced between two backwards."""
        return self._parts

    def bucket_bytes(self) -> list[int]:
        """Size of each bucket, in the order of launch."""
        return [bucket.flat.nbytes for bucket in self.storage.buckets]

    def named_layout(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order of launch."""
        return self.storage.named_layout()

    def restore_layout(self, layout: list[list[str]]) -> None:
        """Take over a checkpoint's layout, by parameter names, instead of observing the order of arrival."""
        self.resync_aborted()
        self.storage.use_named(layout)
        self._parts.arrivals.observed = []
        self._parts.follow_layout()

    def check_finite(self, enabled: bool) -> None:
        """Look for NaN and Inf in gradients, or not, from the next backward on."""
        self._parts = replace(self._parts, check_finite=enabled)

    def use_finisher(self, make: Callable[[Channel, Recorder], Finisher]) -> None:
        """Let what `make` makes take the all-reduce's place, from the next backward on; on all ranks."""
        self.resync_aborted()
        self._parts = replace(self._parts, finisher=make(self._parts.channel, self._parts.recorder))

    def connected(self) -> Reducer:
        """Return itself."""
        return self

    # -- 2. outputs are hooked, 3. a backward reaches one of them --------------------------------------------------

    def hook_outputs(self, outputs: Sequence[Tensor], on_local: Callable[[], None]) -> None:
        """Hook the outputs of a forward: the first sign of its backward, before any gradient of ours is there."""
        self._in_backward.claim()
        self._forwards.hook(outputs, on_local, self._parts.ledger.forward_in_block())

    def backward_reached(self, on_local: Callable[[], None], forward: Forward | None, _gradient: Tensor) -> None:
        """A backward has reached an output of the wrapper."""
        ledger = self._parts.ledger
        check_eager_backward(self._parts.channel.rank)
        if self._begin_steadily(forward):
            return
        self._backward.notice_exception()
        block = forward.block if forward is not None else None
        if self._backward.is_under_way:
            ledger.check_one_mean(block)
        elif self._accumulates():
            self.resync_aborted()
            try:
                ledger.backward_began(block)
                ledger.forget_dropped(self.parameters, in_backward=True)
                if self.sync_enabled:
                    self._begin_in_task()
                else:
                    self._stay_local(on_local)
            finally:
                begin_others(self)
        self._forwards.backward_began(forward)
        if torch.is_grad_enabled():  # create_graph=True
            if self._backward.phase is Phase.IDLE:  # autograd.grad()
                self._parts.arrivals.hook_all()
            elif self._parts.channel.rank == 0:
                self._forwards.warn_of_graph()

    def _stay_local(self, on_local: Callable[[], None]) -> None:
        self._parts.sharing.check_no_average()
        self._parts.ledger.local_backwards += 1
        on_local()
        if self._parts.join.is_active:
            queue_callback(partial(self._parts.join.announce, Event.LOCAL))

    def is_expected(self) -> bool:
        """Whether the backward under way is going to reach a forward of this wrapper, and to be synchronized."""
        if self._backward.phase is not Phase.IDLE or not self.sync_enabled or not self._forwards:
            return False
        self._detect_new_parameters()
        return self._accumulators.are_reached(self._parts.sharing.common)

    def begin_early(self) -> None:
        """Begin in a backward that has reached another wrapper first, so that an exception ends both alike."""
        self._parts.ledger.backward_began()
        self._parts.ledger.forget_dropped(self.parameters, in_backward=True)
        self._begin_in_task()

    def _begin_in_task(self) -> None:
        """Begin a backward that autograd runs; at its pauses the callbacks of other wrappers run."""
        self._begin()
        self._backward.gradients_came = self._parts.recorder.open(BACKWARD)
        self._follow_task()

    def _begin(self) -> None:
        parts = self._parts
        parts.check_ready()
        share = parts.sharing.begin()
        try:
            if share.elsewhere and (bool(self._in_backward) or parts.finisher.steps_inside):
                raise optimizer_inside(parts.names[min(share.elsewhere)])
            if share.elsewhere and not parts.finisher.is_whole:
                raise scattered_and_shared(parts.names[min(share.elsewhere)])
            shadowed = parts.join.is_active and parts.join.announce(Event.BACKWARD)
            self._detect_new_parameters()
            parts.new_parameters.begin()
        except BaseException:
            parts.sharing.abort(share)
            raise
        self._forwards.is_unseen = False
        self._in_backward.claim()  # where no forward has, as in a copy that has just woken up
        clear = none_has_gradient(parts.parameters)
        at_end = parts.finisher.launches_at_end(shadowed=shadowed)
        untouched = clear and not parts.sharing and parts.storage.is_untouched()
        exchanges = parts.always_exchanges
        self._backward = backward = Backward(
            parts, clear, share, at_end, untouched, exchanges, on_abort=restore_gradients
        )
        backward.ending = self._end(backward, Ending(backward).run())
        backward.enter(Phase.LAUNCHING)
        hook_all = self._forwards.are_differentiated or parts.recorder.detailed
        parts.arrivals.begin(clear=clear and not share.elsewhere, hook_all=hook_all)

    # -- 4. a gradient arrives ----------------------------------------------------------------------------------

    def _gradient_arrived(self, index: int, parameter: Tensor) -> None:
        """A gradient was accumulated into parameter `index`."""
        if self._backward.is_steady and self._backward.phase is Phase.LAUNCHING:
            self._launch_full(self._backward, index)
            return
        if not self.sync_enabled:
            return
        if not self._backward.is_under_way:
            # A backward of something else than this wrapper's outputs, which is meant if a forward waits for it.
            # Gradients that came unnoticed before are found at the end, as nothing is launched that was not seen.
            sharing = self._parts.sharing
            if not self._forwards.may_have_ended_in(is_common=index in sharing.common) or sharing.is_partner_active:
                return
            self.backward_reached(lambda: None, None, parameter)
            if self._backward.phase is not Phase.LAUNCHING:
                return
        parts, backward = self._parts, self._backward
        if parts.recorder.detailed:
            parts.recorder.mark(GRADIENT, index)
        arrivals = parts.arrivals
        arrivals.arrived(index)
        while (
            backward.is_next_early
            and (gradients := arrivals.complete(backward.next)) is not None
            and arrivals.comes_last(index)
        ):
            backward.launch(parts.storage.buckets[backward.next], gradients)
        parts.channel.progress()

    # -- 6. backward ends ---------------------------------------------------------------------------------------

    def _end(self, backward: Backward, ending: Pausing[Outcome]) -> Pausing[None]:
        parts = self._parts
        try:
            outcome = yield from ending
        except BaseException:  # KeyboardInterrupt, too: the others' collectives are not met any more
            backward.enter(Phase.BROKEN)
            raise
        backward.enter(Phase.IDLE)
        self._backward = Backward(self._parts)  # what was launched, and what hooks returned, is let go
        parts.sharing.end()
        if backward.is_settling:  # the exception that ended it has been seen
            return
        if outcome is not AGREED:
            parts.control.check(outcome.statuses)
        if outcome.used is not None:
            raise outcome.used
        parts.unused.report(outcome.unused)
        if outcome.drift is not None:
            raise ReplicaMismatch(outcome.drift)
        if outcome.new is not None:
            self._take_in(outcome.new)
        if not any(status.aborted for status in outcome.statuses):
            self._in_backward.step(parts.ledger)

    # -- parameters that the module got after it was wrapped, see parameters.module_changes ------------------------

    def _accumulates(self) -> bool:
        self._detect_new_parameters()  # first, as all that trains may be new
        return self._accumulators.are_accumulated()

    def _detect_new_parameters(self) -> None:
        parts = self._parts
        if parts.new_parameters.detect():
            self._notice([*parts.given, *parts.new_parameters.parameters()])
            parts.parameters[:] = map(parts.new_parameters.stand_in, parts.given, parts.local)

    def _take_in(self, new: AgreedChange) -> None:
        """Average the module's present parameters from now on."""
        named = self._parts.new_parameters.accept(new)
        try:
            self._parts = self._parts.rebuilt(named, self._gradient_arrived)
        except BaseException:
            self._backward.enter(Phase.BROKEN)
            raise
        self._backward = Backward(self._parts)
        self._notice(self._parts.given)

    # -- without a backward ---------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Average what ``p.grad`` holds now, without a backward; a parameter without gradient counts as zero."""
        self.resync_aborted()
        self._parts.ledger.forget_dropped(self.parameters, in_backward=False)
        self._begin()
        self.complete()

    def launch_all(self) -> None:
        """Begin to average the gradients in ``p.grad``; :meth:`complete` is due later, and launches the rest."""
        self._begin()
        if not self._backward.at_end:
            self._backward.advance()

    def check_equal(self) -> None:
        """Refuse gradients that are not the same on every rank."""
        self.resync_aborted()
        self.check_idle()
        check_equal_gradients(self._parts.names, self.parameters, self._parts.channel)

    def local_gradient(self) -> str | None:
        """The name of a parameter whose gradient the wrapper has not averaged; None if there is none."""
        return self._parts.published.local_gradient()

    def close(self) -> None:
        """Take the hooks off the parameters, and let go of what refers back to the reducer."""
        self._parts.release()
        self._parts.new_parameters.close()
        self._forwards.close()
        self._parts.sharing.close()
        if self.is_aborted:  # which is settled by no one, as the channel is closed
            self._backward = Backward(self._parts)
        self._backward.forget_task()
        self._backward.leave_unread()
