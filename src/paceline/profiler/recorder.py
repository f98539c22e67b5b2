"""Recording on one rank: enables spans, detects where steps end, and writes them to the rank's file."""

from __future__ import annotations

import gc
import math
import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from traceback import format_exception_only
from typing import Any, TextIO
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.core.messages import say
from paceline.core.spans import BUCKET_WAIT, GRADIENT, LAUNCH, WAIT, recorder
from paceline.core.torch_internals import before_profiling, class_never_compiled, parts_of
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.profiler import rank_file
from paceline.profiler.environment import Enough, check_world, describe_model, describe_rank, time_of_day
from paceline.profiler.host_load import CollectorPauses, HostLoad
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
from paceline.profiler.torch_profiler import OperatorTrace
from paceline.profiler.torch_spans import DeviceTimes, torch_spans

# Batch sizes, taken from the inputs of the program's models.


class Forwards:
    """The forward passes of a step, by model. Several models in a program may process the same samples."""

    def __init__(self) -> None:
        self._by_model: dict[int, tuple[int, int, int]] = {}

    def add(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward pass of `model` with these arguments."""
        number, rows, cells = self._by_model.get(id(model), (0, 0, 0))
        more, cells_more = size_of_input(args, kwargs)
        self._by_model[id(model)] = number + 1, rows + more, cells + cells_more

    def describe(self, step: Step) -> None:
        """Set the batches of `step` from the model with the most samples, and count the averaging backward passes."""
        step.batches, step.rows, step.cells = max(self._by_model.values(), default=(0, 0, 0))
        # Averaging gradients launches every bucket once. With torch's wrapper only the wait is visible.
        first = sum(span.label == LAUNCH and span.bucket == 0 for span in step.spans)
        averages = first or sum(span.label == WAIT for span in step.spans)
        step.averages = min(step.batches, averages // max(1, len(self._by_model)))

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._by_model)


def size_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the rows and cells (rows times columns, including padding) of the first tensor among the inputs."""
    first = args[0] if args else None  # the only input of most models
    if not (isinstance(first, torch.Tensor) and first.dim()):
        first = next((tensor for tensor in nested_tensors((args, kwargs)) if tensor.dim()), None)
    return (0, 0) if first is None else (len(first), math.prod(first.shape[:2]))


# Gradient norms of one rank, for the gradient noise scale.


EVERY, SEEN = (4, 16), 48
"""Steps between two measurements, in the first ``SEEN`` steps and later. Each costs two passes over the gradients."""


def are_due(step: int) -> bool:
    """Return whether to measure a step."""
    return step % EVERY[step >= SEEN] == 0


class GradientNorms:
    """Norms of the buckets of a step. They are kept as tensors, because a device computes asynchronously."""

    def __init__(self) -> None:
        self._local: list[tuple[Tensor, float]] = []
        self._averaged: list[Tensor] = []

    def launched(self, flat: Tensor, factor: float) -> None:
        """Compute the norm of a bucket that holds `factor` times the mean gradient over this rank's samples."""
        if factor:  # 0 on a rank without samples
            self._local.append((torch.linalg.vector_norm(flat), factor))

    def averaged(self, flat: Tensor) -> None:
        """Compute the norm of a bucket of averaged gradients."""
        self._averaged.append(torch.linalg.vector_norm(flat))

    def squared(self) -> tuple[float, float] | None:
        """Return the squared norms of this rank's gradient and of the average; None unless both exist and are finite.

        Waits for the device.
        """
        if not (self._local and self._averaged):
            return None
        local = math.fsum((float(norm) / factor) ** 2 for norm, factor in self._local)
        averaged = math.fsum(float(norm) ** 2 for norm in self._averaged)
        return (local, averaged) if math.isfinite(local + averaged) else None


# Cuts a rank's steps into parts, and writes them to its file in batches.


class StepWriter:
    """Holds the steps of `record` that are not in the file yet."""

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
        self._hooks.enter_context(torch_spans(recorder, self))
        self._pauses = CollectorPauses()
        gc.callbacks.append(self._pauses)
        self._hooks.callback(gc.callbacks.remove, self._pauses)
        self._hooks.enter_context(before_profiling(self._operators.give_way))
        _recording.add(self)
        recorder.spans.clear()
        recorder.on = True
        self._start = time.perf_counter()
        self._prepare()

    # -- calls of torch_spans -------------------------------------------------------------------------------------

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
        step.collecting = self._pauses.take()
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
