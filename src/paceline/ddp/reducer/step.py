"""The step: all that a reducer does in an ordinary training step, from top to bottom in the order in which it happens.

    2. the outputs of a forward are hooked
    3. backward reaches one of them ──► begin
    4. a gradient arrives ──► 5. a bucket is full ──► launch        (each bucket but the last, in order)
    6. backward has ended ──► launch what is left, the last bucket with a digest
    7. wait ──► all digests agree ──► 9. p.grad is the bucket's view
                     else ──► 8. exchange control blocks             (:mod:`.exchange`)

Every synchronized backward launches every bucket exactly once and in the same order on every rank, whatever part of
the model the rank used; a rank without a gradient contributes zero. So unused parameters can neither hang nor raise.
Buckets and hooks follow Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.

Rare cases are extensions (:mod:`.extension`), which an ordinary model has not. What runs once a step is not in the
processor's caches, so it costs several times its warm time: fewer calls and objects count more here than clever ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from operator import attrgetter

import torch
from torch import Tensor

from paceline.core.telemetry.failpoints import strike
from paceline.core.telemetry.spans import BACKWARD, GRADIENT, LAUNCH
from paceline.core.torch_internals.autograd import WithoutGradients, is_plain_backward, queue_callback
from paceline.core.torch_internals.compile import check_eager_backward, class_never_compiled
from paceline.core.torch_internals.profiler import is_profiling
from paceline.ddp.agreement.digest import Notes
from paceline.ddp.reducer.abort import Member, begin_others, break_off, follow, in_turn, unsettled
from paceline.ddp.reducer.backward import Backward, Phase
from paceline.ddp.reducer.exchange import Exchange
from paceline.ddp.reducer.forwards import Forward, OtherBeginnings, PendingForwards
from paceline.ddp.reducer.gradients import copy_into, copy_one_by_one, find_apart, gradient_of, none_has_gradient

NOT_TRACED = nullcontext()
_trains = attrgetter("requires_grad")


@class_never_compiled
class Step(Exchange, Member, OtherBeginnings):
    """The part of the reducer that carries out steps; :class:`~.reducer.Reducer` has rarer ways to begin one."""

    forwards: PendingForwards
    """The forwards whose backward has not come yet."""
    sync_enabled = True
    """False inside ``no_sync``: a backward that starts now stays local."""
    known_absent: set[int] | frozenset[int] = frozenset()
    """Parameters of which all ranks know that some lack a gradient, or need not know it."""

    # -- 2. the outputs of a forward are hooked -----------------------------------------------------------------

    def hook_outputs(self, outputs: Sequence[Tensor], *, counts_if_averaged: bool) -> None:
        """Hook the outputs of a forward: the first sign of its backward, before any gradient of ours is there."""
        for forward_ended in self.extensions.forward_ended:
            forward_ended()
        self.forwards.hook(outputs, Forward(self.ledger.forward_in_block(), counts_if_averaged=counts_if_averaged))

    # -- 3. backward reaches one of them ------------------------------------------------------------------------

    def backward_reached(self, forward: Forward | None, _gradient: Tensor) -> None:
        """A backward has reached an output of `forward`; None if it shows by a gradient alone."""
        check_eager_backward(self.channel.rank)
        if (
            self.backward is None
            and self.sync_enabled
            and is_plain_backward()
            and not torch.is_grad_enabled()  # create_graph=True
            and any(map(_trains, self.trained.given))  # else the module is only passed through
        ):
            self.begin_in_task(forward)
            self.forwards.backward_began(forward)
        else:
            self.reached_otherwise(forward)

    def begin_in_task(self, forward: Forward | None) -> None:
        """Begin a backward that autograd runs, and those of all other wrappers that it will reach."""
        if unsettled:
            self.resync_aborted()
        try:
            self.follow_task(forward)
        finally:
            begin_others(self)

    def follow_task(self, forward: Forward | None) -> None:
        """Begin a backward, and have autograd run its end."""
        self.ledger.backward_began(None if forward is None else forward.block)
        if self.ledger.local_backwards:
            self.ledger.forget_dropped(self.trained.parameters, in_backward=True)
        backward = self.begin()
        backward.gradients_came = self.recorder.open(BACKWARD)  # type: ignore[method-assign]
        callback = self._advance_in_task  # autograd alone holds it, so it goes with the task
        follow(self, backward, callback, self.ledger.task)
        queue_callback(callback)

    def begin(self) -> Backward:
        """Begin a backward. Until this returns nothing is owed to peers."""
        self.channel.check_open()
        for look_at_module in self.extensions.look_at_module:
            look_at_module()
        if self.extensions.is_stale:
            self.extensions.refresh()
        is_quiet = self.arrivals.order_known and self.late_reading.is_quiet
        backward = Backward(sends_block=not is_quiet or self.digest_in is None, at_end=self.launches_at_end)
        try:
            for begin in self.extensions.begin:
                begin(backward)
        except BaseException:
            self.extensions.abort(backward)
            raise
        backward.cleared = cleared = none_has_gradient(self.trained.parameters)
        backward.is_plain = cleared and not backward.elsewhere
        backward.unreferenced = cleared and not backward.is_shared and self.buckets.is_untouched()
        backward.is_traced = self.recorder.on or is_profiling()
        hook_all = self.forwards.are_differentiated or self.recorder.detailed
        self.arrivals.begin(cleared=backward.is_plain, hook_all=hook_all)
        self.forwards.is_unseen = False
        self.backward = backward
        unsettled.add(self.number)
        return backward

    # -- 4. a gradient arrives ----------------------------------------------------------------------------------

    def gradient_arrived(self, index: int, parameter: Tensor) -> None:
        """A gradient was accumulated into parameter `index`."""
        backward = self.backward
        if backward is None or backward.phase is not Phase.LAUNCHING:
            self.arrived_otherwise(index, parameter)
            return
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                self.gradient_arrived(index, parameter)
            return
        if self.recorder.detailed:
            self.recorder.mark(GRADIENT, index)
        if self.arrivals.counts:
            self.arrivals.arrived(index)
        if not backward.launches_at_end:
            # The bucket with the digest waits for the end of backward: until then this rank may get more to report.
            launched = backward.launched
            while len(launched) < self.early and (gradients := self.arrivals.complete(len(launched), index)):
                self._launch(backward, gradients)
        self.channel.progress()

    # -- 5. a bucket is full ------------------------------------------------------------------------------------

    def _launch(self, backward: Backward, gradients: list[Tensor | None] | None = None) -> None:
        """Copy the `gradients` into the next bucket, free the parameters' own, and hand it to communication."""
        number = len(backward.launched)
        bucket, owned = self.buckets.buckets[number], self.buckets.owned[number]
        if number == 1:
            strike("bucket")
        with self.recorder.span(LAUNCH, number) if backward.is_traced else NOT_TRACED:
            if not backward.unreferenced:
                self.buckets.claim(number, backward.elsewhere)
            if not (backward.is_plain and copy_into(bucket, gradients or list(map(gradient_of, owned)), owned)):
                copy_one_by_one(backward, bucket, self.trained, self.channel.rank)
            for bucket_ready in self.extensions.bucket_ready:
                bucket_ready(backward, bucket)
            if number == self.digest_in:
                self._write_digest(backward, bucket.tail)
            backward.launched.append(self.finisher.launch(bucket, number))

    # -- 6. backward has ended ----------------------------------------------------------------------------------

    def _launch_rest(self, backward: Backward) -> None:
        """Launch the buckets that are left, buffers, and where that is expected the control block."""
        for at_end in self.extensions.at_end:
            at_end(backward)
        while len(backward.launched) < len(self.buckets.buckets):
            self._launch(backward)
        if self.digest_in is None:
            find_apart(backward, self.trained, self.buckets.unbucketed)
            for has_report in self.extensions.has_report:
                has_report(backward)
        backward.gradients_came()
        self.buffers.launch()
        if backward.sends_block:
            self._launch_block(backward)
        backward.enter(Phase.WAITING)

    def _write_digest(self, backward: Backward, tail: Tensor) -> None:
        """Fill the tail of the last bucket: a digest if there is nothing else that the other ranks have to know."""
        rest, unbucketed = self.buckets.rest, self.buckets.unbucketed
        # A gradient that is there now belongs into no bucket, or has come late.
        if backward.absent or backward.sparse_in_buckets or unbucketed or (rest and not none_has_gradient(rest)):
            find_apart(backward, self.trained, unbucketed)
        reports = [has_report(backward) for has_report in self.extensions.has_report]  # each may note something
        is_known = self.known_absent.issuperset(backward.absent)
        has_more = True in reports or backward.apart or backward.is_cut_short or not is_known
        position = None if has_more else self.ledger.position(self.channel.size, weighs=self.tells_weights)
        numbers = None if position is None else (*position, *backward.absent)
        self.digest.write(tail, numbers, self.ledger.status.weight)

    # -- 7. wait, and 9. averages are published -----------------------------------------------------------------

    def _advance_in_task(self) -> None:
        is_alone = len(unsettled) == 1 and self.backward is not None
        if (self if is_alone else in_turn(self)).advance():
            queue_callback(self._advance_in_task)

    def advance(self) -> bool:
        """Run the end of backward up to its next pause; returns whether it is to go on at once."""
        backward = self.backward
        if backward is None or backward.phase is Phase.BROKEN:
            return False
        with WithoutGradients():  # a gradient may have a graph of its own
            try:
                if backward.phase is Phase.LAUNCHING:
                    self._launch_rest(backward)
                    return True
                goes_on = self._finish(backward)
            except BaseException:  # KeyboardInterrupt, too: the others' collectives are not met any more
                break_off(self, backward)
                raise
            if goes_on is None:
                self._end(backward)
            return bool(goes_on)

    def _finish(self, backward: Backward) -> bool | None:
        """Wait, and publish averages; returns None when all is done, else whether to go on at once."""
        if backward.exchange is None:
            if not backward.sends_block:
                self._wait_for(backward, None)
                tail = self.buckets.buckets[-1].tail
                if (notes := self.digest.read(tail, self.ledger.status.weighting)) is not None:
                    self._publish_agreed(backward, notes)
                    return None
            backward.exchange = self._exchange(backward)
        return next(backward.exchange, None)

    def _publish_agreed(self, backward: Backward, notes: Notes) -> None:
        """Publish the averages of a step in which no rank has anything to report but its weight, in `notes`."""
        self.finisher.scale(self.buckets.buckets, notes)
        self.buffers.wait()
        # What is absent is so on all ranks alike, or digests would not agree.
        self.averages.publish(self.buckets.averages(backward.held), backward.absent)
        self.arrivals.end(backward.absent)
        self.ledger.synchronized()

    def _end(self, backward: Backward) -> None:
        backward.enter(Phase.OVER)
        backward.task = self.backward = None
        unsettled.discard(self.number)
        if not backward.is_settling:  # after an exception, which has been seen
            for finding in (*backward.findings, *backward.last):
                finding()
