"""The command ``paceline profile``: runs a program on N ranks, records each, and shows the results."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.output.commands import INTERRUPTED
from paceline.core.output.messages import say
from paceline.errors import UsageError
from paceline.profiler.records.rank_file import FOLDER, make_folder, read_ranks
from paceline.profiler.records.steps import MOST, WARM_UP
from paceline.profiler.records.untrusted_files import new_file
from paceline.profiler.report.report import Report
from paceline.profiler.results import RESULTS

STOPPED = (INTERRUPTED, 128 + signal.SIGTERM)
"""Exit codes of a program that was told to end, by Ctrl-C or SIGTERM."""


@dataclass(frozen=True)
class ProfileSettings:
    """The settings of a profile."""

    folder: str
    """Folder of the results."""
    steps: int | None = None
    """Number of steps to measure, after which the program ends; None to measure all, and leave the end to the
    program."""
    operators: bool = True
    """Whether torch's profiler watches a few steps."""
    watch: bool = False
    """Whether the launcher shows the ranks live."""
    title: str = ""
    """Title of the program; empty for its command line. A recipe's rank gets its options as JSON, which nobody
    reads."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the ranks' environment."""

    def check(self) -> None:
        """Refuse options that cannot work, before anything runs."""
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}")
        if self.steps is not None and self.steps > MOST:
            raise UsageError(f"--steps must be at most {MOST}, not {self.steps}; leave it out to let the program end")
        prepare(Path(self.folder))


def prepare(folder: Path) -> None:
    """Make `folder`, or take the results of an earlier profile out of it."""
    try:
        is_profile = any((folder / FOLDER).glob("rank-*.jsonl"))
        if not is_profile and (others := [name for name in RESULTS if (folder / name).exists()]):
            raise UsageError(
                f"--out {folder} has a {others[0]} that is not of a profile and would be lost; choose another folder"
            )
        make_folder(folder)
        # If the new profile fails, nothing there may be taken for its results.
        for old in [*(folder / name for name in RESULTS), *(folder / FOLDER).glob("rank-*")]:
            old.unlink(missing_ok=True)
        # mkdir() and unlink() have nothing to do, and so no complaint, in a folder that is there and empty.
        if not os.access(folder / FOLDER, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written to: {error.strerror}; choose another folder") from error


def rank_program(settings: ProfileSettings, program: Sequence[str]) -> list[str]:
    """Return a module and its arguments with which a rank runs `program`, a script or ``-m MODULE``, and records it."""
    options = {name: getattr(settings, name) for name in ("folder", "steps", "operators", "title")}
    return ["paceline.profiler", json.dumps(options), *program]


def run_profiled(program: Sequence[str], settings: ProfileSettings, nproc: int) -> int:
    """Run `program` on `nproc` ranks, write and show the results; returns the exit code."""
    settings.check()
    code = _record(program, settings, nproc)
    show_results(Path(settings.folder), code)
    return code


def _record(program: Sequence[str], settings: ProfileSettings, nproc: int) -> int:
    """Run `program` on `nproc` ranks, which record their steps; returns the exit code."""
    from paceline.launch import job
    from paceline.launch.rank.channels import Logs
    from paceline.tools.top.watch import can_draw, watching

    command = [sys.executable, "-u", "-m", *rank_program(settings, program)]
    with watching() if settings.watch else nullcontext():
        # Ranks that wrote to the terminal themselves would write into the live view, so their output goes through
        # files.
        logs = Logs(tee="3", prefix="[rank ${rank}] ") if settings.watch and can_draw() else Logs()
        return job.launch(job.Job(command, nproc, logs=logs, env=settings.env))


def show_results(folder: Path, code: int = 0) -> Report | None:
    """Write the results of the records in `folder`, show them in the terminal, and return them.

    Args:
        folder: the profile's.
        code: exit code of the program. One that failed has said why, so that nothing to show is no error beside it.
    """
    from paceline.profiler.results import write_results
    from paceline.tools.profile.terminal_summary import print_summary

    try:
        report = write_results(folder)
    except UsageError as error:
        if not code:
            raise
        reason = str(error)
        if code in STOPPED and (taken := _steps_taken(folder)) <= WARM_UP:
            reason = (
                f"nothing was measured yet; when the job was stopped, {taken} of the {WARM_UP} steps that warm up had "
                "gone by; let it train longer"
            )
        say(f"no profile: {reason}")
        return None
    print_summary(report)
    print(f"{folder / 'report.html'}: open it in a browser; {folder / 'trace.json'}: in https://ui.perfetto.dev")
    return report


def _steps_taken(folder: Path) -> int:
    """Return the most steps that a rank has recorded; 0 where none has begun to, as in a job that was only starting."""
    try:
        return max(len(record.steps) for record in read_ranks(folder))
    except UsageError:
        return 0


def compare_profiles(first: str, second: str) -> int:
    """Show two profiles side by side in the terminal, and in ``compare.html`` in the folder of the second one."""
    from paceline.profiler.page import comparison_page
    from paceline.profiler.report.comparison import compare
    from paceline.profiler.results import read_report
    from paceline.tools.profile.terminal_summary import print_comparison

    reports = read_report(Path(first)), read_report(Path(second))
    comparison = compare(*reports, (first, second))
    print_comparison(comparison)
    page = Path(second) / "compare.html"
    try:
        with new_file(page) as file:
            file.write(comparison_page(comparison))
    except OSError as error:
        raise UsageError(f"{page} cannot be written: {error.strerror}; choose another folder") from error
    print(f"{page}: open it in a browser")
    return 0


def _report(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        raise UsageError("paceline profile report takes one folder, which --out named")
    show_results(Path(arguments[0]))
    return 0


TOOLS: dict[str, Callable[[Sequence[str]], int]] = {"report": _report}
"""Functions of words that may stand in the place of a program."""
