"""The report of a profile: the figures of all ranks together, as ``summary.json`` and the page show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ENOUGH = 20
"""Fewest measured steps for a verdict, for advice and for shares of the time. In windows of clean runs, causes that the
whole run did not have were seen in 13 % of 3 steps, 4 % of 10, and none of 15 or more."""


@dataclass(frozen=True)
class RankInfo:
    """A rank, and its host and device."""

    rank: int
    host: str
    device: str
    """Name of the device, such as ``cpu`` or ``NVIDIA H100``."""
    threads: int
    """Threads that torch uses for one operation."""
    cores: int
    """Cores that the process may use."""
    peak_memory: int | None
    """Peak memory in bytes, of the GPU where one was used, else of the process."""


@dataclass(frozen=True)
class Slice:
    """A stretch of the timeline, in seconds since the first rank began the step."""

    label: str
    """Label of the span, one of :mod:`paceline.core.telemetry.spans`."""
    start: float
    end: float
    bucket: int | None = None


@dataclass(frozen=True)
class BucketTimes:
    """Times of one bucket of gradients in the step of the timeline, in its seconds; by rank."""

    bucket: int
    nbytes: int
    launched: Sequence[float]
    """Moments at which ranks had filled the bucket, and handed it to communication."""
    finished: Sequence[float | None]
    """Moments at which its all-reduce was finished; None where that is not known."""


@dataclass(frozen=True)
class Timeline:
    """A typical step: the one of median length among those that were recorded in detail."""

    step: int
    slices: Sequence[Sequence[Slice]]
    """Slices of each rank, which may lie inside each other."""
    buckets: Sequence[BucketTimes]


@dataclass(frozen=True)
class Operator:
    """Time that an operator took, mean over the ranks and the steps that torch's profiler saw."""

    name: str
    calls: float
    """Number of calls in a step of a rank."""
    seconds: float
    """Seconds in a step of a rank, without the operators that it called; on the device where one was used."""
    share: float
    """Share of the time of all operators."""


@dataclass(frozen=True)
class Advice:
    """A change to make: why, and the gain it promises."""

    kind: str
    """Kind of advice, such as ``straggler``, ``accumulation``, ``data-loading``."""
    text: str
    """Advice in one sentence."""
    reason: str
    """Measurement behind it."""
    gain: float
    """Predicted share of the time for a sample that the change saves, between 0 and 1."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The gain by the part of a step that gets shorter."""
    left: float | None = None
    """Share of the time that it still saves once all advice before it is followed; None for the first."""
    predictions: Mapping[str, float] = field(default_factory=dict)
    """Predicted share of all-reduce, by the factor of accumulated batches."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that others waited for; see :func:`paceline.profiler.find_stragglers`."""

    rank: int
    first_step: int
    last_step: int
    slowdown: float
    """Its computing time divided by the median of the other ranks'."""
    kind: str
    phase: str
    """Part of the step in which it lost most."""
    seconds: float
    """Seconds that it lost in a step."""


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale, in samples."""

    text: str
    """Verdict in words."""
    batch_size: float
    """Samples in a step, all ranks together."""
    value: float | None = None
    """Critical batch size; None where noise hides the gradient."""
    error: float | None = None
    """Standard error of the value; None where it is not known."""
    curve: Sequence[tuple[float, float]] = ()
    """Pairs of batch size and the predicted share of the best possible progress per step."""


@dataclass(frozen=True)
class Report:
    """One profiled run."""

    title: str
    """Name of the program."""
    backend: str
    ranks: Sequence[RankInfo]
    steps: Sequence[int]
    """Numbers of the steps in the figures: without those that warmed up, and those that torch's profiler slowed."""
    step_seconds: Sequence[Sequence[float | None]]
    """Length of each step on each rank: shape (steps, ranks); None where a rank took no such step."""
    parts: Mapping[str, Sequence[Sequence[float | None]]]
    """Seconds of each of :data:`~paceline.profiler.report.step_parts.ALL`: shape (steps, ranks)."""
    waited_for: Sequence[Sequence[float]]
    """Seconds in a step that a rank (row) spent in bubbles that another one (column) caused by coming last."""
    headline: str
    """Verdict in one sentence."""
    advice: Sequence[Advice]
    """Advice, the best first."""
    stragglers: Sequence[SlowRank]
    """Stragglers, the costliest first."""
    shares: Mapping[str, float]
    """Shares of the step's time, mean over steps and ranks: each of :data:`~paceline.profiler.report.step_parts.ALL`,
    and ``allreduce``: the time in which all-reduces ran by that in which they or forward and backward ran."""
    overlap: float | None
    """Share of the all-reduces' time in which a rank computes, mean of the ranks; None where it was not seen."""
    timeline: Timeline | None
    overlap_by_rank: Mapping[str, float] = field(default_factory=dict)
    """Overlap of each rank that can tell."""
    operators: Sequence[Operator] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes on rank 0: parameters, gradients, optimizer state, peak."""
    device_figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of the GPU from its kernels, between 0 and 1: utilization, sm_efficiency, occupancy, tensor_cores. Empty
    on CPUs."""
    noise_scale: NoiseScale | None = None
    """Gradient noise scale; None where it was not measured."""
    missing: Sequence[str] = ()
    """Sentences on data that are missing, with the reasons."""
    samples_per_step: float | None = None
    """Rows of the model's first input in a step, all ranks together."""

    collecting: Sequence[float] = ()
    """Seconds of a step in which Python's garbage collector ran, by rank."""

    @property
    def is_firm(self) -> bool:
        """Whether there are enough steps for a verdict, advice and shares of the time."""
        return len(self.steps) >= ENOUGH

    def to_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return asdict(self)
