"""``paceline profile``: run a program on N ranks, record their steps and show the results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.core.output.messages import say
from paceline.errors import UsageError
from paceline.profiler.records.rank_file import FOLDER, make_folder
from paceline.profiler.records.steps import MOST
from paceline.profiler.results import RESULTS


@dataclass(frozen=True)
class ProfileSettings:
    """The settings of a profile."""

    folder: str
    """Folder of the results."""
    steps: int | None = None
    """Number of steps to measure before ending the program; None to measure until it ends."""
    title: str = ""
    """Title of the program; empty to use its command line."""
    noise_scale: bool = False
    """Whether to measure the gradient noise scale."""

    def check(self) -> None:
        """Reject invalid options before anything runs."""
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}")
        if self.steps is not None and self.steps > MOST:
            raise UsageError(f"--steps must be at most {MOST}, not {self.steps}; leave it out to let the program end")
        prepare(Path(self.folder))


def prepare(folder: Path) -> None:
    """Create `folder`, or remove the results of an earlier profile from it."""
    try:
        is_profile = any((folder / FOLDER).glob("rank-*.jsonl"))
        if not is_profile and (others := [name for name in RESULTS if (folder / name).exists()]):
            raise UsageError(
                f"--out {folder} has a {others[0]} that a profile did not write and would delete; choose another folder"
            )
        make_folder(folder)
        # Otherwise, if the new profile failed, the old files would look like its results.
        for old in [*(folder / name for name in RESULTS), *(folder / FOLDER).glob("rank-*")]:
            old.unlink(missing_ok=True)
        # In an existing empty folder, the calls above do not reveal that it is read-only.
        if not os.access(folder / FOLDER, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise UsageError(f"cannot write to --out {folder}: {error.strerror}; choose another folder") from error


def rank_program(settings: ProfileSettings, program: Sequence[str]) -> list[str]:
    """Return the module and arguments that run and record `program` (a script or ``-m MODULE``) on a rank."""
    return ["paceline.profiler", json.dumps(asdict(settings)), *program]


def run_profiled(program: Sequence[str], settings: ProfileSettings, nproc: int, env: Mapping[str, str]) -> int:
    """Run and record `program` on `nproc` ranks, show the results, and return the exit code."""
    from paceline.launch.agent import launch
    from paceline.launch.job import Job
    from paceline.launch.rank.hook.run_module import module_command

    code = launch(Job(module_command(*rank_program(settings, program)), nproc, env=env))
    show_results(Path(settings.folder), code)
    return code


def show_results(folder: Path, code: int = 0) -> None:
    """Write the results of the records in `folder` and print a summary.

    Missing records are an error only if the program's exit `code` is 0, because a failed program has already printed
    its error.
    """
    from paceline.profiler.results import write_results
    from paceline.tools.profile.terminal_summary import print_summary

    try:
        report = write_results(folder)
    except UsageError as error:
        if not code:
            raise
        say(f"no profile: {error}")
        return
    print_summary(report)
    print(f"{folder / 'report.html'}: open it in a browser; {folder / 'trace.json'}: in https://ui.perfetto.dev")


def report_again(arguments: Sequence[str]) -> int:
    """Write the results in a folder again: ``paceline profile report FOLDER``."""
    if len(arguments) != 1:
        raise UsageError("paceline profile report takes one folder; give the --out folder of a profile")
    show_results(Path(arguments[0]))
    return 0
