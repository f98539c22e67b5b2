"""``paceline compare``: runs variants of a program in turns, and prints their results side by side."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from paceline.core.option_rules import whole_number
from paceline.core.output.charts import check_chart, write_chart
from paceline.core.output.files import check_file, write_file
from paceline.core.output.messages import say
from paceline.core.output.wording import counted
from paceline.errors import UsageError
from paceline.launch.host_limits import cores
from paceline.launch.job import Job
from paceline.launch.rank.hook.run_module import module_command
from paceline.tools.compare import report
from paceline.tools.compare.comparison import figures
from paceline.tools.compare.launch_together import launch_together
from paceline.tools.compare.modes import MODES, Run, Way


@dataclass(frozen=True)
class Comparison:
    """Settings of a comparison."""

    target: str
    """Name of a recipe, or path of a script."""
    config: Any
    """Validated configuration of a recipe, a ``ProgramConfig``; None for a script."""
    arguments: Sequence[str]
    """Arguments of a script."""
    steps: int
    json: str | None
    plot: str | None

    def check(self, ways: Sequence[Way]) -> None:
        """Reject invalid settings before anything runs."""
        whole_number("--steps", self.steps)
        devices = max(way.devices for way in ways)
        if self.config is not None and devices > (samples := self.config.batch_size // self.config.micro_batches):
            raise UsageError(
                f"--nproc {devices} is more than the {samples} samples of a batch; give fewer ranks or a larger "
                "--batch-size"
            )
        check_file("--json", self.json)
        check_chart("--plot", self.plot)


def compare(comparison: Comparison, ways: Sequence[Way]) -> int:
    """Run all variants, print the table and write the files. Return the exit code of the first failed variant, or 0."""
    comparison.check(ways)
    # All variants use the same number of threads per device, so that a single process has as many cores as a rank.
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
    """Run the variants in turns. Return the exit code of the first failed variant, or 0."""
    turns = folder / "turns"
    turns.write_bytes(b"")
    ranks = sum(way.ranks for way in ways)
    program = [comparison.target, *comparison.arguments]
    if comparison.config is not None:
        program = ["-m", "paceline.tools", f"recipes.{comparison.target}", comparison.config.to_json()]
    jobs = {}
    offset = 0
    for way in ways:
        run = Run(
            way.mode,
            way.devices,
            comparison.steps,
            record=str(folder / f"{way.name}.json"),
            program=program,
            turns=(str(turns), offset, ranks),
        )
        command = module_command("paceline.tools", "compare.measured_run", run.to_json())
        jobs[way.name] = Job(command, way.ranks, env={"OMP_NUM_THREADS": str(threads)})
        offset += way.ranks
    code, failed = launch_together(jobs, lambda name: (folder / f"{name}.json").is_file())
    if failed:
        [way] = [way for way in ways if way.name == failed]
        others = ",".join(dict.fromkeys(other.mode for other in ways if other.mode != way.mode))
        remedy = f"; to compare the others, give --modes {others}" if others else ""
        say(f"mode {way.mode} on {counted(way.devices, 'device')} ended with exit code {code}{remedy}")
    return code
