"""The frozen step: an ordinary step in a fraction of the calls, once the order of the gradients is known.

Most of a step's code handles cases that do not occur in an ordinary step, but the host pays for every call. So after
some steps without a change, the objects that stay the same from step to step (the buckets' views, the parameters of
each bucket, the function that launches its all-reduce) are stored in local variables of three functions:

    begin      the checks of stage 3, as one condition
    arrived    stages 4 and 5 of one bucket: copy, set ``p.grad`` to None, launch
    end        stages 6, 7 and 9: report, wait, scale, publish

They contain only the ordinary step. In any other case they call the general step, which continues from the same
:class:`.Backward`. This happens at the beginning of a backward pass, or at its end if a gradient is missing or late or
if reports differ; the buckets that have been launched by then stay launched. An exception is handled as in the general
step. Both kinds of step launch the same collectives, so one rank may run a frozen step while another runs a general
one.

Conditions that can change without our code running are compared in ``begin``. Whatever else changes the buckets, the
hooks, the finisher or the extensions calls :meth:`FrozenStep.thaw`.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from paceline.core import failpoints
from paceline.core.device_streams import capture_query
from paceline.core.spans import BACKWARD, BUCKET_WAIT, WAIT, recorder
from paceline.core.torch_internals import (
    COMPILED_AUTOGRAD,
    class_never_compiled,
    copy_each,
    current_task,
    exhaust,
    is_plain_backward,
    is_profiling,
    multiply_each,
    never_compiled,
    queue_callback,
    set_grad_enabled,
)
from paceline.ddp import abort
from paceline.ddp.abort import unfinished
from paceline.ddp.arrivals import copy_scaled_into, gradient_of, is_none
from paceline.ddp.backward import Backward, Forward, Phase
from paceline.ddp.channel import SAMPLED
from paceline.ddp.control_block import DIGEST, LEAST_DIGEST
from paceline.ddp.exchange import NO_COPIES, version_of
from paceline.ddp.extensions import GraphCapture
from paceline.ddp.finisher import AllReduce
from paceline.ddp.reducer import Reducer
from paceline.ddp.weights import UNWEIGHTED, compute_scale
from paceline.errors import PacelineError

LAUNCHING, WAITING, UNREAD, OVER = Phase.LAUNCHING, Phase.WAITING, Phase.UNREAD, Phase.OVER
TEST_FROZEN = "PACELINE_TEST_FROZEN"
"""Environment variable for tests: ``always`` freezes the step as soon as possible, ``never`` leaves it general."""
UNCHANGED_STEPS = 16
"""Number of general steps without a change that must precede a frozen one."""
_PATIENCE = {"always": 1, "never": sys.maxsize}
_requires_grad = attrgetter("requires_grad")


@class_never_compiled
class FrozenStep:
    """Makes the functions of the frozen step for one `reducer`, and installs them in place of the general ones."""

    is_frozen = False
    """Whether they are installed. Otherwise an output that was hooked earlier may still call ``begin``."""
    running: Backward | None = None
    """The backward pass that a frozen step has begun and not ended."""
    has_skipped = False
    """Whether a bucket of this backward pass was full before its turn."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._patience = _PATIENCE.get(os.environ.get(TEST_FROZEN, ""), UNCHANGED_STEPS)
        self._unchanged_steps = 0

    def step_begins(self) -> None:
        """Count a general step, and freeze the next one if nothing has changed for long enough."""
        self._unchanged_steps += 1
        if self._unchanged_steps >= self._patience and not self.is_frozen and self._can_freeze():
            self.is_frozen = True
            reducer = self._reducer
            reducer.forwards.reached = _make_begin(self, reducer)
            overlapped = range(len(reducer.buckets) if reducer.digest_in is None else reducer.digest_in)
            reducer.arrivals.replace_triggers([_make_arrived(self, reducer, number) for number in overlapped])

    def thaw(self) -> None:
        """Run general steps from now on, until enough of them have passed without a change."""
        self._unchanged_steps = 0
        if self.is_frozen:
            self.is_frozen = False
            self._reducer.forwards.reached = self._reducer.backward_reached
            self._reducer.arrivals.restore_triggers()

    def _can_freeze(self) -> bool:
        """Return whether no rare case is part of the steps of this wrapper."""
        reducer = self._reducer
        finisher, extensions, buckets = reducer.finisher, reducer.extensions, reducer.buckets
        begins = [begin for begin in extensions.begin if not isinstance(getattr(begin, "__self__", None), GraphCapture)]
        rare = begins, extensions.bucket_ready, extensions.backward_ended, extensions.has_report, extensions.show
        return (
            not (reducer.sends_block() or any(rare) or extensions.is_stale)
            and reducer.arrivals.is_lean
            and not (buckets.unbucketed or buckets.casts or buckets.shown_copies or buckets.left_to_users)
            and all(bucket.flat.dtype is not torch.float16 for bucket in buckets.buckets)
            and type(finisher) is AllReduce
            and finisher.sums is reducer.channel
            and not finisher.launches_at_end(shadowed=False)
        )


