"""One trace for each rank that Holistic Trace Analysis reads (``TraceAnalysis(trace_dir="FOLDER/hta")``).

It reads kernels of GPUs. Where torch's profiler saw some, its trace of a rank is that rank's file. Elsewhere the steps
whose gradients were recorded stand in their place: computing on one stream, the all-reduces of the buckets on another,
under a name that it takes for NCCL's. Its overlap of communication and computation is then ``overlap_by_rank`` in
``summary.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.records.clock_offsets import offset_at
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.records.trace_file import Event, write_events

FOLDER = "hta"
COMPUTE, ALL_REDUCE = 7, 20
"""Numbers of the streams that PyTorch and NCCL usually have."""


def write_hta_traces(folder: Path, facts: Facts) -> None:
    """Write ``hta/rank-N.json`` into the profile's `folder`, for each rank whose overlap is known."""
    # An earlier profile in this folder may have had more ranks.
    for stale in (folder / FOLDER).glob("rank-*.json"):
        stale.unlink()
    for record in facts.records:
        if record.rank not in facts.overlap:
            continue
        (folder / FOLDER).mkdir(exist_ok=True)
        file = folder / FOLDER / f"rank-{record.rank}.json"
        # The second line names the rank: the first `"rank": N` in a file counts.
        if facts.operators.overlap:
            write_events(file, *_torch_trace(facts.traces[record.rank], record))
        else:
            write_events(file, _head(record), hta_events(facts, record.rank))


def hta_events(facts: Facts, rank: int) -> Iterator[Event]:
    """Yield the detailed steps of `rank`, in microseconds since rank 0's clock began the first of them.

    Times are whole: Holistic Trace Analysis would round others, each kernel's inwards.
    """
    begins = [min(step.start for step in steps) for steps in facts.detailed]
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    for steps, ranks, begin in zip(facts.detailed, facts.lanes, begins, strict=True):
        lane, step = ranks[rank], steps[rank]
        if lane is None:
            continue
        zero = round((begin - begins[0]) * 1e6)
        start, end = (zero + round((when - begin) * 1e6) for when in (step.start, step.end))
        yield _complete("user_annotation", f"step {step.number}", start, end, rank)
        for part, start, end in lane.compute:
            yield _kernel(part, zero + start, zero + end, rank, COMPUTE)
        for number, start, end in lane.all_reduces:
            yield _kernel(f"ncclDevKernel_AllReduce(bucket {number})", zero + start, zero + end, rank, ALL_REDUCE)


def _kernel(name: str, start: int, end: int, rank: int, stream: int) -> Event:
    event = _complete("kernel", name, start, end, rank)
    return event | {"tid": stream, "args": {"device": 0, "stream": stream}}


def _complete(cat: str, name: str, start: int, end: int, rank: int) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": rank, "tid": 0, "ts": start, "dur": end - start}


def _head(record: RankRecord) -> Event:
    start = min((step.start - offset_at(step.start, record.offsets) for step in record.steps), default=0.0)
    return {
        "distributedInfo": {"backend": record.backend, "rank": record.rank, "world_size": record.size},
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": record.started_ns + round(start * 1e9),
    }


def _torch_trace(trace: Event, record: RankRecord) -> tuple[Event, list[Event]]:
    """Return the trace of torch's profiler: its head, which has to name the rank, and its events."""
    head = {name: value for name, value in trace.items() if name not in ("traceEvents", "distributedInfo")}
    info = {"rank": record.rank, "world_size": record.size} | trace.get("distributedInfo", {})
    return {"distributedInfo": info} | head, trace["traceEvents"]
