"""Reads the traces that torch's profiler wrote, in Google's Trace Event Format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.strict_json import loads
from paceline.core.untrusted_files import read_text

Event = dict[str, Any]


def read_trace(file: Path) -> dict[str, Any]:
    """Return a rank's trace; empty if it is missing or truncated."""
    try:
        trace = loads(read_text(file))
    except (OSError, ValueError):
        return {}
    return trace if isinstance(trace, dict) else {}
