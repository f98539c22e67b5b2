"""Slices by speed: what they would gain beside a slow rank, and what came of them where a loader makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.data.split.speeds import LEAST_GAIN
from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import SlowRank

_SHOWN = 8
"""Slices that are listed; of more ranks the least and the largest are told."""


@dataclass(frozen=True)
class RankTimes:
    """Medians of one rank's steps."""

    samples: float
    computing: float
    """Seconds of forward and backward, which are in proportion to the samples."""
    other: float
    """Seconds of the rest that is not waiting, which stay as they are."""


def ideal_seconds(ranks: Sequence[RankTimes]) -> float:
    """Return the seconds after which all ranks are done if they take the same samples in slices that end at once.

    Without other work that is the harmonic ideal: samples by the sum of speeds.
    """
    per_sample = [rank.computing / rank.samples for rank in ranks]
    done = sum(rank.samples for rank in ranks) + sum(
        rank.other / each for rank, each in zip(ranks, per_sample, strict=True)
    )
    # A slice cannot have less than no samples, so a rank is never done before the rest of its work is.
    return max(done / sum(1 / each for each in per_sample), *(rank.other for rank in ranks))


def equal_seconds(ranks: Sequence[RankTimes]) -> float:
    """Return the seconds after which the last rank is done if they take the same samples in equal slices."""
    share = sum(rank.samples for rank in ranks) / len(ranks)
    return max(rank.other + share * rank.computing / rank.samples for rank in ranks)


def expected_speedup(facts: Facts, slow: SlowRank) -> float | None:
    """Return how many times as fast steps would be with slices by speed; None where these cannot help `slow`."""
    if slow.phase not in step_parts.COMPUTE or slow.kind not in ("persistent", "emerging"):
        return None
    if facts.records[0].virtual_ranks:  # their slices are equal
        return None
    numbers = facts.accounts.steps
    times = times_of(facts, range(numbers.index(slow.first_step), numbers.index(slow.last_step) + 1))
    if not times:
        return None
    now = max(rank.computing + rank.other for rank in times)
    rest = _shared(facts, now)
    speedup = (now + rest) / (ideal_seconds(times) + rest)
    return speedup if speedup > 1 + LEAST_GAIN else None


def outcome(facts: Facts) -> str:
    """Return a sentence about the slices by speed of a run that makes them; empty where it does not."""
    steps = range(len(facts.accounts.steps) // 2, len(facts.accounts.steps))  # measured cuts have settled there
    if not facts.records[0].speed or not (times := times_of(facts, steps)):
        return ""
    now = max(rank.computing + rank.other for rank in times)
    rest = _shared(facts, now)
    slices = [round(rank.samples) for rank in times]
    shown = ", ".join(map(str, slices)) if len(slices) <= _SHOWN else f"{min(slices)} to {max(slices)}"
    gained, most = ((equal_seconds(times) + rest) / (seconds + rest) for seconds in (now, ideal_seconds(times)))
    return (
        f" Slices by speed ({shown} samples) make steps {gained:.2f}× as fast as equal ones would be; "
        f"{most:.2f}× is the ideal."
    )


def times_of(facts: Facts, steps: Sequence[int]) -> list[RankTimes]:
    """Return each rank's times in the `steps`, by their places; empty where samples or times are not known."""
    accounts, busy, found = facts.accounts, facts.accounts.busy(), []
    if len(facts.records) < 2 or facts.records[0].wrapper == "torch":
        return []
    for rank in range(len(facts.records)):
        computing = [sum(accounts.parts[part][step][rank] for part in step_parts.COMPUTE) for step in steps]
        rows = [
            (accounts.rows[step][rank], own, busy[step][rank] - own)
            for step, own in zip(steps, computing, strict=True)
            if not math.isnan(own)
        ]
        if not rows:
            return []
        samples, own, other = (median(column) for column in zip(*rows, strict=True))
        if samples <= 0 or own <= 0:
            return []
        found.append(RankTimes(samples, own, max(0.0, other)))
    return found


def _shared(facts: Facts, now: float) -> float:
    """Return the seconds of a step that stay whatever the slices: communication, as the last rank sees it."""
    return max(0.0, facts.length - now)
