"""Two profiled runs side by side: the figures of both, and the main difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.core.output.wording import nbytes
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import (
    mean_parts,
    ms,
    percent,
    samples_per_second,
    share,
    typical_step,
)
from paceline.profiler.report.report import ENOUGH, Report

EQUAL = 0.02
"""Maximum relative difference between times that count as equal."""
SAMPLES = 1000
"""Times are per this number of samples if the runs have different numbers of samples per step."""


@dataclass(frozen=True)
class Pair:
    """One figure of both runs; None for a run that does not have it."""

    name: str
    a: float | None
    b: float | None
    unit: str
    """``s``, ``share``, ``bytes`` or empty."""
    better: str = ""
    """Which direction is better, ``less`` or ``more``; empty if neither."""

    @property
    def ratio(self) -> float | None:
        """The second run's figure divided by the first run's."""
        return self.b / self.a if self.a and self.b is not None else None

    @property
    def verdict(self) -> str:
        """Whether the second run is ``better`` or ``worse``; empty if the runs are equal or not comparable."""
        if self.a is None or self.b is None or not self.better:
            return ""
        change = self.b - self.a
        if abs(change) <= (0.01 if self.unit == "share" else EQUAL * abs(self.a)):
            return ""
        return "better" if (change < 0) == (self.better == "less") else "worse"

    def shown(self) -> tuple[str, str, str]:
        """Return both figures and their ratio (for shares, their difference) as text."""
        change = "–" if self.ratio is None else f"× {self.ratio:.2f}"
        if self.unit == "share":
            change = "–" if self.a is None or self.b is None else f"{100 * (self.b - self.a):+.1f} points"
        return self._one(self.a), self._one(self.b), change

    def _one(self, value: float | None) -> str:
        if value is None:
            return "–"
        if self.unit == "s":
            return ms(value)
        return percent(value) if self.unit == "share" else nbytes(value) if self.unit == "bytes" else f"{value:,.4g}"


@dataclass(frozen=True)
class Comparison:
    """Two runs, and the figures of both."""

    a: Report
    b: Report
    names: tuple[str, str]
    headline: str
    """The verdict in one sentence."""
    detail: str
    """Main cause of the difference; empty if there is none."""
    pairs: tuple[Pair, ...]
    parts: tuple[Mapping[str, float], Mapping[str, float]]
    """Seconds of each part for ``basis``, averaged over ranks."""
    basis: str
    """What the parts' times refer to: ``a step`` or ``1,000 samples``."""


def compare(a: Report, b: Report, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two runs; `names` stand for them in sentences and headings."""
    parts, basis = (mean_parts(a), mean_parts(b)), "a step"
    if a.samples_per_step and b.samples_per_step and a.samples_per_step != b.samples_per_step:
        # Times per sample would be microseconds, which are hard to compare with step times.
        basis = f"{SAMPLES:,} samples"
        for part, scale in zip(parts, (SAMPLES / a.samples_per_step, SAMPLES / b.samples_per_step), strict=True):
            part.update({name: scale * seconds for name, seconds in part.items()})
    pairs = [
        Pair(name, first, second, unit, better)
        for (name, first, unit, better), (_, second, _, _) in zip(
            _figures(a, parts[0], basis), _figures(b, parts[1], basis), strict=True
        )
        if first or second or better != "less"
    ]
    headline, detail = _verdict(a, b, names, parts, basis)
    return Comparison(a, b, names, headline, detail, tuple(pairs), parts, basis)


def _figures(run: Report, parts: Mapping[str, float], basis: str) -> Iterator[tuple[str, float | None, str, str]]:
    """Yield each figure's name, value and unit, and whether higher or lower is better."""
    peak = max((record.peak_memory for record in run.ranks if record.peak_memory is not None), default=None)
    yield "ranks", len(run.ranks), "", ""
    yield "samples per step", run.samples_per_step, "", ""
    yield "samples per second", samples_per_second(run), "", "more"
    # If steps have different numbers of samples, neither step time is better.
    yield "step, median", typical_step(run), "s", "less" if basis == "a step" else ""
    for part in step_parts.ALL:
        yield f"{step_parts.NAMES[part]}, {basis}", parts[part], "s", "less"
    yield "computing, share", share(run, *step_parts.COMPUTE), "share", "more"
    for part in step_parts.WAITING:
        yield f"{step_parts.NAMES[part]}, share", share(run, part), "share", "less"
    yield "all-reduce, share", run.shares.get("allreduce"), "share", "less"
    yield "overlap", run.overlap, "share", "more"
    yield "peak memory of a rank", peak, "bytes", "less"


def _verdict(
    a: Report, b: Report, names: tuple[str, str], parts: tuple[Mapping[str, float], Mapping[str, float]], basis: str
) -> tuple[str, str]:
    first, second = typical_step(a), typical_step(b)
    if first is None or second is None:
        without = [name for name, step in zip(names, (first, second), strict=True) if step is None]
        return f"No step was measured in {' and '.join(without)}.", ""
    if few := [name for name, run in zip(names, (a, b), strict=True) if not run.is_firm]:
        return f"{' and '.join(few)} took too few steps to compare: profile {ENOUGH} or more.", ""
    unit = "step"
    if a.samples_per_step and b.samples_per_step:
        unit, first, second = "sample", first / a.samples_per_step, second / b.samples_per_step
    ratio = second / first
    if abs(ratio - 1) < EQUAL:
        return f"{names[0]} and {names[1]} take the same time for a {unit}, within {percent(EQUAL)}.", ""
    way, sign = ("less", 1) if ratio < 1 else ("more", -1)
    largest = max(step_parts.ALL, key=lambda part: sign * (parts[0][part] - parts[1][part]))
    before, after = (ms(values[largest]) for values in parts)
    headline = f"{names[1]} takes {percent(abs(1 - ratio))} {way} time for a {unit} than {names[0]}."
    return (
        headline,
        f"Most of it is {step_parts.NAMES[largest]}: {before} for {basis} in {names[0]}, {after} in {names[1]}.",
    )
