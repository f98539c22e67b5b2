"""Failures of ``paceline run`` jobs with two ranks on one GPU: a rank is killed or hangs, or the job gets SIGTERM."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import chaos

from gpu_checks.rows import Place, Row, holds, measured

JOB_SECONDS = 75.0
STEPS = 24
"""Number of steps. Rank 1 fails in step 13, and a checkpoint is written every 5 steps."""


class Job:
    """A training from ``make chaos``, which runs in the constructor."""

    def __init__(self, place: Place, folder: Path, order: str = "", disturbance: str = "", *options: str) -> None:
        settings = {"backend": "gloo", "device": str(place.device), "steps": STEPS, "every": 5}
        self._case = chaos.Case("", 2, (), {**settings, "disturbance": disturbance})
        folder.mkdir(exist_ok=True)
        self.folder, self._report = folder, folder / "report.json"
        began = time.monotonic()
        with patch.dict("os.environ", CUBLAS_WORKSPACE_CONFIG=":4096:8"):  # for deterministic kernels
            self.code, self.errors, self.ranks = chaos.run(
                self._case, [order] if order else [], folder, ("--report", str(self._report), *options), JOB_SECONDS
            )
        self.seconds = time.monotonic() - began
        print(self.errors[-3000:], file=sys.stderr, flush=True)  # for the report, if the check fails

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads(self._report.read_text("utf-8"))) if self._report.exists() else {}

    @property
    def last_line(self) -> str:
        return (self.errors.splitlines() or [""])[-1]

    def equals(self, other: Job) -> bool:
        """Return whether both jobs ended bit-identical on all ranks and used the same samples."""
        return chaos.are_equal(self._case, self.ranks, other.ranks)


def nothing_left(job: Job) -> Row:
    """Check that a few seconds after the job, its processes are gone and its checkpoints are complete."""
    deadline = time.monotonic() + 5
    while (left := chaos.leftovers(job.folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds("no process and no unfinished checkpoint is left", ", ".join(left), not left)


def continues(place: Place, what: str, order: str = "", disturbance: str = "", *options: str) -> Iterator[Row]:
    """A job restarts after rank 1 fails in the middle of a step, and ends bit-identical to an undisturbed job."""
    undisturbed = Job(place, place.folder / "undisturbed")
    struck = Job(place, place.folder / "struck", order, disturbance, *options)
    report, codes = struck.report, [struck.code, undisturbed.code]
    ok = codes == [0, 0] and report.get("restarts") == 1
    yield holds(f"{what}: the job continues", "" if ok else f"exit codes {codes}, {struck.last_line}", ok)
    yield holds("the same bits as an undisturbed job", "", struck.equals(undisturbed))
    failure = (report.get("failures") or [{}])[0]
    first_failure = failure.get("first") or {}
    is_named = first_failure.get("rank") == 1 and first_failure.get("step") in (13, None)
    yield holds("the report names rank 1", str(failure.get("summary", "no failure")), is_named)
    yield nothing_left(struck)
    restart = f"from {report.get('rescued_from')}, {report.get('steps_redone')} steps redone"
    yield measured("the whole job with its restart", f"{struck.seconds:.0f} s; {restart}", seconds=struck.seconds)


def killed(place: Place) -> Iterator[Row]:
    yield from continues(place, "a rank is killed in mid-step", "forward rank=1 at=13")


def stuck_kernel(place: Place) -> Iterator[Row]:
    yield from continues(place, "a rank waits a minute for a kernel", "", "kernel", "--hang-timeout", "10")


def stopped(place: Place) -> Iterator[Row]:
    """After SIGTERM to the launcher, the job saves a checkpoint and ends. The resumed job ends bit-identical."""
    undisturbed = Job(place, place.folder / "undisturbed")
    struck = Job(place, place.folder / "struck", "", "stop")
    ok = struck.code == 143 and bool(re.search(r"after step \d+ was saved", struck.errors))
    value = f"exit code {struck.code}, {struck.seconds:.1f} s: {struck.last_line}"
    yield holds("SIGTERM: a step is saved, and the job ends", value, ok)
    yield nothing_left(struck)
    again = Job(place, struck.folder)
    codes = [undisturbed.code, again.code]
    same = codes == [0, 0] and again.equals(undisturbed)
    yield holds("run again: the same bits as an undisturbed job", f"exit codes {codes}", same)
