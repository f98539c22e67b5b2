"""The report of a profile: the figures that the page, the terminal and ``summary.json`` show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from paceline.core.telemetry.spans import Span
from paceline.profiler.report import step_parts

ENOUGH = 20
"""Fewest measured steps for a verdict, advice and shares of the time. In windows of healthy runs, 13 % of 3 steps and
4 % of 10 steps had a cause that the whole run did not have, and none of 15 or more."""


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
    """When its all-reduce finished; None if unknown."""


@dataclass(frozen=True)
class Timeline:
    """A typical step: the detailed step of median length."""

    step: int
    spans: Sequence[Sequence[Span]]
    """Spans of each rank, which may nest, in seconds since the first rank began the step."""
    buckets: Sequence[BucketTimes]


@dataclass(frozen=True)
class Operator:
    """Time of an operator, averaged over ranks and steps of torch's profiler."""

    name: str
    calls: float
    """Calls in a step of a rank."""
    seconds: float
    """Seconds in a step of a rank, without the operators that it called; on a GPU, device time."""
    share: float
    """Share of the time of all operators."""


@dataclass(frozen=True)
class Advice:
    """A cause that costs time, with the change that removes it."""

    kind: str
    """Kind of advice, such as ``straggler``, ``accumulation``, ``data-loading``."""
    text: str
    """The change, in one sentence."""
    reason: str
    """The measurement behind it."""
    gain: float
    """Predicted share of the time for a sample that the change saves, between 0 and 1."""
    headline: str = ""
    """Verdict if this costs most."""
    weight: float = 1.0
    """Factor of the gain in the order of advice."""
    predictions: Mapping[str, float] = field(default_factory=dict)
    """Predicted share of all-reduce, by the factor of accumulated batches."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that others waited for. See :func:`paceline.profiler.find_stragglers`."""

    rank: int
    first_step: int
    last_step: int
    slowdown: float
    """Its computing time divided by the median of the other ranks'."""
    kind: str
    phase: str
    """Part of the step that lost most."""
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
    """Numbers of the measured steps, without warm-up and steps of torch's profiler."""
    step_seconds: Sequence[Sequence[float | None]]
    """Length of each step on each rank, shape (steps, ranks); None if a rank did not take it."""
    parts: Mapping[str, Sequence[Sequence[float | None]]]
    """Seconds of each of :data:`~paceline.profiler.report.step_parts.ALL`: shape (steps, ranks)."""
    waited_for: Sequence[Sequence[float]]
    """Seconds in a step that a rank (row) spent in bubbles that another one (column) caused by arriving last."""
    headline: str
    """Verdict in one sentence."""
    advice: Sequence[Advice]
    """Advice, the best first."""
    stragglers: Sequence[SlowRank]
    """Stragglers, the costliest first."""
    shares: Mapping[str, float]
    """Mean share of each of :data:`~paceline.profiler.report.step_parts.ALL` in a step, and ``allreduce``: the share of
    all-reduces in the time of forward, backward, optimizer and all-reduces."""
    timeline: Timeline | None
    overlap_by_rank: Mapping[str, float] = field(default_factory=dict)
    """Share of the all-reduces' time that overlaps with computing, by rank, if known."""
    operators: Sequence[Operator] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes on rank 0: parameters, gradients, optimizer state, peak."""
    device_figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of the GPU from its kernels, between 0 and 1: utilization, sm_efficiency, occupancy, tensor_cores. Empty
    on CPUs."""
    noise_scale: NoiseScale | None = None
    """Gradient noise scale; None if it was not measured."""
    missing: Sequence[str] = ()
    """Sentences on missing data with the reasons."""
    samples_per_step: float | None = None
    """Rows of the model's first input in a step, all ranks together."""
    collecting: Sequence[float] = ()
    """Seconds of a step in Python's garbage collector, by rank."""

    @cached_property
    def rank_parts(self) -> list[dict[str, float] | None]:
        """Mean seconds of each part, by rank; None if a rank took no step."""
        return [self._parts_of(rank) for rank in range(len(self.ranks))]

    def _parts_of(self, rank: int) -> dict[str, float] | None:
        if all(row[rank] is None for row in self.step_seconds):
            return None
        seconds = {part: [row[rank] for row in self.parts.get(part, ())] for part in step_parts.ALL}
        there = {part: [value for value in values if value is not None] for part, values in seconds.items()}
        return {part: fmean(values) if values else 0.0 for part, values in there.items()}

    @property
    def overlap(self) -> float | None:
        """Mean overlap of the ranks; None if unknown."""
        return fmean(self.overlap_by_rank.values()) if self.overlap_by_rank else None

    @property
    def is_firm(self) -> bool:
        """Whether there are enough steps for a verdict, advice and shares of the time."""
        return len(self.steps) >= ENOUGH
