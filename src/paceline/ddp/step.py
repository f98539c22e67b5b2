"""The step: everything a reducer does in an ordinary training step, in the order of events.

    2. the outputs of a forward are hooked
    3. backward reaches one of them ──► begin
    4. a gradient arrives ──► 5. a bucket is full ──► launch        (each bucket but the last, in order)
    6. backward has ended ──► launch the rest, the last bucket with a digest
    7. wait ──► all digests agree ──► 9. p.grad is the bucket view
                     else ──► 8. exchange control blocks             (:mod:`.exchange`)

Every synchronized backward pass launches every bucket exactly once and in the same order on every rank, no matter which
part of the model the rank used; a rank without a gradient contributes zero. So unused parameters cause neither a hang
nor an error. Buckets and hooks follow Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", 2020.

Rare cases are extensions (:mod:`.extension`); with an ordinary model none is active. Code that runs once per step is
not in the processor's caches and takes several times as long as when warm, so saving calls and objects matters here.
Decision 0051 lists the measurements.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from paceline.core.failpoints import strike
from paceline.core.spans import BACKWARD, GRADIENT, LAUNCH, recorder
from paceline.core.torch_internals import (
    Accumulators,
    WithoutGradients,
    check_eager_backward,
    class_never_compiled,
    is_plain_backward,
    is_profiling,
    queue_callback,
)
from paceline.ddp.abort import (
    Member,
    begin_others,
    break_off,
    follow_modules,
    in_turn,
    notice_exception,
    unfinished,
    watch_task,
)
from paceline.ddp.arrivals import copy_into, copy_one_by_one, find_out_of_bucket, gradient_of, grads_are_none
from paceline.ddp.backward import Backward, Forward, PendingForwards, Phase
from paceline.ddp.digest import Notes
from paceline.ddp.exchange import Exchange
from paceline.ddp.module_changes import Change, OnChange
from paceline.ddp.weights import WEIGHTED, Block
from paceline.errors import UsageError

NOT_TRACED = nullcontext()
_requires_grad = attrgetter("requires_grad")


@class_never_compiled
class Step(Exchange, Member):
    """The part of the reducer that runs steps; :class:`~.reducer.Reducer` sets it up and changes it."""

    forwards: PendingForwards
    """The forward passes that await their backward pass."""
    sync_enabled = True
    """False inside ``no_sync``: a backward pass that starts now stays local."""
    expected_absent: set[int] | frozenset[int] = frozenset()
    """Parameters whose gradient may be absent on some ranks without being reported."""
    common: Collection[int] = frozenset()
    """Parameters that other live wrappers also have; kept up to date by :class:`.SharedParameters`."""
    _accumulators: Accumulators
    """The averaged parameters' autograd nodes, used to check whether a backward pass reaches the parameters."""
    _on_change: OnChange
    """Called with all parameters to average when the module has new ones."""

    # -- 2. the outputs of a forward are hooked -----------------------------------------------------------------

    def hook_outputs(self, outputs: Sequence[Tensor], *, counts_if_averaged: bool) -> None:
        """Hook the outputs of a forward pass, because the backward pass reaches them before any parameter."""
        if (block := self.ledger.blocks.forward_ended()) is not None:
            self.ledger.kept.look(self.trained.parameters)
        self.forwards.hook(outputs, Forward(block, counts_if_averaged=counts_if_averaged))

    # -- 3. backward reaches one of them ------------------------------------------------------------------------

    def backward_reached(self, forward: Forward | None, _gradient: Tensor) -> None:
        """Handle a backward pass that reached an output of `forward`; None if only a gradient revealed it."""
        check_eager_backward(self.channel.rank)
        if (
            self.backward is None
            and self.sync_enabled
            and is_plain_backward()
            and not torch.is_grad_enabled()  # create_graph=True
            and any(map(_requires_grad, self.trained.originals))  # else gradients only pass through the module
        ):
            self.begin_all(forward)
            self.forwards.backward_began(forward)
        else:
            self.start_unusual_backward(forward)

    def begin_all(self, forward: Forward | None) -> None:
        """Begin a backward pass run by autograd, in this wrapper and in all others that it will reach."""
        if unfinished:
            self.resync_aborted()
        try:
            self.begin_in_graph_task(forward)
        finally:  # the peers begin the other wrappers anyway, so this rank owes their collectives too
            begin_others(self)

    def begin_in_graph_task(self, forward: Forward | None) -> None:
        """Begin a backward pass, and register its end as a callback of autograd's graph task."""
        if self.watch.detect() is not None:
            follow_modules(self)
        ledger, is_empty = self.ledger, self.forwards.may_be_empty and self.forwards.are_empty()
        ledger.backward_began(ledger.blocks.waiting() if forward is None else forward.block, is_empty=is_empty)
        if ledger.local_tasks:
            ledger.forget_dropped(self.trained.parameters, in_backward=True)
        backward = self.begin()
        backward.end_arrival_span = recorder.open(BACKWARD)  # type: ignore[method-assign, assignment]
        # Only autograd references this bound method, so it dies with the graph task. This is how an exception is
        # detected.
        callback = self._advance_in_callback
        watch_task(self, backward, callback, ledger.task)
        elsewhere = backward.averaged_elsewhere
        if ledger.status.weighting & WEIGHTED:
            ledger.keep_gradients(self.trained.names, self.trained.parameters, elsewhere, is_last=True)
        if is_empty:
            backward.launches_at_end = True
            self.forwards.ignore_gradients(self.trained.parameters, elsewhere)
        queue_callback(callback)  # after the callback that restores the gradients

    def begin(self) -> Backward:
        """Begin a backward pass. Until this returns, no collective is owed to peers."""
        self.channel.check_open()
        if self.extensions.is_stale:
            self.extensions.refresh()
        is_quiet = self.arrivals.order_known and self.late_reading.is_quiet
        sends_block = not is_quiet or self.digest_in is None
        backward = Backward(sends_block=sends_block, launches_at_end=self.launches_at_end)
        try:
            for begin in self.extensions.begin:
                begin(backward)
        except BaseException:
            self.extensions.abort(backward)
            raise
        # Check after the extensions run, because one of them may set gradients aside.
        backward.grads_were_none = grads_were_none = grads_are_none(self.trained.parameters)
        backward.owns_all_grads = grads_were_none and not backward.averaged_elsewhere
        backward.buckets_unreferenced = grads_were_none and not backward.is_shared and self.buckets.is_untouched()
        backward.is_traced = recorder.on or is_profiling()
        hook_all = self.forwards.are_differentiated or recorder.detailed
        self.arrivals.begin(grads_were_none=backward.owns_all_grads, hook_all=hook_all)
        self.forwards.is_unseen = False
        self.backward = backward
        unfinished.add(self.number)
        return backward

    # -- 4. a gradient arrives ----------------------------------------------------------------------------------

    def gradient_arrived(self, index: int, parameter: Tensor) -> None:
        """Launch the buckets that are now full; called when a gradient has been accumulated into parameter `index`."""
        backward = self.backward
        if backward is None or backward.phase is not Phase.LAUNCHING:
            self.handle_stray_gradient(index, parameter)
            return
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                self.gradient_arrived(index, parameter)
            return
        if recorder.detailed:
            recorder.mark(GRADIENT, index)
        if self.arrivals.counts_each:
            self.arrivals.arrived(index)
        if not backward.launches_at_end:
            # The bucket with the digest waits for the end of backward, because until then there may be more to report.
            launched, last = backward.launched, self.overlapped_buckets
            while len(launched) < last and (full := self.arrivals.gradients_if_complete(len(launched), index)):
                self._launch(backward, full)
        self.channel.progress()  # with shared memory, which has no thread, reductions advance in these hooks

    # -- 5. a bucket is full ------------------------------------------------------------------------------------

    def _launch(self, backward: Backward, gradients: list[Tensor | None] | None = None) -> None:
        """Copy the `gradients` into the next bucket, set each ``p.grad`` to None, and launch the bucket."""
        number = len(backward.launched)
        bucket, owned = self.buckets.buckets[number], self.buckets.owned[number]
        if number == 1:
            strike("bucket")  # tests kill a rank here, while one bucket is in flight
        with recorder.span(LAUNCH, number) if backward.is_traced else NOT_TRACED:
            if not backward.buckets_unreferenced:
                self.buckets.make_writable(number, backward.averaged_elsewhere)
            if not (backward.owns_all_grads and copy_into(bucket, gradients or list(map(gradient_of, owned)), owned)):
                copy_one_by_one(backward, bucket, self.trained, self.channel.rank)
            for bucket_ready in self.extensions.bucket_ready:
                bucket_ready(backward, bucket)
            if number == self.digest_in:
                self._write_digest(backward, bucket.tail)
            backward.launched.append(self.finisher.launch(bucket, number))

    # -- 6. backward has ended ----------------------------------------------------------------------------------

    def _launch_rest(self, backward: Backward) -> None:
        """Launch the remaining buckets, the buffers, and the control block if it is due."""
        for backward_ended in self.extensions.backward_ended:
            backward_ended(backward)
        while len(backward.launched) < len(self.buckets.buckets):
            self._launch(backward)
        if self.digest_in is None:  # otherwise done at the launch of the last bucket, to fill its tail
            find_out_of_bucket(backward, self.trained, self.buckets.unbucketed)
            # Not any(), because all must run: each may note something for the control block.
            reports = [has_report(backward) for has_report in self.extensions.has_report]
            backward.has_report = True in reports
        backward.end_arrival_span()
        self.buffers.launch()
        if backward.sends_block:
            self._launch_block(backward)
        backward.enter(Phase.WAITING)

    def _write_digest(self, backward: Backward, tail: Tensor) -> None:
        """Fill the tail of the last bucket: a digest, unless this rank has more to report."""
        rest, unbucketed = self.buckets.rest, self.buckets.unbucketed
        # Copying into buckets set ``p.grad`` to None, so a gradient in `rest` is unbucketed or arrived late.
        if backward.absent or backward.sparse_in_buckets or unbucketed or (rest and not grads_are_none(rest)):
            find_out_of_bucket(backward, self.trained, unbucketed)
        # Not any(), because all must run: each may note something for the control block.
        reports = [has_report(backward) for has_report in self.extensions.has_report]
        is_expected = self.expected_absent.issuperset(backward.absent)
        has_more = True in reports or backward.out_of_bucket or backward.is_cut_short or not is_expected
        position = None if has_more else self.ledger.position(self.channel.size)
        numbers = None if position is None else (*position, *backward.absent)
        self.digest.write(tail, numbers, self.ledger.status.weight)

    # -- 7. wait, and 9. averages are published -----------------------------------------------------------------

    def _advance_in_callback(self) -> None:
        is_alone = len(unfinished) == 1 and self.backward is not None
        if (self if is_alone else in_turn(self)).advance():
            queue_callback(self._advance_in_callback)

    def advance(self) -> bool:
        """Run the end of backward up to its next pause; returns whether to continue immediately."""
        backward = self.backward
        if backward is None or backward.phase is Phase.BROKEN:
            return False
        with WithoutGradients():  # a gradient may have a graph
            try:
                if backward.phase is Phase.LAUNCHING:
                    self._launch_rest(backward)
                    return True
                goes_on = self._finish(backward)
            except BaseException:  # including KeyboardInterrupt, because the other ranks are in collectives
                break_off(self, backward)
                raise
            if goes_on is None:
                self._end(backward)
            return bool(goes_on)

    def _finish(self, backward: Backward) -> bool | None:
        """Wait and publish averages; returns None when done, otherwise whether to continue immediately."""
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
        """Publish the averages of a step if the ranks reported only their weights, given as `notes`."""
        self.ledger.notes = notes
        self.finisher.scale(self.buckets.buckets, notes)
        self.buffers.wait()
        # Gradients that are absent here are absent on every rank; otherwise the digests would not agree.
        self.averages.publish(self.buckets.averages(backward.saved_gradients), backward.absent)
        self.arrivals.end(backward.absent)
        self.ledger.synchronized()

    def _end(self, backward: Backward) -> None:
        backward.enter(Phase.OVER)
        # Before the deferred functions, so that the wrapper stays usable if one raises on all ranks.
        backward.task = self.backward = None
        unfinished.discard(self.number)
        if not backward.is_resyncing:  # the user has seen the exception that ended it
            for function in backward.deferred:
                function()

    # -- 3. in unusual ways ---------------------------------------------------------------------------------

    def start_unusual_backward(self, forward: Forward | None) -> None:
        """Handle another output, ``no_sync``, derivatives, or the first backward pass after an exception."""
        notice_exception(self)  # first, because `is_under_way` may still refer to the previous pass
        if self.forwards.ignored is not None and self.forwards.are_ignored():
            pass
        elif self.is_under_way:
            self.ledger.backward_goes_on(None if forward is None else forward.block)
        elif self._accumulates():
            if self.sync_enabled:
                self.begin_all(forward)
            else:
                self._begin_local(forward)
        if not torch.is_grad_enabled():
            self.forwards.backward_began(forward)
            return
        self.forwards.differentiated()  # create_graph=True
        if not self.is_under_way:  # autograd.grad()
            self.arrivals.hook_all()
        elif self.channel.rank == 0:  # one warning per job is enough
            self.forwards.warn_of_graph()

    def _accumulates(self) -> bool:
        # Possibly only new parameters require gradients.
        return self._accumulators.are_accumulated() or Accumulators(self._new_parameters()).are_accumulated()

    def _begin_local(self, forward: Forward | None) -> None:
        self.resync_aborted()
        try:
            if self.forwards.may_be_empty and self.forwards.are_empty():
                self.forwards.ignore_gradients(self.trained.parameters)
            else:
                block = self.ledger.blocks.waiting() if forward is None else forward.block
                self.ledger.begin_local(block, [*self.trained.parameters, *self._new_parameters()])
                for extension in self.extensions.all:
                    extension.begin_local()
                self.ledger.keep_gradients(self.trained.names, self.trained.parameters, is_last=False)
            # Ranks may run different numbers of local backward passes, so their forward passes do not count.
            if forward is not None and forward.counts_if_averaged:
                forward.counts_if_averaged = False
                self.ledger.take_back_forward()
        finally:
            begin_others(self)

    def handle_stray_gradient(self, index: int, parameter: Tensor) -> None:
        """Begin a backward pass if a gradient arrives before any output hook has run and a forward pass is pending.

        Gradients of parameters without a hook that arrived earlier are found when the remaining buckets are launched.
        """
        if not self.sync_enabled or any(extension.other_wrapper_in_backward() for extension in self.extensions.all):
            return
        if self.forwards.may_have_ended_in(is_common=index in self.common):
            shows_outputs = not (self.forwards.is_unseen or self.forwards.are_differentiated)
            self.backward_reached(None, parameter)
            if (backward := self.backward) is not None and backward.phase is Phase.LAUNCHING:
                if shows_outputs and (block := self.ledger.current) is not None:
                    waiting = self.forwards.waiting_in(block)
                    queue_callback(partial(self._check_reached, backward, index, block, waiting))
                self.gradient_arrived(index, parameter)

    def _check_reached(self, backward: Backward, index: int, block: Block, waiting: int) -> None:
        """Refuse a backward pass attributed to `block` if it reached none of the block's `waiting` forward passes."""
        if self.forwards.waiting_in(block) == waiting:
            name, rank = self.trained.names[index], self.channel.rank
            backward.defer_error(
                UsageError(
                    f"rank {rank}: a backward pass bypassed the outputs and reached {name!r} while a forward pass "
                    "inside model.weight() awaits its own, so its weight would divide this gradient; run this before "
                    "that forward or after its backward pass, or add this loss, times the weight, to the weighted loss"
                )
            )

    @property
    def is_under_way(self) -> bool:
        """Whether a synchronized backward pass has begun and has neither ended nor failed."""
        return self.backward is not None and self.backward.is_under_way

    def is_expected(self) -> bool:
        """Return whether the backward pass in progress will reach an output of this wrapper and be synchronized."""
        if self.backward is not None or not self.sync_enabled or not self.forwards:
            return False
        return self._accumulators.are_reached(self.common) or Accumulators(self._new_parameters()).are_reached(())

    def begin_early(self) -> None:
        """Begin although the backward pass reached another wrapper first, so that an exception also ends it here."""
        self.begin_in_graph_task(None)

    def _detect_change(self) -> Change | None:
        """Return the module's change and guard optimizer steps on its new parameters; None without new parameters."""
        if (change := self.watch.detect()) is not None:
            self._on_change(change.named, False)
        return change

    def _new_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the module that are not averaged yet."""
        change = self._detect_change()
        return [] if change is None else [parameter for _, parameter in change.new]
