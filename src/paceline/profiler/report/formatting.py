"""Figures derived from a report, and times and shares as text."""

from __future__ import annotations

from statistics import fmean, median

from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Report


def ms(seconds: float) -> str:
    """Return a time as text, with three digits: ``12.3 ms``; from ten seconds on, ``12.3 s``."""
    value = 1e3 * seconds
    if value == 0 or abs(value) >= 10_000:
        return "0 ms" if value == 0 else f"{seconds:,.1f} s"
    return f"{value:,.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms" if abs(value) >= 1 else f"{value:.2f} ms"


def percent(share: float) -> str:
    """Return a share as text: ``27%``; below ten percent with one more digit."""
    # From 0.0995 on, a share rounds to 10%.
    return f"{100 * share:.0f}%" if abs(share) >= 0.0995 else f"{100 * share:.1f}%"


def sentence(words: str) -> str:
    """Return `words` with a period, and capitalized unless they start with an identifier."""
    first = words.split(" ", 1)[0]
    # Do not capitalize an identifier such as bucket_cap_mb=5.
    if first.isalpha() and first.islower():
        words = words[:1].upper() + words[1:]
    return words if words.endswith((".", "!", "?", ":")) or not words else f"{words}."


def mean_parts(report: Report) -> dict[str, float]:
    """Return the mean seconds of each part, over all ranks that took steps."""
    rows = [parts for parts in report.rank_parts if parts is not None]
    return {part: fmean(row[part] for row in rows) if rows else 0.0 for part in step_parts.ALL}


def typical_step(report: Report) -> float | None:
    """Return the median step time over all ranks and steps; None without steps."""
    present = [seconds for row in report.step_seconds for seconds in row if seconds is not None]
    return median(present) if present else None


def samples_per_second(report: Report) -> float | None:
    """Return the samples per second of all ranks combined; None if unknown."""
    step = typical_step(report)
    return report.samples_per_step / step if report.samples_per_step and step else None


def share(report: Report, *parts: str) -> float:
    """Return the share of the step time that `parts` take together."""
    return sum(report.shares.get(part, 0.0) for part in parts)


def kind_name(kind: str) -> str:
    """Return the kind of a piece of advice as a heading: ``Data loading`` for ``data-loading``."""
    return kind.replace("-", " ").capitalize()


def notable_ranks(report: Report, limit: int) -> list[int]:
    """Return the `limit` ranks that others waited for most, in the order of ranks."""
    caused = [sum(row[rank] for row in report.waited_for) for rank in range(len(report.ranks))]
    return sorted(sorted(range(len(caused)), key=lambda rank: -caused[rank])[:limit])
