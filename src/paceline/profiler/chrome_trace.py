"""One trace for Perfetto and ``chrome://tracing``: a process for each rank, with its spans, buckets and operators.

The format is Google's Trace Event Format; times are microseconds since the first rank began.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.profiler.buckets_seen import bucket_times, detailed_steps
from paceline.profiler.clocks import offset_at
from paceline.profiler.rank_file import RankRecord, read_ranks, trace_of

SPANS, BUCKETS = 0, 1
"""Thread numbers of a rank's lanes; torch's own threads keep theirs."""
Event = dict[str, Any]


def write_trace(folder: Path) -> None:
    """Write ``trace.json`` into the profile's `folder`."""
    records = read_ranks(folder)
    with (folder / "trace.json").open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        events = trace_events(records, [_torch_trace(folder, record) for record in records])
        for number, event in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


def trace_events(records: Sequence[RankRecord], torch_traces: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """Yield the events of all ranks."""
    starts = [step.start - offset_at(step.start, record.offsets) for record in records for step in record.steps]
    zero = min(starts, default=0.0)
    for record, trace in zip(records, torch_traces, strict=True):
        yield from _names(record)
        yield from _spans(record, zero)
        yield from _operators(record, trace, zero)
    for steps in detailed_steps(records):
        begin = min(step.start for step in steps) - zero
        for bucket in bucket_times(steps, records[0].buckets):
            for rank, end in enumerate(bucket.finished):
                if end is not None:
                    name, start = f"bucket {bucket.bucket}", begin + bucket.launched[rank]
                    yield _complete(name, start, begin + end, rank, BUCKETS) | {"args": {"bytes": bucket.nbytes}}


def _names(record: RankRecord) -> Iterator[Event]:
    rank = record.rank
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} ({record.host})"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for number, name in ((SPANS, "step"), (BUCKETS, "buckets")):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}


def _spans(record: RankRecord, zero: float) -> Iterator[Event]:
    for step in record.steps:
        shift = zero + offset_at(step.start, record.offsets)
        yield _complete(f"step {step.number}", step.start - shift, step.end - shift, record.rank, SPANS) | {
            "args": {"kind": step.kind, "rows": step.rows} | step.seconds
        }
        for span in step.spans:
            name = span.label if span.bucket is None else f"{span.label} {span.bucket}"
            yield _complete(name, span.start - shift, span.end - shift, record.rank, SPANS)


def _operators(record: RankRecord, trace: dict[str, Any], zero: float) -> Iterator[Event]:
    """Yield torch's events, whose times count from the time of day."""
    base = trace.get("baseTimeNanoseconds", 0)
    shift = (base - record.started_ns) / 1e3 - (zero + offset_at(zero, record.offsets)) * 1e6
    for event in trace.get("traceEvents", ()):
        if event.get("ph") in ("X", "i", "s", "f") and "ts" in event:
            yield event | {"ts": event["ts"] + shift, "pid": record.rank}


def _complete(name: str, start: float, end: float, rank: int, lane: int) -> Event:
    micro = {"ts": round(start * 1e6, 3), "dur": round((end - start) * 1e6, 3)}
    return {"ph": "X", "name": name, "cat": "paceline", "pid": rank, "tid": lane} | micro


def _torch_trace(folder: Path, record: RankRecord) -> dict[str, Any]:
    try:
        trace: dict[str, Any] = json.loads(trace_of(folder, record.rank).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return trace
