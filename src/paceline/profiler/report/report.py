"""The report of a profile: the figures of all ranks together, as the page, the terminal and ``summary.json`` show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from paceline.core.telemetry.spans import Span

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
    """Peak memory in bytes, of the GPU if one was used, else of the process."""


@dataclass(frozen=True)
class BucketTimes:
    """Times of one bucket of gradients in the step of the timeline, by rank, in seconds since the step began."""

    bucket: int
    nbytes: int
    launched: Sequence[float]
    """When each rank handed the full bucket to communication."""
    finished: Sequence[float | None]
    """When its all-reduce was finished; None if unknown."""


@dataclass(frozen=True)
class Timeline:
    """A typical step: the one of median length among those that were recorded in detail."""

    step: int
    spans: Sequence[Sequence[Span]]
    """Spans of each rank, which may nest, in seconds since the first rank began the step."""
    buckets: Sequence[BucketTimes]


@dataclass(frozen=True)
class Operator:
    """Time that an operator took, mean over the ranks and the steps that torch's profiler saw."""

    name: str
    calls: float
    """Calls in a step of a rank."""
    seconds: float
    """Seconds in a step of a rank, without the operators that it called; on the device if one was used."""
    share: float
    """Share of the time of all operators."""


@dataclass(frozen=True)
class Advice:
    """A cause that costs time, and the change that removes it."""

    kind: str
    """Kind of advice, such as ``straggler``, ``accumulation``, ``data-loading``."""
    text: str
    """The change, in one sentence."""
    reason: str
    """The measurement behind it."""
    gain: float
    """Predicted share of the time for a sample that the change saves, between 0 and 1."""
    headline: str = ""
    """Verdict on a run in which this costs most."""
    weight: float = 1.0
    """Factor of the gain in the order of advice."""
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
    """Critical batch size; None if noise hides the gradient."""
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
    """Numbers of the measured steps: without those that warmed up, and those that torch's profiler slowed."""
    step_seconds: Sequence[Sequence[float | None]]
    """Length of each step on each rank: shape (steps, ranks); None if a rank took no such step."""
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
    and ``allreduce``: the time of all-reduces by that of all-reduces, forward, backward and optimizer."""
    timeline: Timeline | None
    overlap_by_rank: Mapping[str, float] = field(default_factory=dict)
    """Share of the all-reduces' time in which a rank computes, for each rank that can tell."""
    operators: Sequence[Operator] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes on rank 0: parameters, gradients, optimizer state, peak."""
    device_figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of the GPU from its kernels, between 0 and 1: utilization, sm_efficiency, occupancy, tensor_cores. Empty
    on CPUs."""
    noise_scale: NoiseScale | None = None
    """Gradient noise scale; None if it was not measured."""
    missing: Sequence[str] = ()
    """Sentences on missing data, with the reasons."""
    samples_per_step: float | None = None
    """Rows of the model's first input in a step, all ranks together."""
    collecting: Sequence[float] = ()
    """Seconds of a step in which Python's garbage collector ran, by rank."""

    @property
    def overlap(self) -> float | None:
        """Mean of the ranks' overlap; None if it was not seen."""
        return fmean(self.overlap_by_rank.values()) if self.overlap_by_rank else None

    @property
    def is_firm(self) -> bool:
        """Whether there are enough steps for a verdict, advice and shares of the time."""
        return len(self.steps) >= ENOUGH
