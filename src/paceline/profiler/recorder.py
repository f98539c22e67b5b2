"""Recording on one rank: enables spans, detects where steps end, and writes them to the rank's file."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from traceback import format_exception_only
from typing import Any, TextIO
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.core.messages import say
from paceline.core.spans import (
    BACKWARD,
    BUCKET_WAIT,
    COLLECTIVE,
    COLLECTIVES,
    DATA_WAIT,
    FORWARD,
    GRADIENT,
    OPTIMIZER,
    WAIT,
    recorder,
)
from paceline.core.torch_internals import (
    BatchIterator,
    before_profiling,
    class_never_compiled,
    compiled_below,
    parts_of,
    queue_callback,
)
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.profiler import rank_file
from paceline.profiler.environment import Enough, check_world, describe_model, describe_rank, time_of_day
from paceline.profiler.host_load import CollectorPauses, HostLoad
from paceline.profiler.measurements import DeviceTimes, Forwards, GradientNorms, OperatorTrace, are_due
from paceline.profiler.rank_file import RankRecord
from paceline.profiler.stack_samples import StackSampler, between_spans
from paceline.profiler.steps import (
    DETAILED,
    FLUSH_S,
    KEPT,
    MEASURED,
    MOST,
    TRACED,
    WARM_UP,
    Step,
    are_apart,
    cut_into_stretches,
    kind_of,
    measure_offset,
    seconds_by_part,
)

CROWD = 50_000
"""Maximum number of spans in a step, to limit memory. Figures exclude steps with more spans."""

MOST_LETTERS = 500
"""Maximum length of an error message in the record."""


@class_never_compiled
class Session:
    """Records this rank while its block runs.

    After an error the record has the steps before it; ``sys.exit()`` and ``sys.exit(0)`` count as success.

    Args:
        folder: folder of the profile.
        steps: number of steps to measure; None for all.
        operators: whether torch's profiler records a few steps.
        noise_scale: whether to measure gradient norms.
        ends_program: whether to end the program once `steps` steps have been measured.
        title: name of the program; by default its command line.
    """

    def __init__(
        self,
        folder: Path,
        steps: int | None = None,
        *,
        operators: bool = True,
        noise_scale: bool = False,
        ends_program: bool = False,
        title: str = "",
    ) -> None:
        if recorder.on:
            raise UsageError("another profile is being recorded; end it before starting this one")
        folder = folder.absolute()  # the program may change its working directory
        self._wanted, self._ends_program, self._measures_norms = steps, ends_program, noise_scale
        self._record = describe_rank(title)
        self.rank = self._record.rank
        self._file = rank_file.open_file(folder, self._record.rank)
        if self._record.rank == 0:
            rank_file.remove_ranks(folder, self._record.size)
        rank_file.write_facts(self._file, self._record)
        self._traced = TRACED if operators else 0
        self._operators = OperatorTrace(rank_file.trace_of(folder, self._record.rank))
        self._device_times: DeviceTimes | None = None
        """Created by the first forward on a GPU."""
        self._number = self._measured = 0
        """Number of all steps, and number of measured steps."""
        self._kind = ""
        """Kind of the current step."""
        self._forwards = Forwards()
        """Forward passes of the current step."""
        self._loading = 0.0
        """Core seconds that the loop's own thread spent loading batches in the current step."""
        self._depth = self.backwards = 0
        """Number of backward passes in progress, and number of completed backward passes."""
        self._is_due = self._stepped_inside = False
        """Whether a backward pass has ended since the last step; whether an optimizer stepped during one."""
        self.group_of_torch: Any = None
        """Process group of the wrapper in the last forward pass, if it is torch's wrapper. The backward pass ends by
        waiting for the ranks of this group."""
        self._wrapper: Any = None
        """The wrapper with the most parameters."""
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._is_crowded = self._has_loader = False
        """Whether spans of the current step were dropped; whether a DataLoader has returned a batch."""
        self._is_closed = self._is_over = False
        self._load = HostLoad()
        self._stacks = StackSampler()
        self._steps = StepWriter(self._file, self._record, self._stacks)
        self._hooks, self._gradient_hooks = ExitStack(), ExitStack()
        self._hooks.enter_context(_torch_spans(self))
        self._pauses = CollectorPauses()
        gc.callbacks.append(self._pauses)
        self._hooks.callback(self._pauses.detach)
        self._hooks.enter_context(before_profiling(self._operators.give_way))
        _recording.add(self)
        recorder.spans.clear()
        recorder.on = True
        self._start = time.perf_counter()
        self._prepare()

    # -- calls of the replaced functions of torch --------------------------------------------------------------------

    def forward_begins(self, model: TorchDDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward pass and its rows."""
        if self._is_over or not (model.training and torch.is_grad_enabled()):
            return
        if self._wrapper is None:
            check_world(self._record)
        is_of_torch = not isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
        self.group_of_torch = model.process_group if is_of_torch else None
        self._forwards.add(model, args, kwargs)
        if model is self._wrapper:
            return
        if self._wrapper is None or _count(model) > _count(self._wrapper):
            self._wrapper = model
        if self._device_times is None and torch.cuda.is_initialized():
            self._device_times = DeviceTimes(torch.device("cuda", torch.cuda.current_device()))
            recorder.make_event = self._device_times.event

    def backward_begins(self) -> None:
        """Count a backward pass as in progress."""
        self._depth += 1

    def backward_ends(self) -> None:
        """Note that a backward pass has ended, so an optimizer may now end the step."""
        self._depth -= 1
        self.backwards += 1
        self._is_due = self._is_due or self._is_shared()
        self._thin_out()
        if self._stepped_inside and not self._depth:
            self._stepped_inside = False
            if self._is_due:
                self._end_step()

    def batch_came(self, iterator: Any, seconds: float) -> None:
        """Record that a DataLoader returned a batch, which cost the loop `seconds` of core time."""
        self._loading += seconds
        if not self._has_loader:
            self._has_loader = True
            _, _, self._record.workers = parts_of(iterator)
        self._thin_out()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, is_inner: bool) -> None:
        """End the step, unless the optimizer runs inside another one or no wrapper took part in the step."""
        self._optimizers.add(optimizer)
        if self._depth:
            self._stepped_inside = True
        elif self._is_due and not is_inner:
            self._end_step()
        else:  # perhaps a model that only this rank trains; other ranks do not have such steps
            self._thin_out()

    def _is_shared(self) -> bool:
        """Return whether a wrapper has taken part in the step."""
        # torch.compile may hide the wrapper's forward pass, but the wait at the end of backward is always a span.
        return len(self._forwards) > 0 or any(span.label == WAIT for span in recorder.spans)

    def _thin_out(self) -> None:
        """Drop the spans of a step that does not end, for example in a long evaluation or without a wrapper."""
        if len(recorder.spans) > CROWD:
            recorder.spans.clear()
            self._is_crowded = True

    # -- steps ----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Prepare for the next step."""
        kind, previous = kind_of(self._number, self._traced), self._kind
        self._kind = kind
        recorder.skipped = set() if kind == "detailed" else {BUCKET_WAIT}
        recorder.bucket_watch = None
        if self._measures_norms and kind in MEASURED and are_due(self._number):
            recorder.bucket_watch = self._steps.norms[self._number] = GradientNorms()
        if kind == previous == "plain":
            return
        recorder.detailed = kind == "detailed"
        if kind != previous:
            self._gradient_hooks.close()
            if recorder.detailed and self._record.size == 1 and self._wrapper is not None:
                self._mark_gradients()
        if kind == "traced":
            # Measure again, because torch's profiler uses the time of day, which may have been adjusted.
            self._record.started_ns = time_of_day()
        self._operators.follow(is_wanted=kind == "traced")
        # Measure early in the run, because this is collective, and later, ranks may be at different steps.
        if self._number in (0, WARM_UP) and not self._record.offsets and are_apart():
            self._record.offsets.append(measure_offset())

    def _mark_gradients(self) -> None:
        """Mark the arrival of each gradient. If there are several ranks, the reducer does that."""
        trained = [parameter for parameter in self._wrapper.parameters() if parameter.requires_grad]
        for index, parameter in enumerate(trained):
            hook = parameter.register_post_accumulate_grad_hook(lambda _, index=index: recorder.mark(GRADIENT, index))
            self._gradient_hooks.callback(hook.remove)

    def _end_step(self) -> None:
        """End the step, and write steps if a write is due."""
        if self._is_over:
            return
        # Read the clock first, because the time from here on belongs to the next step.
        end = time.perf_counter()
        spans, recorder.spans = recorder.spans, []
        kind = "crowded" if self._is_crowded else self._kind
        step = Step(self._number, kind, self._start, end, {}, [], spans=spans)
        self._forwards.describe(step)
        step.delayed, step.loading, self._loading = self._load.delay(), self._loading, 0.0
        step.collected, self._pauses.collected = self._pauses.collected, 0
        self._steps.steps += [step] if self._device_times is None else self._device_times.step_ends(step)
        self._measured += step.is_measured()
        self._start, self._number = end, self._number + 1
        self._forwards = Forwards()
        self._is_due = self._stepped_inside = self._is_crowded = False
        if self._steps.is_due(end):
            self._flush()
        if self._number == WARM_UP + DETAILED:
            self._write_facts(rank_file.KILLED)  # replaced if the rank ends normally
        if self._measured in (MOST, self._wanted):
            self._stop()
            if self._measured == self._wanted and self._ends_program:
                raise Enough(0)
        else:
            self._prepare()
            if self._device_times is not None:
                self._device_times.step_begins()

    def _flush(self) -> None:
        """Write the recorded steps. A full disk ends the profile, not the training."""
        try:
            self._steps.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        where = f"rank {self.rank}: the profile ends in step {self._number}"
        say(f"paceline: {where} because it cannot be written: {error.strerror}; make room on the disk")
        self._stop()

    # -- the end --------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop recording."""
        if self._is_over:
            return
        # Leave the hooks installed, because one of them may be calling this while torch iterates over its hooks.
        self._is_over = True
        self._gradient_hooks.close()
        self._stacks.stop()
        recorder.on = recorder.detailed = False
        recorder.make_event = recorder.bucket_watch = None
        recorder.spans, recorder.skipped = [], set()
        self._operators.follow(is_wanted=False)

    def abandon(self) -> None:
        """Stop recording in a forked child, because the file belongs to its parent."""
        self._operators.drop()
        self._load.abandon()
        self._is_closed = True
        self._stop()
        self._hooks.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, _class: object, error: BaseException | None, _trace: object) -> None:
        """End the recording, and close the file if it is open. Collective unless there is an exception."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop()
        self._hooks.close()
        if self._device_times is not None:
            self._steps.steps += self._device_times.rest()
        # Collective, so skip it after an exception, when other ranks may not get here.
        if error is None and are_apart():
            self._record.offsets.append(measure_offset())
        if isinstance(error, SystemExit) and not error.code:
            error = None
        self._record.profiles_itself = self._operators.has_given_way
        self._record.ended_ns = time.time_ns()
        self._load.close(self._record)
        self._flush()
        self._write_facts("" if error is None else "".join(format_exception_only(error)).strip()[:MOST_LETTERS])
        with suppress(OSError):  # already reported by the flush
            self._file.close()

    def _write_facts(self, ended: str) -> None:
        """Write the facts about the rank."""
        describe_model(self._record, self._wrapper, self._optimizers)
        self._record.groups = {name: list(ranks) for name, ranks in recorder.groups.items()}
        self._record.sampled_s, self._record.ended = self._stacks.interval, ended
        try:
            rank_file.write_facts(self._file, self._record)
        except OSError as error:
            self._give_up(error)


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


_recording: WeakSet[Session] = WeakSet()
"""The session that is recording in this process, if any."""


def _abandon() -> None:
    for session in list(_recording):
        session.abandon()


os.register_at_fork(after_in_child=_abandon)


class StepWriter:
    """Cuts steps into parts and writes them in batches; holds the steps of `record` that are not in the file yet."""

    def __init__(self, file: TextIO, record: RankRecord, stacks: StackSampler) -> None:
        self.steps: list[Step] = []
        self.norms: dict[int, GradientNorms] = {}
        """Gradient norms by step, until the step is written."""
        self._file, self._record, self._stacks = file, record, stacks
        self._flushed = time.perf_counter()

    def is_due(self, now: float) -> bool:
        """Return whether it is time to write."""
        # Write warm-up steps immediately, so that the record of a job that is stopped early shows how many there were.
        is_warm_up = bool(self.steps) and self.steps[-1].number < WARM_UP
        return is_warm_up or now - self._flushed > FLUSH_S

    def flush(self) -> None:
        """Write the steps and forget them, even if writing raises ``OSError``."""
        steps, self.steps, self._flushed = self.steps, [], time.perf_counter()
        rank_file.write_steps(self._file, map(self._cut, steps))

    def _cut(self, step: Step) -> Step:
        """Return `step` cut into parts, without spans once enough steps have kept theirs."""
        stretches, step.meetings = cut_into_stretches(step.spans, step.start, step.end)
        step.seconds = seconds_by_part(stretches)
        # Take the samples of every step, because unused ones would stay in the queue.
        samples = self._stacks.of(step.start, step.end)
        if step.is_measured():
            for name in between_spans(samples, stretches):
                self._record.own_code[name] = self._record.own_code.get(name, 0) + 1
        norms = self.norms.pop(step.number, None)
        step.norms = None if norms is None else norms.squared()
        if step.number >= WARM_UP + DETAILED + TRACED + KEPT:
            step.spans = []
        return step


BUFFERS_TRAVEL = "_distributed_broadcast_coalesced"
"""Method of torch's wrapper that waits for rank 0's buffers during the forward pass."""


@contextmanager
def _torch_spans(session: Session) -> Iterator[None]:
    """Inside this context, record spans of torch's functions and report events to `session`.

    Replaces a few torch functions with wrappers, so scripts need no change. torch's own DistributedDataParallel waits
    for its all-reduces in callbacks at the end of backward; a callback queued before them marks the start of the wait.
    """
    with ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(dist, name):  # torch may remove deprecated functions
                stack.enter_context(_replaced(dist, name, _collective))
        stack.enter_context(_replaced(torch.autograd, "backward", functools.partial(_backward, session)))
        stack.enter_context(_replaced(BatchIterator, "__next__", functools.partial(_next_batch, session)))
        stack.enter_context(_replaced(TorchDDP, "__call__", functools.partial(_forward, session)))
        stack.enter_context(_replaced(TorchDDP, BUFFERS_TRAVEL, _collective))
        for handle in _optimizer_hooks(session):
            stack.callback(handle.remove)
        yield


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace ``owner.name`` with ``make(original)`` inside this context."""
    original, was_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        # TorchDDP inherits __call__. Leaving a copy on it would hide later changes to nn.Module.__call__.
        if was_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _next_batch(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    loop = threading.current_thread()

    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        if threading.current_thread() is not loop:  # called by a prefetching thread, which the loop does not wait for
            return original(iterator)
        began = time.thread_time()
        with recorder.span(DATA_WAIT):
            batch = original(iterator)
        session.batch_came(iterator, time.thread_time() - began)
        return batch

    return next_batch


def _backward(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        session.backward_begins()
        try:
            with recorder.surround(BACKWARD), ExitStack() as at_end:
                group = session.group_of_torch
                if group is not None and recorder.on:
                    roots = signature.bind(*args, **kwargs).arguments.get("tensors")
                    _watch_end(_name_of(group), roots, at_end)
                return original(*args, **kwargs)
        finally:
            session.backward_ends()

    return backward


def _watch_end(group: str | None, roots: Any, at_end: ExitStack) -> None:
    """Record a wait for `group`, from the last gradient of a backward pass from `roots` until `at_end` closes."""
    is_queued = False

    def queue(*_: Any) -> None:
        nonlocal is_queued
        if not is_queued:  # before any gradient, and therefore before the wrapper's callback
            is_queued = True
            queue_callback(lambda: at_end.callback(recorder.open(WAIT, group=group)))

    for root in [roots] if isinstance(roots, torch.Tensor) else roots or ():
        # A root may be a GradientEdge.
        node = root.grad_fn if isinstance(root, torch.Tensor) else getattr(root, "node", None)
        if node is not None:
            at_end.callback(node.register_prehook(queue).remove)


def _forward(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @compiled_below  # so that a compiled wrapper also calls it
    @functools.wraps(original)
    def forward(model: TorchDDP, *args: Any, **kwargs: Any) -> Any:
        session.forward_begins(model, args, kwargs)
        with recorder.surround(FORWARD):
            return original(model, *args, **kwargs)

    return forward


def _collective(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not recorder.on:
            return original(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:  # let torch raise the error for invalid arguments
            return original(*args, **kwargs)
        # With async_op, only the later wait counts.
        if bound.get("async_op"):
            return original(*args, **kwargs)
        # The first argument of BUFFERS_TRAVEL is a wrapper.
        group = bound["self"].process_group if "self" in bound else bound.get("group")
        with recorder.span(COLLECTIVE, group=_name_of(group)):
            return original(*args, **kwargs)

    return collective


def _name_of(group: Any) -> str | None:
    """Return the name of `group`, and add its ranks to the recorder. None before a process group is initialized."""
    if not dist.is_initialized():
        return None
    group = dist.group.WORLD if group is None else group
    name = getattr(group, "group_name", None)
    if name is not None and name not in recorder.groups:
        recorder.groups[name] = dist.get_process_group_ranks(group)
    return name


def _optimizer_hooks(session: Session) -> list[Any]:
    running: list[tuple[int, int, Callable[[], object]]] = []
    """Optimizer steps in progress, innermost last: the optimizer's id, `session.backwards` at the start, and the
    function that ends the span."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        running.append((id(optimizer), session.backwards, recorder.open(OPTIMIZER)))

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Entries of steps that raised are still above this step's entry.
        while running:
            number, _backwards, end = running.pop()
            if number == id(optimizer):
                end()
                break
        # A ShardedOptimizer steps another optimizer inside its own step, and gathers the parameters afterwards. Ignore
        # steps that began before the last backward pass, because they may have raised.
        is_inner = any(backwards == session.backwards for _number, backwards, _end in running)
        session.optimizer_stepped(optimizer, is_inner)

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