def _make_begin(frozen: FrozenStep, reducer: Reducer) -> Callable[[Forward, Tensor], None]:
    arrivals, buckets, extensions, ledger = reducer.arrivals, reducer.buckets, reducer.extensions, reducer.ledger
    forwards, watch, blocks, status = reducer.forwards, reducer.watch, reducer.ledger.blocks, reducer.ledger.status
    parameters, originals = reducer.trained.parameters, reducer.trained.originals
    triggers, all_views, channel, living = arrivals.triggers, buckets.all_views, reducer.channel, reducer.channel.living
    wrappers, modules = abort.living, sys.modules
    phase = None if recorder.box is None else recorder.box.span(BACKWARD)  # of the black box
    end_phase: Any = None if phase is None else partial(phase.__exit__, None, None, None)
    is_captured = capture_query(reducer.exposed_time.device)
    this: weakref.ref[abort.Member] = weakref.ref(reducer)
    number, general, end, new = reducer.number, reducer.backward_reached, _make_end(frozen, reducer), Backward.__new__

    @never_compiled
    def begin(forward: Forward, gradient: Tensor) -> None:
        """3. Backward reaches an output."""
        autograd = modules.get(COMPILED_AUTOGRAD)
        is_plain = frozen.is_frozen and reducer.sync_enabled and is_plain_backward() and not torch.is_grad_enabled()
        is_recorded = recorder.on or recorder.bucket_watch is not None or is_profiling() or failpoints.orders
        is_weighted = forward.block is not None or status.weighting or blocks.open or blocks.unused
        is_joint = unfinished or (len(wrappers) > 1 and abort.others_await(reducer))
        is_due = extensions.is_stale or ledger.synchronizations >= ledger.compare_at or is_captured()
        is_special = ledger.local_tasks or forwards.may_be_empty or forwards.differentiated_in == status.optimizer_steps
        if (
            not (is_plain and arrivals.is_lean and channel.key in living)
            or (is_recorded or is_weighted or is_joint or is_due or is_special or buckets.copies)
            or (autograd is not None and autograd.in_compiled_autograd_region)
            or not (originals[0].requires_grad or any(map(_requires_grad, originals)))
            or not all(map(is_none, map(gradient_of, parameters)))
            or (watch.change is not None or watch.differs())
        ):
            general(forward, gradient)
            return
        if arrivals.triggers is not triggers or buckets.all_views is not all_views or not all_views.are_untouched():
            frozen.thaw()
            general(forward, gradient)
            return
        task = current_task()  # as in Ledger.backward_began()
        if task != ledger.task + 1 and ledger.task != -1:
            ledger.note_other_backward()
        ledger.task, ledger.current, status.weighting = task, None, UNWEIGHTED
        forwards.waiting.discard(weakref.ref(forward))
        forwards.is_unseen = frozen.has_skipped = False
        reducer.backward = frozen.running = backward = new(Backward)
        backward.launched, backward.buckets_unreferenced = [], True
        unfinished.add(number)
        if phase is not None:
            phase.__enter__()
            backward.end_arrival_span = end_phase  # type: ignore[method-assign]
        callback = partial(end)  # only autograd references it, as in Reducer.begin_in_graph_task()
        backward.task, backward.task_number = weakref.ref(callback, dropped), task
        queue_callback(callback)

    @never_compiled
    def dropped(reference: weakref.ref[Any]) -> None:
        """Handle the end of a graph task, which is an exception unless ``end`` has run."""
        if (running := frozen.running) is not None and running.task is reference:
            frozen.running = None
            abort.task_ended(this, weakref.ref(running), reference)

    return begin


def _make_arrived(frozen: FrozenStep, reducer: Reducer, number: int) -> Callable[[Tensor], None]:
    bucket, owned, channel = reducer.buckets.buckets[number], reducer.buckets.owned[number], reducer.channel
    launch, outstanding = channel.launcher(bucket.memory, averages=bucket.is_averaged), channel.outstanding
    copy = partial(copy_each, bucket.views) if bucket.prescale == 1.0 else partial(copy_scaled_into, bucket)
    progress = channel.progress if channel.advances_in_hooks else None
    index, hooks = reducer.arrivals.trigger(number)
    general = partial(reducer.gradient_arrived, index)

    @never_compiled
    def arrived(parameter: Tensor) -> None:
        """4. and 5. The last gradient of the bucket has arrived."""
        running = frozen.running
        if running is None or running is not reducer.backward or running.phase is not LAUNCHING or len(hooks) > 1:
            general(parameter)
            return
        launched = running.launched
        if len(launched) != number or torch.is_grad_enabled():
            frozen.has_skipped = True
            return
        try:
            copy(list(map(gradient_of, owned)))
        except (AttributeError, RuntimeError, TypeError):  # one is missing or not dense, and end() notices
            return
        exhaust(map(setattr, owned, repeat("grad"), repeat(None)))
        launched.append(launch())
        outstanding.count += 1
        if frozen.has_skipped:
            general(parameter)
        if progress is not None:
            progress()

    return arrived


