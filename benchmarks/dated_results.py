"""Keeps the results of a benchmark under the day's date, with the machine."""

from __future__ import annotations

import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.launch.pinning import cores

RESULTS = Path(__file__).parent / "results"


def save(name: str, results: Any, ranks: int | None = None) -> Path:
    """Keep `results` of `ranks` ranks, by default those of the process group; returns the file."""
    RESULTS.mkdir(exist_ok=True)
    today = date.today().isoformat()
    path = RESULTS / f"{today}-{name}.json"
    record = {
        "date": today,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s) a rank, {cores()} cores",
        "torch": torch.__version__,
        "ranks": ranks or dist.get_world_size(),
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
