"""Time per operator and kernel, from the traces that torch's profiler wrote on each rank."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.core.spans import BACKWARD, FORWARD
from paceline.core.strict_json import loads, read_text
from paceline.profiler.rank_file import RankRecord
from paceline.profiler.steps import Interval, merged, shared, total

Event = dict[str, Any]
"""An event in Google's Trace Event Format."""


def read_trace(file: Path) -> dict[str, Any]:
    """Return a rank's trace; empty if it is missing or truncated."""
    try:
        trace = loads(read_text(file))
    except (OSError, ValueError):
        return {}
    return trace if isinstance(trace, dict) else {}


MOST = 30
SHORT_OPERATOR = 15e-6
"""An operator shorter than this, in seconds, costs more to call than to compute."""
TENSOR_CORE_KERNELS = ("gemm", "cutlass", "xmma", "wgmma", "hmma", "cudnn")
"""Parts of the names of kernels that may use tensor cores, unless the name also contains a part in `_NOT_ON_THEM`."""
_NOT_ON_THEM = ("sgemm", "simt", "f32f32f32")
NCCL_KERNEL = re.compile("nccl.*Kernel")


@dataclass(frozen=True)
class Operator:
    """Time of an operator, averaged over ranks and over the steps that torch's profiler recorded."""

    name: str
    calls: float
    """Calls per step and rank."""
    seconds: float
    """Seconds per step and rank, excluding the operators that it called; on a GPU, device time."""
    share: float
    """Share of the time of all operators."""


@dataclass(frozen=True)
class OperatorTable:
    """Operators in the traced steps of all ranks, and figures of the GPU computed from kernels."""

    operators: list[Operator] = field(default_factory=list)
    calls: float = 0.0
    """Calls of ATen operators in forward and backward, or of kernels, per step and rank."""
    seconds: float = 0.0
    """Seconds of these calls."""
    device_figures: dict[str, float] = field(default_factory=dict)
    overlap: dict[int, float] = field(default_factory=dict)
    """Share of the time in NCCL kernels that overlaps with other kernels, by rank; empty without NCCL."""

    @property
    def computing(self) -> float:
        """Share of the operators' time that grows with the batch; the rest is the cost of calling them."""
        # The mean length is a good measure, because many short operators also mean much Python code between them.
        return min(1.0, self.seconds / self.calls / SHORT_OPERATOR) if self.calls else 1.0


def operators_in(traces: Sequence[dict[str, Any]], records: Sequence[RankRecord]) -> OperatorTable:
    """Return the operators in the `traces` that torch wrote on the ranks; a missing trace is empty."""
    traced: list[tuple[list[Event], int]] = []
    overlap = {}
    for trace, record in zip(traces, records, strict=True):
        steps = sum(step.kind == "traced" for step in record.steps)
        events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]  # with a duration
        if events and steps:
            traced.append((events, steps))
            if (share := overlap_of_kernels(events)) is not None:
                overlap[record.rank] = share
    return replace(tabulate(traced), overlap=overlap)


def overlap_of_kernels(events: Sequence[Event]) -> float | None:
    """Return the share of the time in NCCL kernels that overlaps with other kernels; None without NCCL.

    Holistic Trace Analysis defines overlap in the same way.
    """
    kernels = kernels_of(events)
    communicating = [interval(kernel) for kernel in kernels if NCCL_KERNEL.match(kernel["name"])]
    computing = [interval(kernel) for kernel in kernels if not NCCL_KERNEL.match(kernel["name"])]
    time = total(communicating)
    return shared(communicating, computing) / time if time else None


def tabulate(traces: Sequence[tuple[list[Event], int]]) -> OperatorTable:
    """Average the events over ranks and steps; `traces` pairs each rank's events with its number of steps."""
    if not traces:
        return OperatorTable()
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    in_model: list[tuple[float, float]] = []  # seconds of a call, and its weight in the mean of steps and ranks
    for events, steps in traces:
        weight = 1 / steps / len(traces)
        kernels = kernels_of(events)
        timed = [(kernel["name"], kernel["dur"]) for kernel in kernels] if kernels else own_times(events)
        for name, microseconds in timed:
            seconds[name] += microseconds / 1e6 * weight
            calls[name] += weight
        # Kernels run after the call that launched them has returned, so count all of them, not only those inside the
        # model.
        durations = timed if kernels else own_times(inside_of_model(events))
        # Autograd nodes are not operators, but have the same category on a CPU.
        in_model += [(us / 1e6, weight) for name, us in durations if kernels or name.startswith("aten::")]
    names = sorted(seconds, key=lambda name: -seconds[name])
    elapsed = sum(seconds.values())
    table = [Operator(name, calls[name], seconds[name], seconds[name] / elapsed if elapsed else 0.0) for name in names]
    spent = math.fsum(duration * weight for duration, weight in in_model)
    called = math.fsum(weight for _, weight in in_model)
    return OperatorTable(table[:MOST], called, spent, figures_of_kernels([events for events, _ in traces]))


