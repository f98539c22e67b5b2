"""``paceline profile``: run a program on N ranks, record their steps and show the results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.core.messages import say
from paceline.core.tables import print_table
from paceline.errors import UsageError
from paceline.planner.critical_batch import verdict
from paceline.profiler import step_parts
from paceline.profiler.advice import Advice
from paceline.profiler.analyze import Report
from paceline.profiler.facts import Facts, kind_name, ms, percent, sentence
from paceline.profiler.profiling import RESULTS, write_results
from paceline.profiler.rank_file import FOLDER, make_folder
from paceline.profiler.steps import MOST

MOST_RANKS = 5
"""Maximum number of ranks in the table. For larger jobs, it has only the most notable ranks and the mean."""
MOST_ADVICE = 3


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


def run_profiled(program: Sequence[str], settings: ProfileSettings, nproc: int, env: Mapping[str, str]) -> int:
    """Run and record `program` on `nproc` ranks, show the results, and return the exit code."""
    from paceline.launch.agent import launch
    from paceline.launch.hook.run_module import module_command
    from paceline.launch.job import Job

    code = launch(Job(module_command(*rank_program(settings, program)), nproc, env=env))
    show_results(Path(settings.folder), code)
    return code


def rank_program(settings: ProfileSettings, program: Sequence[str]) -> list[str]:
    """Return the module and arguments that run and record `program` (a script or ``-m MODULE``) on a rank."""
    return ["paceline.profiler", json.dumps(asdict(settings)), *program]


def show_results(folder: Path, code: int = 0) -> None:
    """Write the results of the records in `folder` and print a summary.

    Missing records are an error only if the program's exit `code` is 0, because a failed program has already printed
    its error.
    """
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


def print_summary(report: Report) -> None:
    """Print the headline, the parts of a step, the best advice, the critical batch size and what is missing."""
    console = Console()
    _print(console, Text(report.headline, style="bold"))
    print_table(parts_table(report.facts, between="\n" if console.is_terminal else "  "))
    if report.facts.outer_note:
        _print(console, Text(report.facts.outer_note))
    for number, advice in enumerate(report.advice[:MOST_ADVICE], start=1):
        _print(console, advice_line(number, advice))
    if len(report.advice) > MOST_ADVICE:
        _print(console, Text(f"{len(report.advice) - MOST_ADVICE} more in the report", style="dim"))
    if (scale := report.facts.noise_scale) is not None:
        _print(console, Text(verdict(scale.batch, scale.value)))
    for unseen in report.missing:
        _print(console, Text(f"not seen: {unseen}", style="dim"))


def parts_table(facts: Facts, between: str = "  ") -> Table:
    """Return a table of the parts of an average step on each rank; `between` separates a time from its share."""
    slow = {straggler.rank for straggler in facts.stragglers}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("a step")
    shown = facts.accounts.notable_ranks(MOST_RANKS)
    columns = [facts.rank_parts[rank] for rank in shown]
    for rank in shown:
        heading = Text(f"rank {rank}\nslow", style="bold red") if rank in slow else Text(f"rank {rank}")
        table.add_column(heading, justify="right", min_width=7)
    if len(shown) > 1:
        table.add_column(Text(f"mean\nof {len(facts.records)}"), justify="right", min_width=7)
        columns.append(facts.mean_parts)
    table.add_row("length", *(ms(sum(row.values())) if row else "no steps" for row in columns), end_section=True)
    for part, seconds in facts.mean_parts.items():
        if seconds > 0:
            cells = [_cell(row, part, between, with_shares=facts.is_firm) for row in columns]
            table.add_row(step_parts.NAMES[part], *cells)
    return table


def _cell(row: Mapping[str, float] | None, part: str, between: str, *, with_shares: bool) -> str | Text:
    if row is None:
        return "–"
    if not with_shares:
        return ms(row[part])
    return Text(f"{ms(row[part])}{between}").append(f"{percent(row[part] / (sum(row.values()) or 1.0)):>5}", "dim")


def advice_line(number: int, advice: Advice) -> Text:
    """Return one piece of advice with its reason and predicted gain."""
    line = Text(f"{number}. {kind_name(advice.kind)}", style="bold")
    if advice.gain > 0:
        line.append(f" (saves {percent(advice.gain)}, predicted)", "not bold green")
    return line.append(f": {sentence(advice.text)} ", "not bold").append(sentence(advice.reason), "not bold dim")


def _print(console: Console, text: Text) -> None:
    # Records are untrusted, so keep control characters and megabytes of text out of the terminal.
    text.plain = "".join(letter if letter.isprintable() else "�" for letter in text.plain[:2000])
    # rich assumes an arbitrary width for a pipe, so do not wrap lines in one.
    console.print(text, soft_wrap=not console.is_terminal, highlight=False)
