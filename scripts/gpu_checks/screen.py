"""The report that users send us: versions, devices, and all lines with their verdicts."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import paceline
from gpu_checks.catalogue import PARTS, Check
from gpu_checks.rows import Row, Verdict

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 118


@dataclass(frozen=True)
class Result:
    """The outcome of one check."""

    check: Check
    rows: list[Row]
    seconds: float
    log: str = ""
    """The last lines of the ranks' output if the check failed."""

    @property
    def failed(self) -> bool:
        return any(row.verdict is Verdict.FAILED for row in self.rows)

    def remedy(self, row: Row) -> str:
        """Return the advice for a failed line; empty if the line did not fail."""
        return (row.remedy or self.check.remedy) if row.verdict is Verdict.FAILED else ""

    def as_json(self) -> dict[str, Any]:
        """Return the result for the JSON file."""
        rows = [{**asdict(row), "verdict": row.verdict.value, "remedy": self.remedy(row)} for row in self.rows]
        check = {"part": self.check.part, "check": self.check.name, "ranks": self.check.ranks.value}
        return {**check, "seconds": round(self.seconds, 1), "rows": rows, "log": self.log}


def facts(on_gpu: bool) -> dict[str, str]:
    """Return versions and devices of this machine."""
    commit = asked("git", "-C", str(ROOT), "log", "-1", "--format=%h")
    settings = [name for name in sorted(os.environ) if name.startswith(("NCCL_", "TORCH_", "CUDA_"))]
    versions = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "paceline": f"{paceline.__version__} {commit}".strip(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or torch.version.hip),
        "NCCL": "-",
        "driver": "-",
        "device": "CPU, to test the script; the results say nothing about GPUs",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs",
        "environment": ", ".join(f"{name}={os.environ[name]}" for name in settings),
    }
    if on_gpu:
        query = asked("nvidia-smi", "--query-gpu=driver_version,memory.used", "--format=csv,noheader")
        properties = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
        kinds = Counter(
            f"{device.name}, {device.total_memory / 2**30:.1f} GiB, sm_{device.major}{device.minor}"
            for device in properties
        )
        versions["device"] = "; ".join(f"{count} × {kind}" for kind, count in kinds.items())
        versions["NCCL"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        drivers = [f"{line} in use at the start" for line in query.splitlines()]
        versions["driver"] = " | ".join(drivers) or "unknown, because nvidia-smi does not run"
    return versions


def asked(*command: str) -> str:
    """Return the output of a program; empty if the program fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def report(results: Sequence[Result], versions: dict[str, str], seconds: float) -> str:
    """Return the whole report."""
    lines = [f"Paceline GPU check, {versions['date']}, {seconds / 60:.1f} minutes"]
    lines += [f"  {name:<12} {value}" for name, value in versions.items() if name != "date" and value]
    counts = Counter(row.verdict for result in results for row in result.rows)
    lines += ["", "  " + ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)]
    for part, title in PARTS.items():
        of_part = [result for result in results if result.check.part == part]
        if of_part:
            lines += ["", f"{part}: {title} ({sum(result.seconds for result in of_part):.0f} s)"]
        for result in of_part:
            lines += [line for row in result.rows for line in row_lines(result, row)]
    if failures := [(result, row) for result in results for row in result.rows if row.verdict is Verdict.FAILED]:
        lines += ["", "FAILED"]
        for result, row in failures:
            lines += [f"  {result.check.path}: {row.what}: {row.value}", f"    remedy: {result.remedy(row)}"]
            lines.append(f"    again:  python scripts/gpu_check.py --part {result.check.path}")
    return "\n".join(lines)


def row_lines(result: Result, row: Row) -> list[str]:
    """Format verdict, check and value, with line breaks."""
    text = f"{row.what}: {row.value}" if row.value else row.what
    start = f"  {row.verdict.value:<9}{result.check.name:<16}"
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)) or [start]


def progress(number: int, total: int, result: Result) -> None:
    """Print a completed check on stderr."""
    counts = Counter(row.verdict.value for row in result.rows)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    line = f"[{number:2}/{total}] {result.check.path:<24} {summary} ({result.seconds:.0f} s)"
    print(line, file=sys.stderr, flush=True)
