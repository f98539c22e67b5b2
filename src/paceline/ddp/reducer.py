"""The reducer: averages gradients over the ranks while backward is still running.

A step runs through this file from top to bottom:

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

Rare cases are extensions (:mod:`.extension_points`); with an ordinary model none is active. Code that runs once per
step is not in the processor's caches and takes several times as long as when warm, so saving calls and objects matters
here. Decision 0051 lists the measurements.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core import failpoints
from paceline.core.spans import BACKWARD, GRADIENT, LAUNCH, WAIT, recorder
from paceline.core.torch_internals import (
    Accumulators,
    check_eager_backward,
    class_never_compiled,
    has_nonzero,
    is_plain_backward,
    is_profiling,
    queue_callback,
    set_grad_enabled,
)
from paceline.ddp import abort
from paceline.ddp.abort import unfinished
from paceline.ddp.arrivals import (
    Arrivals,
    check_equal_gradients,
    copy_into,
    copy_one_by_one,
    find_out_of_bucket,
    gradient_of,
    grads_are_none,
    present,
)
from paceline.ddp.backward import Backward, Forward, PendingForwards, Phase
from paceline.ddp.buckets import BucketSet
from paceline.ddp.buffers import BufferSync
from paceline.ddp.channel import Channel, ExposedTime
from paceline.ddp.control_block import AWAITS, MORE, Notes, StatusDigest, content_of, tail_width
from paceline.ddp.exchange import CONTROL_EXCHANGE, EarlyAverages, Exchange, QuietSteps, patience
from paceline.ddp.extension_points import Extension, Extensions
from paceline.ddp.finisher import AllReduce, Finisher, TreeSums
from paceline.ddp.ledger import Ledger
from paceline.ddp.module_changes import Change, ModuleWatch, Named, OnChange, Trained, find_refusal
from paceline.ddp.options import Options
from paceline.ddp.shared_parameters import SharedParameters
from paceline.ddp.weights import UNWEIGHTED, WEIGHTED, Block
from paceline.errors import CommunicationError, UsageError

logger = logging.getLogger(__name__)
NOT_TRACED = nullcontext()
_requires_grad = attrgetter("requires_grad")


@class_never_compiled
class Reducer:
    """Owns the buckets of one wrapper and runs each synchronized backward pass from start to end.

    Args:
        named: the parameters to average.
        watch: detects changes of the module's parameters.
        on_change: called as ``on_change(named, averaged)`` if there are new parameters, with all parameters to average
            and whether they are averaged already.
        channel: the connection to the other ranks.
        ledger: counts this rank's backward passes and weights.
        buffers: broadcasts buffers at the end of backward passes.
        options: the wrapper's options.
    """

    backward: Backward | None = None
    """The backward pass in progress, or one with collectives still to run or blocks still to read; else None."""
    sync_enabled = True
    """False inside ``no_sync``: a backward pass that starts now stays local."""
    checks_finite: bool
    """Whether gradients are checked for NaN and Inf."""
    virtual_ranks = 0
    """Number of slices over which a step's gradient is summed in a fixed tree; 0 for an ordinary step."""

    def __init__(
        self,
        named: Named,
        watch: ModuleWatch,
        on_change: OnChange,
        channel: Channel,
        ledger: Ledger,
        buffers: BufferSync,
        options: Options,
    ) -> None:
        self.channel, self.ledger, self.buffers = channel, ledger, buffers
        self.checks_finite = options.check_finite
        self.trained, self.watch, self._on_change = Trained(named), watch, on_change
        sparse = watch.sparse(self.trained.originals)
        names, parameters = self.trained.names, self.trained.parameters
        # Not on GPUs: to read the tail, the host would have to wait for all work queued on the device.
        tail = tail_width(channel.size) if channel.host is channel else 0
        dtype, merges = options.reduce_dtype, options.merges_buckets
        self.buckets = BucketSet(names, parameters, options.capacities, channel, sparse, dtype, tail, merges=merges)
        self.digest = StatusDigest(channel.rank, channel.size)
        """Reads and writes the tail of the last bucket, on CPUs."""
        self.board = None if channel.host is channel else channel.host.board
        """Carries the ranks' reports if gradients are on GPUs."""
        self.quiet = QuietSteps(patience())
        """Decides whether the next step may do without control blocks."""
        self.frozen_step: Any = None
        """The :class:`.FrozenStep`; None until the reducer is complete, and once it is closed."""
        self.finisher: Finisher = AllReduce(channel, ledger)
        """Reduces the buckets over the ranks."""
        self.exposed_time = ExposedTime(parameters[0].device if parameters else torch.device("cpu"))
        """The total time that backward passes have waited for communication."""
        self.forwards = PendingForwards(ledger, lambda: self.trained.parameters, self.backward_reached)
        self.hook_outputs = self.forwards.hook  # 2. the outputs of a forward are hooked
        self.extensions = Extensions()
        """The rare cases."""
        self.shared = SharedParameters(self.trained, ledger, channel.members)
        """The extension for parameters that other wrappers also have."""
        self._make_parts()
        self.number = abort.register(self)
        """The wrapper's number in order of construction."""

    def _make_parts(self) -> None:
        """Create the parts that depend on the current parameters."""
        self._accumulators = Accumulators(self.trained.originals)
        self.arrivals = Arrivals(self.trained.parameters, self.gradient_arrived)
        self.arrivals.use_layout(self.buckets.layout, order_known=False)
        # Install hooks from the start, to detect a gradient that arrives before any backward pass reaches an output.
        self.arrivals.begin(grads_were_none=True)
        self._exchange = Exchange(
            self.trained,
            self.buckets,
            self.arrivals,
            self.channel,
            self.ledger,
            self.buffers,
            self.extensions,
            self.quiet,
            self.exposed_time,
        )
        self._place_digest()

    def _place_digest(self) -> None:
        """Decide for the current buckets and finisher which bucket carries the digest, and when to launch buckets."""
        for bucket in self.buckets.buckets:
            self.finisher.prepare(bucket)
        self._launches_at_end = self.finisher.launches_at_end(shadowed=False)
        carries = self.buckets.has_tail and self.finisher.carries_tail
        # The number of buckets that may be launched before backward has ended: all except the digest's bucket.
        self._overlapped_buckets = len(self.buckets) - int(carries)
        # Number of the bucket that carries the digest, which is the last one; None if no digests are sent.
        self.digest_in = self._overlapped_buckets if carries else None
        self._thaw()

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
            self._begin_all(forward)
            self.forwards.backward_began(forward)
        else:
            self._begin_unusual(forward)

    def _begin_all(self, forward: Forward | None) -> None:
        """Begin a backward pass run by autograd, in this wrapper and in all others that it will reach."""
        if unfinished:
            self.resync_aborted()
        try:
            self.begin_in_graph_task(forward)
        finally:  # the peers begin the other wrappers anyway, so this rank owes their collectives too
            if len(abort.living) > 1:
                abort.begin_others(self)

    def begin_in_graph_task(self, forward: Forward | None) -> None:
        """Begin a backward pass, and register its end as a callback of autograd's graph task.

        `forward` is None if the backward pass has not reached an output of this wrapper: only a gradient revealed it,
        or it reached another wrapper first, and this one begins early so that an exception also ends it here.
        """
        if self.watch.detect() is not None:
            abort.follow_modules(self)
        ledger, is_empty = self.ledger, self.forwards.may_be_empty and self.forwards.are_empty()
        ledger.backward_began(ledger.blocks.waiting() if forward is None else forward.block, is_empty=is_empty)
        if ledger.local_tasks:
            ledger.forget_dropped(self.trained.parameters, in_backward=True)
        backward = self.begin()
        backward.end_arrival_span = recorder.open(BACKWARD)  # type: ignore[method-assign, assignment]
        # Only autograd references this bound method, so it dies with the graph task. This is how an exception is
        # detected. The references are weak, because `backward` references `ended` through `task`; a cycle would keep
        # launched works alive.
        callback = self.advance_in_callback
        ended = partial(abort.task_ended, weakref.ref(self), weakref.ref(backward))
        backward.task, backward.task_number = weakref.ref(callback, ended), ledger.task
        elsewhere = backward.averaged_elsewhere
        if ledger.status.weighting & WEIGHTED:
            ledger.keep_gradients(self.trained.names, self.trained.parameters, elsewhere, is_last=True)
        if is_empty:
            backward.launches_at_end = True
            self.forwards.ignore_gradients(self.trained.parameters, elsewhere)
        queue_callback(callback)  # after the callback that restores the gradients
        if self.frozen_step is not None:
            self.frozen_step.step_begins()

    def begin(self) -> Backward:
        """Begin a backward pass. Until this returns, no collective is owed to peers."""
        self.channel.check_open()
        if self.extensions.is_stale:
            self.extensions.refresh()
            self._thaw()
        backward = Backward(sends_block=self.sends_block(), launches_at_end=self._launches_at_end)
        try:
            for begin in self.extensions.begin:
                begin(backward)
        except BaseException:
            self.extensions.abort(backward)
            raise
        if backward.is_shadowed:
            backward.launches_at_end = self.finisher.launches_at_end(shadowed=True)
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

    def _thaw(self) -> None:
        if self.frozen_step is not None:
            self.frozen_step.thaw()

    def sends_block(self) -> bool:
        """Return whether the next step exchanges control blocks regardless of digests; the same on all ranks."""
        if not (self.arrivals.order_known and self.quiet.is_quiet):
            return True
        if self.board is None:
            return self.digest_in is None
        # Replicas are compared before the step that reads the board late.
        return self.ledger.synchronizations >= self.ledger.compare_at and not self.ledger.compares_out_of_turn

    # -- 4. a gradient arrives ----------------------------------------------------------------------------------

    def gradient_arrived(self, index: int, parameter: Tensor) -> None:
        """Launch the buckets that are now full; called when a gradient has been accumulated into parameter `index`."""
        backward = self.backward
        if backward is None or backward.phase is not Phase.LAUNCHING:
            self._begin_at_gradient(index, parameter)
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
            launched, last = backward.launched, self._overlapped_buckets
            while len(launched) < last and (full := self.arrivals.gradients_if_complete(len(launched), index)):
                self._launch(backward, full)
        if self.channel.advances_in_hooks:  # shared memory has no thread
            self.channel.progress()

    # -- 5. a bucket is full ------------------------------------------------------------------------------------

    def _launch(self, backward: Backward, gradients: list[Tensor | None] | None = None) -> None:
        """Copy the `gradients` into the next bucket, set each ``p.grad`` to None, and launch the bucket."""
        number = len(backward.launched)
        bucket, owned = self.buckets.buckets[number], self.buckets.owned[number]
        if number == 1 and failpoints.orders:
            failpoints.strike("bucket")  # tests kill a rank here, while one bucket is in flight
        with recorder.span(LAUNCH, number) if backward.is_traced else NOT_TRACED:
            if not backward.buckets_unreferenced:
                self.buckets.make_writable(number, backward.averaged_elsewhere)
            if not (backward.owns_all_grads and copy_into(bucket, gradients or list(map(gradient_of, owned)), owned)):
                copy_one_by_one(backward, bucket, self.trained, self.channel.rank)
            for bucket_ready in self.extensions.bucket_ready:
                bucket_ready(backward, bucket)
            if number == self.digest_in:
                self.digest.write(bucket.tail, self._position(backward, self.buckets.rest), self.ledger.status.weight)
            backward.launched.append(self.finisher.launch(bucket, number))

    # -- 6. backward has ended ----------------------------------------------------------------------------------

    def _launch_rest(self, backward: Backward) -> None:
        """Launch the remaining buckets, the buffers, and the control block if it is due."""
        for backward_ended in self.extensions.backward_ended:
            backward_ended(backward)
        while len(backward.launched) < len(self.buckets.buckets):
            self._launch(backward)
        if self.digest_in is None:  # otherwise done at the launch of the last bucket, to fill its tail
            position = self._position(backward, self.trained.parameters)
            if self.board is not None and not backward.sends_block:
                self._post(backward, position)
        backward.end_arrival_span()
        self.buffers.launch()
        if backward.sends_block:
            self._exchange.launch(backward)
        backward.enter(Phase.WAITING)

    def _position(self, backward: Backward, emptied: Sequence[Tensor]) -> tuple[int, ...] | None:
        """Return numbers that must be equal on every rank; None if this rank has more to report.

        Copying into buckets has set the gradients of the parameters `emptied` to None, so a gradient there is
        unbucketed or has arrived late.
        """
        unbucketed = self.buckets.unbucketed
        if backward.absent or backward.sparse_in_buckets or unbucketed or not grads_are_none(emptied):
            find_out_of_bucket(backward, self.trained, unbucketed)
        # Not any(), because all must run: each may note something for the control block.
        reports = [has_report(backward) for has_report in self.extensions.has_report]
        if backward.absent:
            reports += [reports_absent(backward.absent) for reports_absent in self.extensions.reports_absent]
        has_more = True in reports or backward.out_of_bucket or backward.is_cut_short
        position = None if has_more else self.ledger.position(self.channel.size)
        return position if position is None or not backward.absent else (*position, *backward.absent)

    def _post(self, backward: Backward, position: tuple[int, ...] | None) -> None:
        """Post this rank's report of the step on the board."""
        assert self.board is not None, "else there would be a control block"
        status = self.ledger.status
        is_usual = status.weighting == UNWEIGHTED and not backward.absent and backward.task is not None
        awaits = not is_usual or backward.is_shared or backward.is_resyncing
        backward.position = position = None if backward.is_shared else position
        if position is None:
            backward.status = self.ledger.report(self.channel.size, aborted=backward.is_cut_short)
        backward.content = content_of(position, awaits=awaits)
        self.board.post(backward.content, status.weight if status.weighting & WEIGHTED else None)

    # -- 7. wait, and 9. averages are published -----------------------------------------------------------------

    def advance_in_callback(self) -> None:
        is_alone = len(unfinished) == 1 and self.backward is not None
        if (self if is_alone else abort.in_turn(self)).advance():
            queue_callback(self.advance_in_callback)

    def advance(self) -> bool:
        """Run the end of backward up to its next pause; returns whether to continue immediately."""
        backward = self.backward
        if backward is None or backward.phase is Phase.BROKEN:
            return False
        are_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)  # a gradient may have a graph
        try:
            if backward.phase is Phase.LAUNCHING:
                self._launch_rest(backward)
                return True
            goes_on = self._finish(backward)
        except BaseException:  # including KeyboardInterrupt, because the other ranks are in collectives
            abort.break_off(self, backward)
            raise
        finally:
            set_grad_enabled(are_enabled)
        if goes_on is None:
            self._end(backward)
        return bool(goes_on)

    def _finish(self, backward: Backward) -> bool | None:
        """Wait and publish averages; returns None when done, otherwise whether to continue immediately."""
        if backward.exchange is None:
            if backward.phase is Phase.UNREAD:
                backward.enter(Phase.WAITING)
                if self._is_unanimous(backward):
                    self.ledger.stop_agreed = False
                    return None
            else:
                self.wait_for_buckets(backward)
                if self._ends_without_blocks(backward):
                    return None
                if backward.is_early:
                    return False
            backward.exchange = self._exchange.run(backward, self.finisher)
        goes_on = next(backward.exchange, None)
        if not self.quiet.is_quiet:
            self._thaw()
        if backward.is_abandoned:
            self._refuse_change(backward)
        elif backward.new_order:
            self._adopt_order(backward.new_order)
        return goes_on

    def wait_for_buckets(self, backward: Backward) -> None:
        """Wait for the buckets, and for the control block if there is one."""
        with recorder.span(WAIT, group=self.channel.name), self.exposed_time:
            self.finisher.wait(backward.launched)
            if backward.block is not None:
                self.channel.wait(backward.block, CONTROL_EXCHANGE)
                backward.block = None

    def _ends_without_blocks(self, backward: Backward) -> bool:
        """Publish the averages if no blocks are needed; return whether the step is over on all ranks."""
        weighting = self.ledger.status.weighting
        if self.digest_in is not None:
            notes = self.digest.read(self.buckets.buckets[self.digest_in].tail, weighting)
            backward.digests_agree = notes is not None
            if notes is not None and not backward.sends_block:
                self._publish_agreed(backward, notes)
                return True
        elif self.board is not None and not backward.sends_block:
            if not backward.content & AWAITS:
                self._exchange.publish_early(backward, self.finisher)
            elif self._is_unanimous(backward):
                weights = self.board.weights() if weighting & WEIGHTED else [0.0] * self.channel.size
                self._publish_agreed(backward, [(weight, weighting) for weight in weights])
                self.ledger.stop_agreed = False
                return True
            elif not (backward.is_resyncing or backward.is_shared or all(map(AWAITS.__and__, self.board.contents()))):
                # A rank that does not wait exchanges its block later. It has all gradients, and they are unweighted.
                backward.status = backward.status or self.ledger.report(self.channel.size)
                self._exchange.publish_early(backward, self.finisher)
        return False

    def begin_exchange(self, backward: Backward) -> None:
        """Continue with the exchange of control blocks, because the ranks' digests do not agree."""
        backward.digests_agree = False
        backward.exchange = self._exchange.run(backward, self.finisher)

    @property
    def early(self) -> EarlyAverages:
        """The averages of a step whose reports are read late."""
        return self._exchange.early

    def _is_unanimous(self, backward: Backward) -> bool:
        """Return whether all ranks have posted the same report and have no more to report; may wait for them."""
        assert self.board is not None, "only a step with a board posts reports"
        content = backward.content
        if content <= AWAITS:
            return False
        if self.board.is_unanimous():
            return True
        with recorder.span(WAIT, group=self.channel.name), self.exposed_time.of_host:
            contents = self.board.contents()
        return all(other | AWAITS == content | AWAITS for other in contents)

    def _publish_agreed(self, backward: Backward, notes: Notes) -> None:
        """Publish the averages of a step if the ranks reported only their weights, given as `notes`."""
        self.ledger.notes = notes
        self.finisher.scale(self.buckets.buckets, notes)
        self.buffers.wait()
        # Gradients that are absent here are absent on every rank; otherwise the digests would not agree.
        self.buckets.publish(self.buckets.averages(backward.saved_gradients), backward.absent)
        self.arrivals.end(backward.absent)
        self.ledger.synchronized()

    def _adopt_order(self, order: Sequence[int]) -> None:
        """Rebuild the buckets in rank 0's `order` of arrival, after our references to the old buckets are gone."""
        self.buckets.assign_in(order)
        self._follow_layout()
        sizes = ", ".join(f"{bucket.flat.nbytes:,}" for bucket in self.buckets.buckets)
        logger.info("rank %d: buckets are in rank 0's order of arrival; bytes: %s", self.channel.rank, sizes)

    def _follow_layout(self) -> None:
        """Use the current buckets from now on, and stop requesting the order of arrival."""
        self._exchange.control.forget_order()
        self.arrivals.use_layout(self.buckets.layout, order_known=True)
        self._place_digest()

    def _end(self, backward: Backward) -> None:
        backward.enter(Phase.OVER)
        # Before the deferred functions, so that the wrapper stays usable if one raises on all ranks.
        backward.task = self.backward = None
        unfinished.discard(self.number)
        if not backward.is_resyncing:  # the user has seen the exception that ended it
            for function in backward.deferred:
                function()

    # -- 3. in unusual ways ---------------------------------------------------------------------------------

    def _begin_unusual(self, forward: Forward | None) -> None:
        """Handle another output, ``no_sync``, derivatives, or the first backward pass after an exception."""
        abort.notice_exception(self)  # first, because `is_under_way` may still refer to the previous pass
        if self.forwards.ignored is not None and self.forwards.are_ignored():
            pass
        elif self.is_under_way:
            self.ledger.backward_goes_on(None if forward is None else forward.block)
        elif self._accumulates():
            if self.sync_enabled:
                self._begin_all(forward)
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
            if len(abort.living) > 1:
                abort.begin_others(self)

    def _begin_at_gradient(self, index: int, parameter: Tensor) -> None:
        """Begin a backward pass if a gradient arrives before any output hook has run and a forward pass is pending.

        Gradients of parameters without a hook that arrived earlier are found when the remaining buckets are launched.
        """
        if not self.sync_enabled or self.shared.other_wrapper_in_backward():
            return
        if self.forwards.may_have_ended_in(is_common=index in self.shared.common()):
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
        common = self.shared.common()
        return self._accumulators.are_reached(common) or Accumulators(self._new_parameters()).are_reached(())

    def _detect_change(self) -> Change | None:
        """Return the module's change and guard optimizer steps on its new parameters; None without new parameters."""
        if (change := self.watch.detect()) is not None:
            self._on_change(change.named, False)
        return change

    def _new_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the module that are not averaged yet."""
        change = self._detect_change()
        return [] if change is None else [parameter for _, parameter in change.new]

    # -- changes between two steps ------------------------------------------------------------------------------

    def follow_module(self) -> None:
        """Switch to the module's current parameters once all ranks agree on them; called before a step begins."""
        if (change := self._detect_change()) is not None:
            self._take_in(change)

    def follow_module_on_all_ranks(self) -> None:
        """Do the same as a collective that all ranks call, for when some ranks will not run a backward pass."""
        change = self._detect_change()
        row = torch.tensor(int(change is not None), device="cpu")
        if self.channel.gathered_rows(row, "comparison of the module's parameters").any():
            self._take_in(change or self.watch.unchanged())

    def _take_in(self, change: Change) -> None:
        for extension in self.extensions.all:
            extension.check_change()
        try:
            self._announce_change()
            refusal = find_refusal(change, self.channel, self.finisher, self.exposed_time.device)
            if refusal is None:
                self._rebuild(change.named)
        except BaseException:
            # The other ranks have rebuilt their buckets or are waiting for this rank, so refuse any further use of this
            # wrapper.
            self.backward = Backward(sends_block=True)
            self.backward.enter(Phase.BROKEN)
            unfinished.add(self.number)
            raise
        if refusal is not None:
            raise refusal

    @torch.no_grad()
    def _announce_change(self) -> None:
        """Run the collectives of a backward pass on zeros, and report the change in the control block."""
        self.channel.check_open()
        backward = Backward(sends_block=True)
        backward.absent = range(len(self.trained.names))
        memories = []
        for number, bucket in enumerate(self.buckets.buckets):
            # In separate memory, because the bucket may hold gradients.
            memory = self.channel.allocate(bucket.memory.numel(), bucket.memory.dtype, bucket.memory.device)
            size = bucket.flat.numel()
            zeros = replace(bucket, memory=memory, flat=memory[:size], tail=memory[size:])
            backward.launched.append(self.finisher.launch(zeros, number))
            memories.append(memory)
        if self.board is not None and not self.sends_block():
            self.board.post(MORE | AWAITS)
        self.buffers.launch()
        self._exchange.launch(backward, has_new_parameters=True)
        self.wait_for_buckets(backward)
        self.buffers.wait()
        for memory in memories:
            self.channel.free(memory)

    def _refuse_change(self, backward: Backward) -> None:
        """Abandon a step because another rank's module has different parameters; every rank raises."""
        refusal = find_refusal(self.watch.unchanged(), self.channel, self.finisher, self.exposed_time.device)
        assert refusal is not None, "another rank reported changed parameters, but the ranks' parameters agree"
        for parameter in self.trained.parameters:
            parameter.grad = None
        self.ledger.forget_local()
        self.extensions.abort(backward)
        backward.defer_error(refusal)

    def _rebuild(self, named: Named) -> None:
        self.arrivals.close()
        self.trained.release()
        self.watch.follow(named)
        self._on_change(named, True)
        self.trained.use(named)
        sparse = self.watch.sparse(self.trained.originals)
        self.buckets.use_parameters(self.trained.names, self.trained.parameters, sparse)
        self.channel.host.free(self._exchange.control.vector)
        self._make_parts()
        self.extensions.parameters_changed()

    def bucket_bytes(self) -> list[int]:
        return [bucket.flat.nbytes for bucket in self.buckets.buckets]

    def named_layout(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket, in the order of launch."""
        return self.buckets.named_layout()

    def restore_layout(self, layout: list[list[str]]) -> None:
        """Use the layout from a checkpoint, given as parameter names, instead of observing the order of arrival.

        A layout of other parameters than the module's current ones has no effect.
        """
        self.resync_aborted()
        self.follow_module_on_all_ranks()  # first, because the layout was saved after the same change
        if self.buckets.use_named(layout):
            self.arrivals.observed = []  # the layout now defines the order of arrival
            self._follow_layout()

    def set_sync(self, enabled: bool) -> None:
        """Decide whether backward passes that start from now on are synchronized."""
        self.sync_enabled = enabled

    def check_finite(self, enabled: bool) -> None:
        """Turn the check of gradients for NaN and Inf on or off, starting with the next backward pass."""
        self.checks_finite = enabled
        self.extensions.is_stale = True

    def use_virtual_ranks(self, count: int, slices: Extension, before: Extension) -> None:
        """Sum over `count` slices in one tree, starting with the next backward pass.

        The extension `slices` sums this rank's part, and is called before the extension `before`.
        """
        self.virtual_ranks = count
        sums = None if self.channel.size <= 2 or self.channel.sums_in_tree else TreeSums(self.channel)
        # No prescaling: with it, the rounding of values near the dtype's smallest would depend on the number of ranks.
        self.use_finisher(partial(AllReduce, ledger=self.ledger, sums=sums, prescales=False))
        others = self.extensions.all
        place = others.index(before)
        self.extensions.use([*others[:place], slices, *others[place:]])

    def use_finisher(self, make: Callable[[Channel], Finisher]) -> None:
        """Use the finisher returned by `make`, starting with the next backward pass. All ranks call this."""
        self.resync_aborted()
        self.finisher = make(self.channel)
        self._place_digest()

    # -- without a backward ---------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Average the gradients in ``p.grad`` now, without a backward pass; a missing gradient counts as zero."""
        self.resync_aborted()
        self.follow_module()
        self.ledger.forget_dropped(self.trained.parameters, in_backward=False)
        self.ledger.count_unused_blocks(self.local_gradient)
        self.begin()
        if not self.ledger.status.weighting and any(map(has_nonzero, present(self.trained.parameters).values())):
            self.ledger.status.weighting = UNWEIGHTED  # no weights would divide these gradients
        self.complete()

    def complete(self) -> None:
        """Run the end of the backward pass without pauses."""
        while self.advance():
            pass

    def launch_all(self) -> None:
        """Begin to average the gradients in ``p.grad``; :meth:`complete` finishes the averaging."""
        # If buckets are launched at the end, leave this to complete(): other ranks' layers may announce collectives
        # first.
        if not self.begin().launches_at_end:
            self.advance()

    def read_late(self) -> None:
        """Read the other ranks' reports of the last backward pass, in all wrappers with unread reports."""
        if not unfinished:
            return
        backward, board = self.backward, self.board
        if len(unfinished) == 1 and backward is not None and backward.phase is Phase.UNREAD:
            # Nearly always all ranks have posted the same by now.
            if board is not None and backward.content > AWAITS and board.is_unanimous():
                self.ledger.stop_agreed = False
                backward.phase, self.backward = Phase.OVER, None
                unfinished.discard(self.number)
            else:
                self.complete()
        else:
            abort.read_all()  # for all wrappers, so that all ranks read in the same order

    def resync_aborted(self) -> None:
        """In all wrappers, run the collectives that other ranks are still waiting for after an exception."""
        if self.backward is not None and self.backward.phase is Phase.BROKEN:
            raise CommunicationError(
                f"rank {self.channel.rank}: an earlier step of this model failed partway, so the ranks are out of "
                "step; start again from the last checkpoint"
            )
        if unfinished:
            abort.resync_all()
            abort.read_all()

    # -- checks -----------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Raise if a backward pass has not ended."""
        abort.notice_exception(self)
        if self.backward is not None and self.backward.phase is not Phase.UNREAD:
            raise UsageError(f"rank {self.channel.rank}: the backward pass has not ended: {self.backward.phase.value}")

    def check_equal(self) -> None:
        self.resync_aborted()
        self.check_idle()
        check_equal_gradients(self.trained.names, self.trained.parameters, self.channel)

    def local_gradient(self) -> str | None:
        """Return the name of a parameter whose gradient the wrapper has not averaged; None if there is none."""
        return self.buckets.local_gradient(self.shared.left_to_others())

    def connected(self) -> Reducer:
        return self

    # -- the end of the wrapper ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the hooks from the parameters, and drop references to the reducer."""
        self._thaw()
        self.frozen_step = None
        self.arrivals.close()
        self.trained.release()
        self.extensions.close()
        self.forwards.close()
        if (backward := self.backward) is not None:
            backward.task = None
            if backward.phase is Phase.UNREAD and backward.exchange is not None:
                backward.exchange.close()
                if backward.block is not None:
                    self.channel.abandon(backward.block)
            elif backward.phase is Phase.ABORTED:  # its owed collectives cannot be run, because the channel closes
                self.backward = None
        abort.unregister(self.number)
