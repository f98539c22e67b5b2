"""The command ``paceline profile``: runs a program on N ranks, records each, and shows the results."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.core.output.commands import INTERRUPTED
from paceline.core.output.messages import say
from paceline.errors import UsageError
from paceline.profiler.records.rank_file import FOLDER, make_folder, read_ranks
from paceline.profiler.records.steps import MOST, WARM_UP
from paceline.profiler.records.untrusted_files import new_file
from paceline.profiler.results import RESULTS

STOPPED = (INTERRUPTED, 128 + signal.SIGTERM)
"""Exit codes of a program that was told to end, by Ctrl-C or SIGTERM."""


@dataclass(frozen=True)
class ProfileSettings:
    """The settings of a profile."""

    folder: str
    """Folder of the results."""
    steps: int | None = None
    """Number of steps to measure, after which the program ends; None to measure until the program ends."""
    title: str = ""
    """Title of the program; empty for its command line. A recipe's command line has its options as JSON."""

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
        # In an existing empty folder nothing above reveals that it is read-only.
        if not os.access(folder / FOLDER, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written to: {error.strerror}; choose another folder") from error


def rank_program(settings: ProfileSettings, program: Sequence[str]) -> list[str]:
    """Return a module and its arguments with which a rank runs `program`, a script or ``-m MODULE``, and records it."""
    return ["paceline.profiler", json.dumps(asdict(settings)), *program]


def run_profiled(program: Sequence[str], settings: ProfileSettings, nproc: int, env: Mapping[str, str]) -> int:
    """Run `program` on `nproc` ranks, which record their steps, then show the results; return the exit code."""
    from paceline.launch import job

    command = [sys.executable, "-u", "-m", *rank_program(settings, program)]
    code = job.launch(job.Job(command, nproc, env=env))
    show_results(Path(settings.folder), code)
    return code


def show_results(folder: Path, code: int = 0) -> None:
    """Write the results of the records in `folder`, and show them in the terminal.

    With the exit `code` of a failed program, which has printed its own error, missing records are not an error.
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
        return
    print_summary(report)
    print(f"{folder / 'report.html'}: open it in a browser; {folder / 'trace.json'}: in https://ui.perfetto.dev")


def _steps_taken(folder: Path) -> int:
    """Return the largest number of steps that a rank has recorded; 0 if the job was still starting."""
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


def report_again(arguments: Sequence[str]) -> int:
    """Write the results in a folder again: ``paceline profile report FOLDER``."""
    if len(arguments) != 1:
        raise UsageError("paceline profile report takes one folder, which --out named")
    show_results(Path(arguments[0]))
    return 0
