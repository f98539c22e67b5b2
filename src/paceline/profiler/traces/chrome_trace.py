"""One trace for Perfetto and ``chrome://tracing``: a process for each rank, with its spans, buckets and operators.

The format is Google's Trace Event Format; times are microseconds since the first rank began. Every lane has a name, and
an arrow leads from the launch of a bucket to the wait for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.core.telemetry.spans import BUCKET_WAIT, FORWARD, LABELS, LAUNCH, WAIT, Span
from paceline.profiler.analysis.bucket_timeline import bucket_times, detailed_steps
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.records.clock_offsets import offset_at
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.records.steps import Step
from paceline.profiler.records.trace_file import Event, write_events

SPANS, BUCKETS = 10_000_000, 10_000_001
"""Thread numbers of a rank's lanes: its spans, and buckets, which take further lanes where several are under way.
Torch's threads and streams keep their numbers, which are smaller."""
ARROWS = 1 << 40
"""First number of our arrows; torch's are smaller."""
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_NS = 3
"""Decimals of microseconds that are kept, so that an event inside another one stays inside."""


def write_trace(folder: Path, facts: Facts) -> None:
    """Write ``trace.json`` into the profile's `folder`."""
    write_events(folder / "trace.json", trace_events(facts.records, facts.traces))


def trace_events(records: Sequence[RankRecord], torch_traces: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """Yield the events of all ranks."""
    numbers = itertools.count(ARROWS)
    starts = [step.start - offset_at(step.start, record.offsets) for record in records for step in record.steps]
    zero = min(starts, default=0.0)
    for record, trace in zip(records, torch_traces, strict=True):
        yield from _names(record)
        yield from _spans(record, zero, numbers)
        yield from _operators(record, trace, zero)
    yield from _buckets(records, zero)


def _names(record: RankRecord) -> Iterator[Event]:
    rank = record.rank
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} ({record.host})"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    yield from _name_lane("step", rank, SPANS)


def _name_lane(name: str, rank: int, lane: int) -> Iterator[Event]:
    yield _named(name, rank, lane)
    yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": {"sort_index": lane - BUCKETS - 1}}


def _named(name: str, rank: int, lane: Any) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}


def _buckets(records: Sequence[RankRecord], zero: float) -> Iterator[Event]:
    """Yield each bucket of detailed steps, in a lane that no other is in."""
    ends: list[list[float]] = [[] for _ in records]
    """Moments at which each lane of each rank is free again."""
    for steps in detailed_steps(records):
        begin = min(step.start for step in steps) - zero
        for bucket in bucket_times(steps, records[0].buckets):
            for rank, finished in enumerate(bucket.finished):
                if finished is None:
                    continue
                start, end, lanes = begin + bucket.launched[rank], begin + finished, ends[rank]
                # Events of one lane must not overlap, so a bucket takes the first lane that is free.
                lane = next((lane for lane, free in enumerate(lanes) if free <= start), len(lanes))
                if lane == len(lanes):
                    yield from _name_lane(f"buckets {lane + 1}" if lane else "buckets", rank, BUCKETS + lane)
                lanes[lane:] = [max(start, end), *lanes[lane + 1 :]]
                event = _complete(f"bucket {bucket.bucket}", start, end, rank, BUCKETS + lane)
                yield event | {"args": {"bytes": bucket.nbytes}}


def _spans(record: RankRecord, zero: float, numbers: Iterator[int]) -> Iterator[Event]:
    for step in record.steps:
        shift = zero + offset_at(step.start, record.offsets)
        yield _complete(f"step {step.number}", step.start - shift, step.end - shift, record.rank, SPANS) | {
            "args": {"kind": step.kind, "rows": step.rows} | step.seconds
        }
        nested = list(_nested(step))
        for span, start, end in nested:
            name = span.label if span.bucket is None else f"{span.label} {span.bucket}"
            yield _complete(name, start - shift, end - shift, record.rank, SPANS)
        for launched, waited in _launches_and_waits(nested):
            yield from _arrow(next(numbers), launched - shift, waited - shift, record.rank)


def _launches_and_waits(nested: Sequence[tuple[Span, float, float]]) -> Iterator[tuple[float, float]]:
    """Yield, for each bucket of a step, the begin of its launch, and of the wait for it or else for all buckets."""
    for launch, launched, _ in nested:
        if launch.label != LAUNCH:
            continue
        later = [(span, start) for span, start, _ in nested if start >= launched]
        waits = [start for span, start in later if span.label == BUCKET_WAIT and span.bucket == launch.bucket]
        waits += [start for span, start in later if span.label == WAIT]
        if waits:
            yield launched, waits[0]


