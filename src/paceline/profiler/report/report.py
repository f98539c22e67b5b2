"""The report of a profile: the figures that the page, the terminal and ``summary.json`` show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from paceline.core.telemetry.spans import Span
from paceline.planner.critical_batch import NoiseScale
from paceline.planner.profiles import Profiled
from paceline.profiler.report import step_parts

ENOUGH = 20
"""Minimum number of measured steps for a verdict, advice and shares of the time. In excerpts of healthy runs, the
profiler named a cause that the whole run did not have: in 13% of the 3-step excerpts, in 4% of the 10-step excerpts,
and never in 15 or more steps."""


@dataclass(frozen=True)
class RankInfo:
    """A rank with its host and device."""

    rank: int
    host: str
    device: str
    """Name of the device, such as ``cpu`` or ``NVIDIA H100``."""
    threads: int
    """Threads that torch uses for one operation."""
    cores: int
    """Cores that the process may use."""
    peak_memory: int | None
    """Peak memory in bytes: of the GPU if one was used, otherwise of the process."""


@dataclass(frozen=True)
class BucketTimes:
    """Times of one gradient bucket in the timeline's step, by rank, in seconds since the step began."""

    bucket: int
    nbytes: int
    launched: Sequence[float]
    """When each rank handed over the full bucket for communication."""
    finished: Sequence[float | None]
    """When the bucket's all-reduce finished on each rank; None if unknown."""


@dataclass(frozen=True)
class Timeline:
    """A typical step: the detailed step of median length."""

    step: int
    spans: Sequence[Sequence[Span]]
    """Spans of each rank, possibly nested, in seconds since the first rank began the step."""
    buckets: Sequence[BucketTimes]


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
class Advice:
    """A cause of lost time, with the change that removes it."""

    kind: str
    """Kind of advice, such as ``straggler``, ``accumulation``, ``data-loading``."""
    text: str
    """The change to make, in one sentence."""
    reason: str
    """The measurement behind it."""
    gain: float
    """Share of the time per sample that the change is predicted to save, between 0 and 1."""
    headline: str = ""
    """Verdict to give if this is the largest cost."""
    weight: float = 1.0
    """Weight of the gain when advice is ordered."""
    predictions: Mapping[str, float] = field(default_factory=dict)
    """Predicted share of all-reduce, by accumulation factor."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that others waited for. See :func:`paceline.profiler.find_stragglers`."""

    rank: int
    first_step: int
    last_step: int
    slowdown: float
    """Its computing time divided by the median of the other ranks."""
    kind: str
    phase: str
    """Part of the step that lost the most time."""
    seconds: float
    """Seconds that this part lost per step."""


@dataclass(frozen=True)
class Report:
    """One profiled run."""

    title: str
    """Name of the program."""
    backend: str
    ranks: Sequence[RankInfo]
    steps: Sequence[int]
    """Numbers of the measured steps, which exclude warm-up and the steps that torch's profiler recorded."""
    step_seconds: Sequence[Sequence[float | None]]
    """Length of each step on each rank, shape (steps, ranks); None if a rank did not take the step."""
    parts: Mapping[str, Sequence[Sequence[float | None]]]
    """Seconds of each part in :data:`~paceline.profiler.report.step_parts.ALL`, shape (steps, ranks)."""
    waited_for: Sequence[Sequence[float]]
    """Seconds per step that a rank (row) spent in bubbles that another rank (column) caused by arriving last."""
    headline: str
    """Verdict in one sentence."""
    advice: Sequence[Advice]
    """Advice, most valuable first."""
    stragglers: Sequence[SlowRank]
    """Stragglers, costliest first."""
    shares: Mapping[str, float]
    """Mean share of a step that each part in :data:`~paceline.profiler.report.step_parts.ALL` takes, and ``allreduce``:
    the share of all-reduces in the time of forward, backward, optimizer and all-reduces."""
    timeline: Timeline | None
    overlap_by_rank: Mapping[str, float] = field(default_factory=dict)
    """Share of all-reduce time that overlaps with computing, by rank, where known."""
    operators: Sequence[Operator] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes on rank 0: parameters, gradients, optimizer state, peak."""
    device_figures: Mapping[str, float] = field(default_factory=dict)
    """GPU figures computed from its kernels, between 0 and 1: utilization, sm_efficiency, occupancy, tensor_cores.
    Empty on CPUs."""
    noise_scale: NoiseScale | None = None
    """Gradient noise scale; None if it was not measured."""
    missing: Sequence[str] = ()
    """A sentence for each kind of missing data, with the reason."""
    samples_per_step: float | None = None
    """Rows of the model's first input in a step, summed over all ranks."""
    plan: Profiled | None = None
    """What ``paceline plan`` needs; None if no step was measured."""
    collecting: Sequence[float] = ()
    """Seconds per step spent in Python's garbage collector, by rank."""

    @cached_property
    def rank_parts(self) -> list[dict[str, float] | None]:
        """Mean seconds of each part, by rank; None if a rank took no step."""
        return [self._parts_of(rank) for rank in range(len(self.ranks))]

    def _parts_of(self, rank: int) -> dict[str, float] | None:
        if all(row[rank] is None for row in self.step_seconds):
            return None
        seconds = {part: [row[rank] for row in self.parts.get(part, ())] for part in step_parts.ALL}
        present = {part: [value for value in values if value is not None] for part, values in seconds.items()}
        return {part: fmean(values) if values else 0.0 for part, values in present.items()}

    @property
    def overlap(self) -> float | None:
        """Mean overlap over the ranks; None if unknown."""
        return fmean(self.overlap_by_rank.values()) if self.overlap_by_rank else None

    @property
    def is_firm(self) -> bool:
        """Whether there are enough steps for a verdict, advice and shares of the time."""
        return len(self.steps) >= ENOUGH
