"""The command ``paceline profile``: runs a program on N ranks, records each, and shows the results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from paceline.core.output.files import write_file
from paceline.errors import UsageError
from paceline.profiler.records.rank_file import FOLDER
from paceline.profiler.records.steps import MOST

RESULTS = ("summary.json", "report.json", "trace.json", "report.html")


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

    def check(self) -> None:
        """Refuse options that cannot work, before anything runs.

        Raises:
            UsageError: names the option.
        """
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}")
        if self.steps is not None and self.steps > MOST:
            raise UsageError(f"--steps must be at most {MOST}, not {self.steps}; leave it out to let the program end")
        prepare(Path(self.folder))


def prepare(folder: Path) -> None:
    """Make `folder`, or take the results of an earlier profile out of it.

    Raises:
        UsageError: if it cannot be written to.
    """
    try:
        is_profile = any((folder / FOLDER).glob("rank-*.jsonl"))
        if not is_profile and (others := [name for name in RESULTS if (folder / name).exists()]):
            raise UsageError(
                f"--out {folder} has a {others[0]} that is not of a profile and would be lost; choose another folder"
            )
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        for old in [*(folder / name for name in RESULTS), *(folder / FOLDER).glob("rank-*")]:
            old.unlink(missing_ok=True)
        if not os.access(folder / FOLDER, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written to: {error.strerror}; choose another folder") from error


def rank_program(settings: ProfileSettings, program: Sequence[str]) -> list[str]:
    """Return a module and its arguments with which a rank runs `program`, a script or ``-m MODULE``, and records it."""
    options = {name: getattr(settings, name) for name in ("folder", "steps", "operators", "title")}
    return ["paceline.profiler", json.dumps(options), *program]


def run_profiled(program: Sequence[str], settings: ProfileSettings, nproc: int) -> int:
    """Run `program` on `nproc` ranks, write and show the results; returns the exit code.

    Raises:
        UsageError: for a mistake in `settings`, or if no step was measured.
    """
    from paceline.launch import job
    from paceline.launch.rank.channels import Logs
    from paceline.tools.top.watch import can_draw, watching

    settings.check()
    command = [sys.executable, "-u", "-m", *rank_program(settings, program)]
    with watching() if settings.watch else nullcontext():
        # Ranks that wrote to the terminal themselves would write into the live view, so their output goes through
        # files.
        logs = Logs(tee="3", prefix="[rank ${rank}] ") if settings.watch and can_draw() else Logs()
        code = job.launch(job.Job(command, nproc, logs=logs))
    show_results(Path(settings.folder), failed=code != 0)
    return code


def show_results(folder: Path, *, failed: bool = False) -> None:
    """Write the results of the records in `folder`, and show them in the terminal.

    Raises:
        UsageError: if there is nothing to show, unless the program `failed`, which said why.
    """
    from paceline.profiler.results import write_results
    from paceline.tools.profile.terminal_summary import print_summary

    try:
        report = write_results(folder)
    except UsageError as error:
        if not failed:
            raise
        print(f"no profile: {error}", file=sys.stderr)
        return
    print_summary(report)
    print(f"{folder / 'report.html'}: open it in a browser; {folder / 'trace.json'}: in https://ui.perfetto.dev")


def compare_profiles(first: str, second: str) -> int:
    """Show two profiles side by side in the terminal, and in ``compare.html`` in the folder of the second one.

    Raises:
        UsageError: if one of them cannot be read.
    """
    from paceline.profiler.page import comparison_page
    from paceline.profiler.report.comparison import compare
    from paceline.profiler.report.report_file import read_report
    from paceline.tools.profile.terminal_summary import print_comparison

    reports = read_report(first), read_report(second)
    comparison = compare(*reports, (first, second))
    print_comparison(comparison)
    page = Path(second) / "compare.html" if Path(second).is_dir() else Path("compare.html")
    write_file("compare", str(page), comparison_page(comparison))
    print(f"{page}: open it in a browser")
    return 0


def _report(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        raise UsageError("paceline profile report takes one folder, which --out named")
    show_results(Path(arguments[0]))
    return 0


TOOLS: dict[str, Callable[[Sequence[str]], int]] = {"report": _report}
"""Functions of words that may stand in the place of a program."""