def _arrow(number: int, start: float, end: float, rank: int) -> Iterator[Event]:
    """Yield an arrow between two spans, which are those that begin at its ends."""
    # "bp": "e" binds the end to the span around it; else a viewer takes the next one that begins.
    ends = ({"ph": "s", "ts": round(start * 1e6, _NS)}, {"ph": "f", "bp": "e", "ts": round(end * 1e6, _NS)})
    for event in ends:
        yield event | {"name": "bucket", "cat": "paceline", "id": number, "pid": rank, "tid": SPANS}


def _nested(step: Step) -> Iterator[tuple[Span, float, float]]:
    """Yield the spans of `step` with begins and ends that nest: a span ends at the latest with the one around it.

    :func:`~paceline.profiler.records.steps.cut` treats them in the same way.
    """
    ends: list[float] = []  # ends of the open spans, the outermost first
    for span in sorted(step.spans, key=lambda span: (span.start, -span.end)):
        start = min(max(span.start, step.start), step.end)
        while ends and ends[-1] <= start:
            ends.pop()
        end = max(start, min(span.end, ends[-1] if ends else step.end))
        ends.append(end)
        yield span, start, end


def _operators(record: RankRecord, trace: dict[str, Any], zero: float) -> Iterator[Event]:
    """Yield torch's events, whose times count from the time of day."""
    begin = next((step.start for step in record.steps if step.kind == "traced"), zero)
    named: set[Any] = set()  # torch's threads and streams
    shift = round(_torch_shift(record, trace) - (zero + offset_at(begin, record.offsets)) * 1e6, _NS)
    for event in trace.get("traceEvents", ()):
        # Without torch's metadata ("M"), because processes and lanes have names of ours here.
        if event.get("ph") in ("X", "i", "s", "f") and "ts" in event and not _is_known(event):
            moved = event | {"ts": round(event["ts"] + shift, _NS), "pid": record.rank}
            if "id" in event:  # the same number in another rank's trace is another arrow
                moved["id"] = event["id"] * record.size + record.rank
            if event["ph"] == "X" and moved["tid"] not in named:
                named.add(moved["tid"])
                is_stream = event.get("cat") in _ON_GPU
                yield _named(f"stream {moved['tid']} (GPU)" if is_stream else "operators", record.rank, moved["tid"])
            yield moved


def _torch_shift(record: RankRecord, trace: dict[str, Any]) -> float:
    """Return the microseconds from torch's times to those of this rank's ``time.perf_counter``.

    Both know the time of day, but not well: a process may be interrupted while clocks are compared. A span of ours lies
    around torch's event of the same name, which bounds the shift from both sides.
    """
    events = trace.get("traceEvents", ())
    shift: float = (trace.get("baseTimeNanoseconds", 0) - record.started_ns) / 1e3
    if any(event.get("cat") == "kernel" for event in events):  # on a GPU spans have the device's times, not the host's
        return shift
    low, high = -math.inf, math.inf
    traced = [span for step in record.steps if step.kind == "traced" for span in step.spans]
    for label in (FORWARD, LAUNCH):
        ours = sorted((span.start * 1e6, span.end * 1e6) for span in traced if span.label == label)
        found = [event for event in events if event.get("cat") == "user_annotation" and _label(event) == label]
        theirs = sorted((event["ts"], event["ts"] + event["dur"]) for event in found)
        if len(ours) == len(theirs):
            low = max([low, *(one[0] - other[0] for one, other in zip(ours, theirs, strict=True))])
            high = min([high, *(one[1] - other[1] for one, other in zip(ours, theirs, strict=True))])
    return min(max(shift, low), high) if low <= high else (low + high) / 2


def _label(event: Event) -> str:
    return str(event["name"]).rstrip("0123456789 ")


def _is_known(event: Event) -> bool:
    """Return whether torch's `event` is left out: the profiler's own window, or a span that our record has already.

    Spans of ours begin in one hook and end in another, so they do not nest with autograd's events in between.
    """
    if event.get("cat") == "user_annotation":
        return _label(event) in LABELS
    return event.get("cat") in (None, "Trace")


def _complete(name: str, start: float, end: float, rank: int, lane: int) -> Event:
    ts, last = round(start * 1e6, _NS), round(end * 1e6, _NS)
    micro = {"ts": ts, "dur": round(max(0.0, last - ts), _NS)}
    return {"ph": "X", "name": name, "cat": "paceline", "pid": rank, "tid": lane} | micro