def _make_end(frozen: FrozenStep, reducer: Reducer) -> Callable[[], None]:
    channel, ledger, buffers, board = reducer.channel, reducer.ledger, reducer.buffers, reducer.board
    buckets, count, digest, box = reducer.buckets, len(reducer.buckets), reducer.digest, recorder.box
    tail = buckets.buckets[-1].tail
    overlapped, emptied = (count, buckets.parameters) if board is not None else (count - 1, buckets.rest)
    launch_last = None if board is not None else _make_arrived(frozen, reducer, overlapped)
    last, general, synchronized = buckets.owned[-1][-1], reducer.advance_in_callback, buffers.buffers
    wait, publish = _make_wait(reducer), _make_publish(reducer)

    @never_compiled
    def end() -> None:
        """6. Backward has ended."""
        backward, are_enabled = frozen.running, torch.is_grad_enabled()
        is_ours = backward is not None and backward is reducer.backward and len(backward.launched) == overlapped
        position = ledger.position(channel.size) if is_ours and all(map(is_none, map(gradient_of, emptied))) else None
        if backward is None or position is None:
            frozen.thaw()
            general()
            return
        set_grad_enabled(False)  # as in Reducer.advance()
        try:
            if board is not None:
                backward.position, backward.content = position, hash(position) & DIGEST or LEAST_DIGEST
                board.post(backward.content)
            elif launch_last is not None:
                digest.write(tail, position, 0.0)
                launch_last(last)
                if len(backward.launched) != count:
                    frozen.thaw()
                    queue_callback(general)
                    return
            backward.phase = WAITING
            if box is not None:
                backward.end_arrival_span()
            if synchronized.places:
                buffers.launch()
            wait(backward)
            if board is None and digest.read(tail, UNWEIGHTED) is None:
                reducer.begin_exchange(backward)
                queue_callback(general)
                return
            if synchronized.places:
                buffers.wait()
            publish(backward)
            frozen.running = None
        except BaseException:  # including KeyboardInterrupt, because the other ranks are in collectives
            abort.break_off(reducer, backward)
            raise
        finally:
            set_grad_enabled(are_enabled)

    return end


def _make_wait(reducer: Reducer) -> Callable[[Backward], None]:
    exposed, outstanding, count = reducer.exposed_time, reducer.channel.outstanding, len(reducer.buckets)
    first_awaited = count - 1 if reducer.channel.is_ordered else 0  # as in AllReduce.wait()
    on_device, clock, box = exposed.device.type != "cpu", time.perf_counter, recorder.box
    phases: Any = None if box is None else (box.span(WAIT), box.span(BUCKET_WAIT))

    @never_compiled
    def wait(backward: Backward) -> None:
        """7. The buckets are awaited."""
        if on_device and exposed.waits % SAMPLED == 0:
            reducer.wait_for_buckets(backward)
            return
        began = clock()
        try:
            if box is None:
                for work in backward.launched[first_awaited:]:
                    work.wait()
            else:
                wait_phase, bucket_phase = phases
                with wait_phase:
                    for box.bucket, work in enumerate(backward.launched[first_awaited:], first_awaited):
                        with bucket_phase:
                            work.wait()
        except PacelineError:
            raise
        except RuntimeError:
            reducer.wait_for_buckets(backward)  # raises an error that names the bucket
            raise
        outstanding.count -= count
        if on_device:
            exposed.waits += 1
        else:
            exposed.measured += clock() - began

    return wait


def _make_publish(reducer: Reducer) -> Callable[[Backward], None]:
    buckets, ledger, early, number = reducer.buckets, reducer.ledger, reducer.early, reducer.number
    parameters, views, marks, reads_late = buckets.parameters, buckets.views, early.marks(), reducer.board is not None
    unweighted = [(0.0, UNWEIGHTED)] * reducer.channel.size
    sums, factor = [bucket.flat for bucket in buckets.buckets if not bucket.holds_means], compute_scale(unweighted)

    @never_compiled
    def publish(backward: Backward) -> None:
        """7. and 9. The sums become averages, which become the gradients."""
        if sums and factor != 1.0:
            multiply_each(sums, factor)
        exhaust(map(setattr, parameters, repeat("grad"), views))
        ledger.notes = unweighted
        ledger.synchronized()
        backward.launched.clear()
        if reads_late:
            early.copies, early.versions = NO_COPIES, list(map(version_of, marks))
            backward.is_early, backward.phase, backward.task = True, UNREAD, None
        else:
            backward.phase, backward.task, reducer.backward = OVER, None, None
            unfinished.discard(number)

    return publish
