"""Recording on one rank: turns spans on, finds the ends of steps, and writes them to the rank's file."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.data_parallel import nested_tensors
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.profiler.clocks import are_apart, day_of_zero, measure_offset
from paceline.profiler.device_times import DeviceTimes
from paceline.profiler.noise_scale import squared_norms
from paceline.profiler.operators import OperatorTrace
from paceline.profiler.rank_file import FOLDER, RankRecord, path_of, trace_of, write_end, write_head, write_steps
from paceline.profiler.steps import MEASURED, Step, cut
from paceline.profiler.torch_spans import torch_spans
from paceline.tracing import Recorder, recorder

WARM_UP, DETAILED, TRACED = 3, 5, 3
"""Steps at the beginning: not measured; with marks of every gradient; under torch's profiler, and not measured."""
KEPT = 100
"""Measured steps of which single spans are kept."""
MOST = 10_000
"""Steps that are recorded; a longer run is described by its first ones."""
FLUSH_S = 2.0
NORMS_EVERY = 4
"""Measured steps from one that takes norms of gradients to the next: they cost two passes over the gradients."""


class Session:
    """Records this rank until :meth:`close`. Every rank has one.

    Args:
        folder: of the profile.
        steps: how many steps to measure; None for all.
        operators: whether torch's profiler looks at a few steps, too.
        on_enough: called when `steps` steps were measured.

    Raises:
        UsageError: if the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        steps: int | None = None,
        *,
        operators: bool = True,
        on_enough: Callable[[], None] = lambda: None,
        recorder: Recorder = recorder,
    ) -> None:
        if recorder.on:
            raise UsageError("a profile is being recorded already; end it before the next one begins")
        self._folder, self._wanted, self._on_enough, self._recorder = folder, steps, on_enough, recorder
        self._record = _describe_rank()
        self._file = _open_file(folder, self._record.rank)
        write_head(self._file, self._record)
        self._traced = TRACED if operators else 0
        self._operators = OperatorTrace(trace_of(folder, self._record.rank))
        self._device_times: DeviceTimes | None = None
        """Made when the first forward shows that the model is on a GPU."""
        self._unwritten: list[Step] = []
        self._flushed = time.perf_counter()
        self._number = self._measured = 0
        """Steps so far, and those of them that were measured."""
        self._rows = self._batches = 0
        """Of the step under way."""
        self._norms: dict[int, list[tuple[str, Any, float]]] = {}
        """Norms of buckets, by step, until the device has come to them."""
        self._depth = 0
        """Backwards under way."""
        self._is_due = self._stepped_inside = False
        """Whether a backward has ended since the last step did; whether an optimizer stepped inside one."""
        self._wrapper: Any = None
        """The wrapper with most parameters."""
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._is_closed = self._is_over = False
        self._hooks = ExitStack()
        self._hooks.enter_context(torch_spans(recorder, self))
        recorder.spans.clear()
        recorder.on = True
        self._start = time.perf_counter()
        self._prepare()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._record.rank

    # -- what torch_spans tells -----------------------------------------------------------------------------------

    def forward_begins(self, model: TorchDDP, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the forward and its rows."""
        if self._is_over or not (model.training and torch.is_grad_enabled()):
            return
        self._batches += 1
        self._rows += next((len(tensor) for tensor in nested_tensors((args, kwargs)) if tensor.dim()), 0)
        if model is self._wrapper:
            return
        if self._wrapper is None or _count(model) > _count(self._wrapper):
            self._wrapper = model
        if self._device_times is None and torch.cuda.is_initialized():
            self._device_times = DeviceTimes(torch.device("cuda", torch.cuda.current_device()))
            self._recorder.make_event = self._device_times.event

    def backward_begins(self) -> None:
        """Count it."""
        self._depth += 1

    def backward_ends(self) -> None:
        """Note that an optimizer step would end the step now."""
        self._depth -= 1
        self._is_due = True
        if self._stepped_inside and not self._depth:
            self._end_step()

    def batch_came(self) -> None:
        """Note that a DataLoader is used."""
        self._record.loaders_seen = True

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """End the step, unless this is a further optimizer of the same backward."""
        self._optimizers.add(optimizer)
        if self._depth:
            self._stepped_inside = True
        elif self._is_due:
            self._end_step()

    # -- steps ----------------------------------------------------------------------------------------------------

    def _kind(self, number: int) -> str:
        """Return the kind of step `number`; the one after torch's profiler pays for its end."""
        ends = [WARM_UP, WARM_UP + DETAILED, WARM_UP + DETAILED + self._traced]
        for kind, end in zip(("warm-up", "detailed", "traced"), ends, strict=True):
            if number < end:
                return kind
        return "warm-up" if self._traced and number == ends[-1] else "plain"

    def _prepare(self) -> None:
        """Set up for the step that begins now."""
        kind = self._kind(self._number)
        self._recorder.detailed = kind == "detailed"
        self._recorder.norms = [] if kind in MEASURED and self._number % NORMS_EVERY == 0 else None
        if kind == "traced":
            self._record.started_ns = day_of_zero()  # again: torch's profiler counts from the day, which may be set
        self._operators.follow(is_wanted=kind == "traced")
        if self._number == WARM_UP and are_apart():
            self._record.offsets.append(measure_offset())
        if self._device_times is not None:
            self._device_times.step_begins()

    def _end_step(self) -> None:
        """A step is over: keep it, and write what has come together."""
        if self._is_over:
            return
        end = time.perf_counter()
        spans, self._recorder.spans = self._recorder.spans, []
        kind = self._kind(self._number)
        step = Step(self._number, kind, self._start, end, {}, [], self._rows, self._batches, None, spans)
        if self._recorder.norms:
            self._norms[self._number] = self._recorder.norms
        finished = [step] if self._device_times is None else self._device_times.step_ends(step)
        self._unwritten += map(self._cut, finished)
        self._measured += step.is_measured()
        self._start, self._number = end, self._number + 1
        self._rows = self._batches = 0
        self._is_due = self._stepped_inside = False
        if end - self._flushed > FLUSH_S:
            self._flush()
        if self._number == WARM_UP + DETAILED:
            self._describe_model()
        if self._number == MOST or self._measured == self._wanted:
            self._stop()
            if self._measured == self._wanted:
                self._on_enough()
        else:
            self._prepare()

    def _cut(self, step: Step) -> Step:
        """Return `step` with its parts; its spans are dropped if enough are kept."""
        seconds, meetings = cut(step.spans, step.start, step.end)
        spans = step.spans if step.number < WARM_UP + DETAILED + TRACED + KEPT else []
        norms = squared_norms(self._norms.pop(step.number, []))
        return replace(step, seconds=seconds, meetings=meetings, norms=norms, spans=spans)

    def _flush(self) -> None:
        write_steps(self._file, self._unwritten)
        self._unwritten, self._flushed = [], time.perf_counter()

    # -- the end --------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Record nothing more."""
        if self._is_over:
            return
        self._is_over = True
        self._recorder.on = self._recorder.detailed = False
        self._recorder.make_event = self._recorder.norms = None
        self._recorder.spans = []
        self._operators.follow(is_wanted=False)
        self._hooks.close()

    def close(self, error: BaseException | None = None) -> None:
        """End the recording and the file; harmless when already closed. With an `error`, alone and not with others."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop()
        if self._device_times is not None:
            self._unwritten += map(self._cut, self._device_times.rest())
        self._describe_model()
        if error is None and are_apart():
            self._record.offsets.append(measure_offset())
        self._record.ended = "" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
        self._record.groups = {name: list(ranks) for name, ranks in self._recorder.groups.items()}
        self._flush()
        write_end(self._file, self._record)
        self._file.close()

    def _describe_model(self) -> None:
        """Note what the wrapper and the optimizers hold, while they are there."""
        record, wrapper = self._record, self._wrapper
        record.memory["peak"] = peak_memory()
        if wrapper is None:
            return
        if dist.is_initialized():
            record.backend = str(dist.get_backend(wrapper.process_group))
        record.wrapper = "paceline" if isinstance(wrapper, DistributedDataParallel) else "torch"
        named = list(wrapper.module.named_parameters())
        trained = {name: parameter.nbytes for name, parameter in named if parameter.requires_grad}
        record.parameters = list(trained.items())
        if isinstance(wrapper, DistributedDataParallel):
            layout = wrapper.bucket_layout()
            record.buckets = [sum(trained.get(name, 0) for name in names) for names in layout]
        record.embeddings = [
            f"{name}.weight" if name else "weight"
            for name, layer in wrapper.module.named_modules()
            if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and not layer.sparse
        ]
        record.memory["parameters"] = sum(parameter.nbytes for _, parameter in named)
        record.memory["gradients"] = sum(trained.values())
        # A script's optimizers are gone when it has ended.
        record.memory["optimizer"] = max(record.memory.get("optimizer", 0), *map(_state_bytes, self._optimizers), 0)
        if torch.cuda.is_initialized():
            record.device = torch.cuda.get_device_name()


def _describe_rank() -> RankRecord:
    environment = os.environ.get
    rank, size = int(environment("RANK", "0")), int(environment("WORLD_SIZE", "1"))
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    return RankRecord(
        rank=rank,
        size=size,
        local_size=int(environment("LOCAL_WORLD_SIZE", str(size))),
        title=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        host=platform.node(),
        device="cpu",
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        started_ns=day_of_zero(),
    )


def _open_file(folder: Path, rank: int) -> Any:
    try:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        return path_of(folder, rank).open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"rank {rank}: the profile's folder {folder} cannot be written to: {error.strerror}; choose another"
        ) from error


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def peak_memory() -> int:
    """Return bytes: of the GPU where one is used, else of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