def inside_of_model(events: Sequence[Event]) -> list[Event]:
    """Return the operators from the start of a forward pass to the end of its backward pass; without marks, return all.

    A dataset in this process may call far more operators than the model, and far shorter ones.
    """
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    marks = sorted((*interval(event), event["name"]) for event in annotations if event["name"] in (FORWARD, BACKWARD))
    inside: list[Interval] = []
    for begin, end, name in marks:
        if name == FORWARD or not inside:
            inside.append((begin, end))
        else:
            inside[-1] = (inside[-1][0], max(inside[-1][1], end))
    return [
        event
        for event in events
        if event.get("cat") == "cpu_op" and (not inside or any(begin <= event["ts"] < end for begin, end in inside))
    ]


def own_times(events: Sequence[Event]) -> list[tuple[str, float]]:
    """Return the microseconds of each operator, excluding other operators that it called in the same thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event.get("tid")].append(event)
    times: list[tuple[str, float]] = []
    for thread in threads.values():
        # The open operators of a thread form a stack. An entry holds the operator's end and its index in `times`.
        stack: list[tuple[float, int]] = []
        # If operators begin at the same time, the longest one called the others.
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            if stack:
                name, duration = times[stack[-1][1]]
                times[stack[-1][1]] = (name, duration - event["dur"])
            stack.append((event["ts"] + event["dur"], len(times)))
            times.append((event["name"], event["dur"]))
    return times


def figures_of_kernels(traces: Sequence[Sequence[Event]]) -> dict[str, float]:
    """Return GPU figures computed from its kernels, between 0 and 1; empty without kernels.

    Occupancy and blocks are Kineto's estimates for each launch.
    """
    by_rank = [(events, of_rank) for events in traces if (of_rank := kernels_of(events))]
    kernels = [kernel for _, of_rank in by_rank for kernel in of_rank]
    busy = math.fsum(kernel["dur"] for kernel in kernels)
    if not busy:
        return {}

    def mean(share: Callable[[dict[str, Any]], float]) -> float:
        return math.fsum(kernel["dur"] * min(1.0, share(kernel.get("args", {}))) for kernel in kernels) / busy

    running = [merged(map(interval, of_rank)) for _, of_rank in by_rank]
    span = sum(intervals[-1][1] - intervals[0][0] for intervals in running) or 1.0
    utilization = sum(map(total, running)) / span
    hosts = [host_calls_of(events) for events, _ in by_rank]
    return {
        "utilization": utilization,
        "host": sum(map(time_of_host_alone, hosts, running)) / span,
        "sm_efficiency": utilization * mean(lambda details: float(details.get("blocks per SM", 0))),
        "occupancy": mean(lambda details: float(details.get("est. achieved occupancy %", 0)) / 100),
        "tensor_cores": math.fsum(kernel["dur"] for kernel in kernels if on_tensor_cores(kernel["name"])) / busy,
    }


def kernels_of(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.get("cat") == "kernel"]


def host_calls_of(events: Sequence[Event]) -> list[Interval]:
    """Return the times when the host runs operators or calls CUDA to launch kernels."""
    return [interval(event) for event in events if event.get("cat") in ("cpu_op", "cuda_runtime")]


def time_of_host_alone(host: Sequence[Interval], kernels: Sequence[Interval]) -> float:
    """Return how long the host runs operators while no kernel runs, between the first kernel and the last."""
    begin, end = kernels[0][0], kernels[-1][1]
    inside = [(max(first, begin), min(last, end)) for first, last in host if first < end and last > begin]
    return total([*inside, *kernels]) - total(kernels)


def interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def on_tensor_cores(kernel: str) -> bool:
    name = kernel.lower()
    return any(word in name for word in TENSOR_CORE_KERNELS) and not any(word in name for word in _NOT_ON_THEM)
