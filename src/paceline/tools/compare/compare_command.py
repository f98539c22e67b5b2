"""``paceline compare``: runs a program in several ways that take turns, and lays the figures side by side."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.output.charts import check_chart, write_chart
from paceline.core.output.files import check_file, write_file
from paceline.errors import UsageError
from paceline.launch.program import ProgramConfig, validate_script
from paceline.tools.compare.comparison import Row, compare_weights, figures
from paceline.tools.compare.modes import MODES, Mode, Run, choose_modes, devices_of, ranks_of
from paceline.tools.compare.report import document, draw, show
from paceline.tools.compare.turn_taking import Place


@dataclass(frozen=True)
class Target:
    """The program that is compared: a recipe with its configuration, or a script with its arguments."""

    name: str
    config: ProgramConfig | None
    """Configuration of a recipe, checked already; None for a script."""
    arguments: Sequence[str] = ()
    """Arguments of a script."""
    recipes: Sequence[str] = ()
    """Names of all recipes, for «did you mean»."""

    def arguments_for(self, mode: Mode) -> tuple[str, ...]:
        """Return the program's arguments in `mode`; a recipe's batches keep their size where they are accumulated."""
        if self.config is None:
            return self.name, *self.arguments
        if mode.accumulate == 1:
            return (self.config.to_json(),)
        config: Any = self.config
        more = {"accumulate": mode.accumulate * config.accumulate, "batch_size": mode.accumulate * config.batch_size}
        return (replace(config, **more).to_json(),)


@dataclass(frozen=True)
class Comparison:
    """The settings of a comparison."""

    modes: str | None
    steps: int
    json: str | None
    plot: str | None
    one_by_one: bool = False
    """Whether each mode ends before the next one starts."""

    def check(self, target: Target, nproc: int) -> list[str]:
        """Return the names of the modes.

        Raises:
            UsageError: for settings that cannot work, before anything runs.
        """
        if target.config is None:
            validate_script(target.name, target.recipes)
        if self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}")
        if nproc < 2:
            raise UsageError("--nproc 1 leaves nothing to compare; give at least 2")
        check_file("--json", self.json)
        check_chart("--plot", self.plot)
        return choose_modes(self.modes, is_recipe=target.config is not None)


def compare(target: Target, settings: Comparison, nproc: int) -> int:
    """Run all modes, print the table and write the files; returns the exit code of the mode that failed first, or 0.

    Raises:
        UsageError: for a mistake in `settings` or `target`.
    """
    from paceline.launch.pinning import cores

    names = settings.check(target, nproc)
    threads = max(1, cores() // nproc)
    records: list[dict[str, Any]] = []
    weights: list[dict[str, Tensor]] = []
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="paceline-compare-") as folder:
        for together in [[name] for name in names] if settings.one_by_one else [names]:
            for name in together:
                console.print(f"{names.index(name) + 1}/{len(names)} {name}: {MODES[name].summary}", highlight=False)
            if code := _run_modes(target, together, settings.steps, nproc, threads, Path(folder)):
                return code
            for name in together:
                records.append(json.loads((Path(folder) / f"{name}.json").read_text("utf-8")))
                weights.append(load_file(Path(folder) / f"{name}.json.safetensors"))
    rows = _rows(names, records, weights, nproc)
    title = Path(target.name).name
    show(rows, title, threads)
    write_file("--json", settings.json, json.dumps(document(rows, title, threads), indent=2) + "\n")
    if settings.plot is not None:
        write_chart("--plot", settings.plot, draw(rows, title))
    return 0


def _rows(names: list[str], records: list[dict[str, Any]], weights: list[dict[str, Tensor]], nproc: int) -> list[Row]:
    """Return the rows of all modes; weights are compared with those of the first one."""
    rows: dict[str, Row] = {}
    # The mode "single" first, because times of the others are relative to it.
    for name in sorted(names, key=lambda name: name != "single"):
        verdict, index = "reference", names.index(name)
        if index > 0:
            same_steps = MODES[name].accumulate == MODES[names[0]].accumulate
            verdict = compare_weights(weights[0], weights[index]) if same_steps else "fewer steps"
        rows[name] = figures(name, records[index], nproc, next(iter(rows.values()), None), verdict)
    return [rows[name] for name in names]


def _run_modes(target: Target, names: list[str], steps: int, nproc: int, threads: int, folder: Path) -> int:
    """Run the program in several modes that take turns; returns the exit code of the first to fail, or 0."""
    from paceline.launch.job import Job
    from paceline.tools.compare.launch_together import launch_together

    turns = folder / "turns"
    # The modes find out by its length whose turn it is.
    turns.write_bytes(b"")
    counts = [ranks_of(MODES[name], nproc) for name in names]
    recipe = None if target.config is None else target.name
    jobs = {}
    for number, name in enumerate(names):
        mode = MODES[name]
        place = Place(str(turns), sum(counts[:number]), sum(counts))
        record, arguments = str(folder / f"{name}.json"), target.arguments_for(mode)
        run = Run(mode.wrapper, devices_of(name, nproc), steps, record, recipe, arguments, place)
        command = [sys.executable, "-u", "-m", "paceline.tools", "compare.measured_run", run.to_json()]
        # A device has as many threads in every mode, so that one process has no more cores than one rank.
        jobs[name] = Job(command, counts[number], env={"OMP_NUM_THREADS": str(threads)})
    code, failed = launch_together(jobs, lambda name: (folder / f"{name}.json").is_file())
    if failed:
        others = ",".join(name for name in names if name != failed)
        remedy = f"; to compare the others, give --modes {others}" if others else ""
        if others and code == 1:
            remedy += "; if memory ran out, give --one-by-one"
        print(f"mode {failed} ended with exit code {code}{remedy}", file=sys.stderr)
    return code
