"""Synthetic profile records of ranks, made from a few numbers, for tests of the profiler's pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from insides import (
    BACKWARD,
    CHECKPOINT,
    CONTROL,
    DATA_WAIT,
    DONE,
    FORWARD,
    GRADIENT,
    LAUNCH,
    OPTIMIZER,
    OUTER_STEP,
    WAIT,
    Advice,
    Facts,
    Meeting,
    OperatorTable,
    RankRecord,
    Report,
    Span,
    Step,
    cut_into_stretches,
    report_of,
    seconds_by_part,
)

GROUP = "ddp/0"
Timing = Callable[[int, int], dict[str, float]]
"""Seconds of each phase of a rank's step: ``checkpoint``, ``gap``, ``data``, ``forward``, ``backward``, ``optimizer``.
Optional: ``rows`` and ``cells`` of the input; ``launch``, the seconds at the end of backward that copy the last bucket;
``delayed``, the seconds spent waiting for a core, which the other phases include; and ``outer``, the seconds of an
outer step after the last rank has arrived."""


def cut(spans: Sequence[Span], start: float, end: float) -> tuple[dict[str, float], list[Meeting]]:
    """Return the seconds of each part of a step and its meetings."""
    stretches, meetings = cut_into_stretches(spans, start, end)
    return seconds_by_part(stretches), meetings


def usual(_rank: int, _step: int) -> dict[str, float]:
    return {"data": 0.001, "forward": 0.01, "backward": 0.02, "optimizer": 0.004, "gap": 0.0005}


def records(
    ranks: int = 2,
    steps: int = 40,
    timing: Timing = usual,
    travel: float = 0.003,
    buckets: Sequence[int] = (1_000_000,),
    ahead: Sequence[float] | None = None,
    **fields: Any,
) -> list[RankRecord]:
    """Simulate `steps` steps of `ranks` ranks; all buckets together take `travel` seconds after the last rank.

    Buckets fill evenly during backward. `ahead` are the clock offsets from rank 0, which the records contain.
    """
    clocks = list(ahead or [0.0] * ranks)
    now = [100.0] * ranks
    simulated: list[list[Step]] = [[] for _ in range(ranks)]
    for number in range(steps):
        times = [usual(rank, number) | timing(rank, number) for rank in range(ranks)]
        launches, came = [], []
        for rank, seconds in enumerate(times):
            begin = now[rank] + seconds.get("checkpoint", 0.0) + seconds["gap"] + seconds["data"] + seconds["forward"]
            fills = [begin + seconds["backward"] * (place + 1) / len(buckets) for place in range(len(buckets))]
            launches.append(fills)
            came.append(fills[-1] + seconds.get("launch", 0.0))
        done, end = [], 0.0
        for place in range(len(buckets)):
            sent = came if place == len(buckets) - 1 else [fills[place] for fills in launches]
            end = max(end, *sent) + travel / len(buckets)
            done.append(end)
        updated = [done[-1] + seconds["optimizer"] for seconds in times]
        for rank, seconds in enumerate(times):
            spans = _spans(now[rank], seconds, launches[rank], came[rank], done)
            after = updated[rank]
            if outer := seconds.get("outer"):
                spans.append(Span(OUTER_STEP, after, after := max(updated) + outer, None, OUTER_STEP))
            shift = clocks[rank]
            moved = [Span(s.label, s.start + shift, s.end + shift, s.bucket, s.group) for s in spans]
            start, stop = now[rank] + shift, after + shift
            parts, meetings = cut(moved, start, stop)
            kind = "warm-up" if number < 3 else "detailed" if number < 8 else "plain"
            step = Step(number, kind, start, stop, parts, meetings, int(seconds.get("rows", 32)), 1, None, moved)
            step.cells = int(seconds.get("cells", 0))
            step.delayed = seconds.get("delayed", 0.0)
            simulated[rank].append(step)
            now[rank] = after
    common: dict[str, Any] = {
        "size": ranks,
        "title": "train.py",
        "host": "here",
        "device": "cpu",
        "threads": 1,
        "cores": ranks,
        "started_ns": 10**18,
        "backend": "gloo",
        "wrapper": "paceline",
        "groups": {GROUP: list(range(ranks))},
        "buckets": list(buckets),
        "parameters": [(f"layer{place}", nbytes) for place, nbytes in enumerate(buckets)],
        "memory": {"peak": 10**8},
    }
    return [
        RankRecord(rank=rank, steps=simulated[rank], offsets=[(0.0, clocks[rank], 0.0)], **common | fields)
        for rank in range(ranks)
    ]


def _spans(
    start: float, seconds: dict[str, float], launches: Sequence[float], came: float, done: Sequence[float]
) -> list[Span]:
    saved = start + seconds.get("checkpoint", 0.0)
    data = saved + seconds["gap"]
    forward = data + seconds["data"]
    backward = forward + seconds["forward"]
    spans = [Span(DATA_WAIT, data, forward), Span(FORWARD, forward, backward), Span(BACKWARD, backward, done[-1])]
    for number, when in enumerate(launches):
        spans += [
            Span(GRADIENT, when, when, number),
            Span(LAUNCH, when, came if number == len(launches) - 1 else when, number),
            Span(DONE, done[number], done[number], number),
        ]
    spans += [Span(CONTROL, came, came), Span(WAIT, came, done[-1], None, GROUP)]
    if saved > start:
        spans.append(Span(CHECKPOINT, start, saved))
    return [*spans, Span(OPTIMIZER, done[-1], done[-1] + seconds["optimizer"])]


def verdict(made: list[RankRecord], operators: OperatorTable | None = None) -> Report:
    """Return the report of a profile with the given records."""
    return report_of(Facts(made, operators or OperatorTable()))


def kinds(report: Report) -> list[str]:
    """Return the kinds of advice in a report, in order."""
    return [advice.kind for advice in report.advice]


def the(kind: str, report: Report) -> Advice:
    """Return the advice of the given kind in a report."""
    return next(advice for advice in report.advice if advice.kind == kind)
