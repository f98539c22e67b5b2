"""``paceline compare``: runs a program in several ways that take turns, and lays the figures side by side."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file

from paceline.core.output.charts import check_chart, write_chart
from paceline.core.output.files import check_file, write_file
from paceline.core.output.messages import Unfailing, say
from paceline.core.output.wording import counted
from paceline.errors import UsageError
from paceline.launch.job import Job
from paceline.launch.pinning import cores
from paceline.tools.compare import report
from paceline.tools.compare.comparison import figures
from paceline.tools.compare.launch_together import launch_together
from paceline.tools.compare.modes import MODES, Run, Way
from paceline.tools.compare.turn_taking import bytes_at_end
from paceline.tools.shared.program import ProgramConfig


@dataclass(frozen=True)
class Comparison:
    """A program, and how it is compared."""

    target: str
    """Name of a recipe, or a script."""
    config: ProgramConfig | None
    """Configuration of a recipe, checked already; None for a script."""
    arguments: Sequence[str]
    """Arguments of a script."""
    steps: int
    json: str | None
    plot: str | None

    def check(self, ways: Sequence[Way]) -> None:
        """Refuse, before anything runs, what cannot work."""
        if self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}")
        config: Any = self.config
        most = max(way.devices for way in ways)
        if config is not None and most > (samples := config.batch_size // config.micro_batches):
            raise UsageError(
                f"--nproc {most} is more than the {samples} samples of a batch; give "
                "fewer ranks, or a larger --batch-size"
            )
        check_file("--json", self.json)
        check_chart("--plot", self.plot)


def compare(comparison: Comparison, ways: Sequence[Way]) -> int:
    """Run all ways, print the table and write the files; returns the exit code of the one that failed first, or 0."""
    comparison.check(ways)
    # A device has as many threads in every way, so that one process has no more cores than one rank.
    threads = max(1, cores() // max(way.devices for way in ways))
    for number, way in enumerate(ways, 1):
        say(f"{number}/{len(ways)} {way.mode} on {counted(way.devices, 'device')}: {MODES[way.mode]}")
    with tempfile.TemporaryDirectory(prefix="paceline-compare-") as name:
        folder = Path(name)
        if code := _run_ways(comparison, ways, threads, folder):
            return code
        records = [json.loads((folder / f"{way.name}.json").read_text("utf-8")) for way in ways]
        rows = figures(ways, records, [load_file(folder / f"{way.name}.json.safetensors") for way in ways])
    title = Path(comparison.target).name
    report.show(rows, title, threads, comparison.steps)
    write_file("--json", comparison.json, json.dumps(report.document(rows, title, threads), indent=2) + "\n")
    if comparison.plot is not None:
        write_chart("--plot", comparison.plot, report.draw(rows, title))
    return 0


def _run_ways(comparison: Comparison, ways: Sequence[Way], threads: int, folder: Path) -> int:
    """Run the program in ways that take turns; returns the exit code of the first to fail, or 0."""
    turns = folder / "turns"
    # The ways find out by its length whose turn it is.
    turns.write_bytes(b"")
    ranks = sum(way.ranks for way in ways)
    own = comparison.arguments if comparison.config is None else [comparison.config.to_json()]
    jobs = {}
    before = 0
    for way in ways:
        run = Run(
            way.mode,
            way.devices,
            comparison.steps,
            record=str(folder / f"{way.name}.json"),
            is_recipe=comparison.config is not None,
            arguments=[comparison.target, *own],
            turns=(str(turns), before, ranks),
        )
        command = [sys.executable, "-u", "-m", "paceline.tools", "compare.measured_run", run.to_json()]
        jobs[way.name] = Job(command, way.ranks, env={"OMP_NUM_THREADS": str(threads)})
        before += way.ranks
    with _progress(bytes_at_end(ranks, comparison.steps)) as bar:
        code, failed = launch_together(
            jobs, lambda name: (folder / f"{name}.json").is_file(), lambda: bar(turns.stat().st_size)
        )
    if failed:
        [way] = [way for way in ways if way.name == failed]
        others = ",".join(dict.fromkeys(other.mode for other in ways if other.mode != way.mode))
        remedy = f"; to compare the others, give --modes {others}" if others else ""
        say(f"mode {way.mode} on {counted(way.devices, 'device')} ended with exit code {code}{remedy}")
    return code


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Show a bar on stderr if that is a terminal, and remove it afterwards; yields a function that moves it."""
    console = Console(file=cast(TextIO, Unfailing()))
    columns = (TextColumn("measuring"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda length: bar.update(task, completed=length)
