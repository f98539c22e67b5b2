"""What ``paceline plan`` needs of a profile."""

from __future__ import annotations

import math
from statistics import fmean, median

from paceline.planner.profiles import Profiled
from paceline.profiler.analysis.bucket_timeline import all_reduces, gradient_times
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.step_breakdown import mean_of
from paceline.profiler.records.core_use import neighbours
from paceline.profiler.report import step_parts


def plan_of(facts: Facts) -> Profiled | None:
    """Return the figures for planning; None if no step was measured."""
    records, first = facts.records, facts.records[0]
    if not facts.accounts.steps or not first.parameters:
        return None
    ranks, batches, hosts = len(records), round(facts.batches), len({record.host for record in records})
    backward_s, total = backward_seconds(facts), sum(nbytes for _, nbytes in first.parameters)
    if not backward_s or not total:
        return None
    # On a host without other load, a rank would also be busy while it now has no core.
    wanted_cores = [record.own_cores + share for record, share in zip(records, facts.delay_shares, strict=True)]
    # Unless gradients were seen to arrive: from the last parameter to the first, in a time proportional to their bytes.
    assumed = [(backward_s * nbytes / total, nbytes) for _, nbytes in reversed(first.parameters)]
    return Profiled(
        ranks=ranks,
        hosts=hosts,
        device=first.device,
        cores=neighbours(records, 0).cores,
        busy_cores=fmean(wanted_cores) if first.device == "cpu" else 0.0,
        samples=facts.rows / ranks if facts.rows else batches,
        micro_batches=batches,
        forward_s=_typical(facts, step_parts.FORWARD) / batches,
        layers=layers_of(facts, backward_s) or assumed,
        optimizer_s=_typical(facts, step_parts.OPTIMIZER),
        other_s=sum(facts.accounts.mean(part) for part in (step_parts.DATA, step_parts.OTHER)) / batches,
        communication_s=_typical(facts, step_parts.COMMUNICATION),
        bubble_s=_typical(facts, step_parts.BUBBLE),
        jitter=_jitter(facts),
        bucket_bytes=first.buckets,
        all_reduces=all_reduce_times(facts),
        reduces_in_backward=facts.reduces_in_backward and hosts == 1,
        critical_batch=facts.noise_scale.value if facts.noise_scale else None,
    )


def backward_seconds(facts: Facts) -> float:
    """Return the typical seconds of the backward pass of a micro-batch."""
    return _typical(facts, step_parts.BACKWARD) / round(facts.batches)


def _typical(facts: Facts, part: str) -> float:
    """Return the median over the steps of the mean seconds of a part over the ranks."""
    return median(mean_of([row]) for row in facts.accounts.parts[part])


def _jitter(facts: Facts) -> float:
    """Return the standard deviation of a rank's own time, relative to its median, as far as outliers do not count."""
    spread = []
    for column in zip(*facts.own_times, strict=True):
        times = [seconds for seconds in column if not math.isnan(seconds)]
        middle = median(times) if times else 0.0
        if middle > 0:
            # The median deviation of a normal distribution is 0.6745 standard deviations.
            spread.append(median(abs(seconds - middle) for seconds in times) / 0.6745 / middle)
    return fmean(spread) if spread else 0.0


def layers_of(facts: Facts, backward_s: float) -> list[tuple[float, int]]:
    """Return seconds of backward and bytes of each parameter, in the order in which the gradients arrived on rank 0.

    The wrapper lays out its buckets in this order. Empty if a gradient was not seen to arrive.
    """
    sizes = [nbytes for _, nbytes in facts.records[0].parameters]
    arrived = [] if facts.typical is None else gradient_times(facts.detailed[facts.typical][0])
    measured = sum(seconds for _, seconds in arrived)
    # A parameter without a gradient has no arrival time.
    if len(arrived) != len(sizes) or not measured:
        return []
    # Marks are numbered among all parameters, but the record lists only trained ones.
    places = {index: place for place, index in enumerate(sorted(index for index, _ in arrived))}
    return [(backward_s * seconds / measured, sizes[places[index]]) for index, seconds in arrived]


def all_reduce_times(facts: Facts) -> list[tuple[int, float]]:
    """Return bytes and median seconds of each bucket's all-reduce in launch order; empty if unknown."""
    sizes = facts.records[0].buckets
    steps = []
    for buckets in facts.buckets:
        ends = [max((end for end in bucket.finished if end is not None), default=None) for bucket in buckets]
        steps.append([end - begin for begin, end in all_reduces(buckets, ends)])
    if any(len(seconds) != len(sizes) for seconds in steps):
        return []
    return [(nbytes, median(seconds)) for nbytes, *seconds in zip(sizes, *steps, strict=True)] if steps else []
