"""One trace for Perfetto and ``chrome://tracing``: a process for each rank, with its spans, buckets and operators.

The format is Google's Trace Event Format. Times are in microseconds since the first rank began.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.spans import LABELS, Span
from paceline.core.strict_json import new_file
from paceline.profiler.facts import Facts
from paceline.profiler.operator_table import Event
from paceline.profiler.rank_file import RankRecord
from paceline.profiler.steps import Step, offset_at

SPANS = 10_000_000
"""Thread number for a rank's spans. torch's threads and streams have smaller numbers."""
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_NS = 3
"""Decimal places of microseconds. With fewer, rounding could move an event out of the surrounding one."""


def write_trace(folder: Path, facts: Facts) -> None:
    """Write ``trace.json`` into the profile's `folder`, one event per line."""
    with new_file(folder / "trace.json") as file:
        file.write('{\n"displayTimeUnit": "ms",\n"traceEvents": [\n')
        for number, event in enumerate(trace_events(facts)):
            file.write((",\n" if number else "") + json.dumps(event, allow_nan=False))
        file.write("\n]}\n")


def trace_events(facts: Facts) -> Iterator[Event]:
    """Yield the events of all ranks."""
    starts = [step.start - offset_at(step.start, record.offsets) for record in facts.records for step in record.steps]
    zero = min(starts, default=0.0)
    for record, trace in zip(facts.records, facts.traces, strict=True):
        name = f"rank {record.rank} ({record.host})"
        yield {"ph": "M", "name": "process_name", "pid": record.rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": record.rank, "args": {"sort_index": record.rank}}
        yield _lane("step", record.rank, SPANS)
        yield from _spans(record, zero)
        yield from _operators(record, trace, zero)
    yield from _buckets(facts, zero)


def _spans(record: RankRecord, zero: float) -> Iterator[Event]:
    for step in record.steps:
        shift = zero + offset_at(step.start, record.offsets)
        details = {"args": {"kind": step.kind, "rows": step.rows} | step.seconds}
        yield _complete(f"step {step.number}", step.start - shift, step.end - shift, record.rank) | details
        for span, start, end in _nested(step):
            name = span.label if span.bucket is None else f"{span.label} {span.bucket}"
            yield _complete(name, start - shift, end - shift, record.rank)


def _nested(step: Step) -> Iterator[tuple[Span, float, float]]:
    """Yield the spans of `step`, properly nested: no span ends later than the one around it.

    :func:`~paceline.profiler.steps.cut_into_stretches` treats them in the same way.
    """
    ends: list[float] = []  # ends of the open spans, outermost first
    for span in sorted(step.spans, key=lambda span: (span.start, -span.end)):
        start = min(max(span.start, step.start), step.end)
        while ends and ends[-1] <= start:
            ends.pop()
        end = max(start, min(span.end, ends[-1] if ends else step.end))
        ends.append(end)
        yield span, start, end


def _buckets(facts: Facts, zero: float) -> Iterator[Event]:
    """Yield each bucket of the detailed steps, from launch to finish, as asynchronous events, which may overlap."""
    number = 0
    for steps, buckets in zip(facts.detailed, facts.buckets, strict=True):
        begin = min(step.start for step in steps) - zero
        for bucket in buckets:
            for rank, finished in enumerate(bucket.finished):
                if finished is None:
                    continue
                number += 1
                common = {"name": f"bucket {bucket.bucket}", "cat": "buckets", "pid": rank, "tid": SPANS, "id": number}
                launched = bucket.launched[rank]
                yield common | {"ph": "b", "ts": _us(begin + launched), "args": {"bytes": bucket.nbytes}}
                yield common | {"ph": "e", "ts": _us(begin + max(launched, finished))}


def _operators(record: RankRecord, trace: dict[str, Any], zero: float) -> Iterator[Event]:
    """Yield torch's events, whose times are relative to a time of day."""
    begin = next((step.start for step in record.steps if step.kind == "traced"), zero)
    shift = (trace.get("baseTimeNanoseconds", 0) - record.started_ns) / 1e3
    shift = round(shift - (zero + offset_at(begin, record.offsets)) * 1e6, _NS)
    named: set[Any] = set()  # torch's threads and streams
    for event in trace.get("traceEvents", ()):
        # Skip torch's metadata ("M"), because processes and lanes have different names here.
        if event.get("ph") in ("X", "i", "s", "f") and "ts" in event and not _is_known(event):
            moved = event | {"ts": round(event["ts"] + shift, _NS), "pid": record.rank}
            if "id" in event:  # another rank's trace may use the same number for another arrow
                moved["id"] = event["id"] * record.size + record.rank
            if event["ph"] == "X" and moved["tid"] not in named:
                named.add(moved["tid"])
                is_stream = event.get("cat") in _ON_GPU
                yield _lane(f"stream {moved['tid']} (GPU)" if is_stream else "operators", record.rank, moved["tid"])
            yield moved


def _is_known(event: Event) -> bool:
    """Return whether to skip torch's `event`: the profiler's own window, or a span that the record already has.

    Such spans begin in one hook and end in another, so they would not nest with autograd's events in between.
    """
    if event.get("cat") == "user_annotation":
        return str(event["name"]).rstrip("0123456789 ") in LABELS
    return event.get("cat") in (None, "Trace")


def _lane(name: str, rank: int, lane: Any) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}


def _complete(name: str, start: float, end: float, rank: int) -> Event:
    ts = _us(start)
    duration = round(max(0.0, _us(end) - ts), _NS)
    return {"ph": "X", "name": name, "cat": "paceline", "pid": rank, "tid": SPANS, "ts": ts, "dur": duration}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, _NS)
