"""Reads the traces that torch's profiler wrote, in Google's Trace Event Format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core.strict_json import loads
from paceline.core.untrusted_files import read_text
from paceline.profiler.records.rank_file import RankRecord, trace_of

Event = dict[str, Any]


def read_traces(folder: Path, records: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Return the trace of torch's profiler for each rank; empty if it is missing or truncated."""
    return [_read(trace_of(folder, record.rank)) for record in records]


def _read(file: Path) -> dict[str, Any]:
    try:
        trace = loads(read_text(file))
    except (OSError, ValueError):
        return {}
    return trace if isinstance(trace, dict) else {}


def complete_events(trace: dict[str, Any]) -> list[Event]:
    """Return the events of `trace` that have a duration."""
    return [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
