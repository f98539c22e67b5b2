"""Simulates other bucket sizes, using the recorded arrival times of a run's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, linear_regression, median

from paceline.ddp.options.buckets import MIB, arrival_order, assign, overlap
from paceline.profiler.analysis.bucket_timeline import all_reduces, gradient_times
from paceline.profiler.analysis.confidence import WORTH
from paceline.profiler.analysis.facts import Facts

CANDIDATES = (0.25, 1, 2, 5, 10, 50, 100, 400)
"""Capacities to try, in MiB."""


def all_reduce_times(facts: Facts) -> list[tuple[int, float]]:
    """Return bytes and median seconds of each bucket's all-reduce in launch order; empty if unknown."""
    sizes = facts.records[0].buckets
    samples: list[list[float]] = [[] for _ in sizes]
    for buckets in facts.buckets:
        ends = [max((end for end in bucket.finished if end is not None), default=None) for bucket in buckets]
        intervals = all_reduces(buckets, ends)
        if len(intervals) != len(sizes):
            return []
        for times, (begin, end) in zip(samples, intervals, strict=True):
            times.append(end - begin)
    return [(nbytes, median(times)) for nbytes, times in zip(sizes, samples, strict=True)] if all(samples) else []


def fit(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the seconds per message and per byte, both nonnegative, that fit `times` best."""
    nbytes, seconds = zip(*times, strict=True)
    if len(times) < 2:
        return 0.0, seconds[0] / nbytes[0] if nbytes[0] else 0.0
    slope, intercept = linear_regression(nbytes, seconds) if len(set(nbytes)) > 1 else (0.0, 0.0)
    # If larger buckets were not slower, the cost per message alone explains the times.
    if slope <= 0:
        return fmean(seconds), 0.0
    return (intercept, slope) if intercept > 0 else (0.0, sum(seconds) / sum(nbytes))


def best_capacity(facts: Facts) -> tuple[float, float] | None:
    """Return the ``bucket_cap_mb`` that would overlap best and the seconds that it saves; None if the gain is small."""
    times = all_reduce_times(facts)
    parameters = facts.records[0].parameters
    if not times or not facts.detailed:
        return None
    # The wrapper lays out its buckets in the arrival order of gradients on rank 0.
    arrivals = [gradient_times(steps[0]) for steps in facts.detailed]
    # A parameter without a gradient in a step has no arrival time.
    if {len(arrived) for arrived in arrivals} != {len(parameters)}:
        return None
    # The step whose backward has the median length.
    arrived = sorted(arrivals, key=lambda step: step[-1][1])[len(arrivals) // 2]
    places = {index: place for place, index in enumerate(sorted(index for index, _ in arrived))}
    # Renumber, because marks are numbered among all parameters, but the record lists only trained ones.
    arrived = [(places[index], when) for index, when in arrived]
    sizes = [nbytes for _, nbytes in parameters]
    alpha, beta = fit(times)

    def exposed(capacities: Sequence[int]) -> float:
        """Return the seconds of communication after backward with buckets of these capacities."""
        order = arrival_order([index for index, _ in arrived], len(sizes))
        when = dict(arrived)
        full, previous, reduce = [], 0.0, []
        for indices in assign(sizes, [0] * len(sizes), order, capacities):
            last = max(previous, *(when[index] for index in indices))
            full.append(last - previous)
            reduce.append(alpha + beta * sum(sizes[index] for index in indices))
            previous = last
        return overlap(full, reduce).exposed

    # Capacities equal to the run's bucket sizes result in the run's buckets. Buckets of frozen parameters are empty.
    current = exposed([nbytes for nbytes in facts.records[0].buckets if nbytes])
    best = min((exposed([int(size * MIB)]), size) for size in CANDIDATES)
    saved = current - best[0]
    return (best[1], saved) if saved > WORTH * facts.length else None
