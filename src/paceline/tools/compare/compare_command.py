"""``paceline compare``: runs a program in several ways that take turns, and lays the figures side by side."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.output.charts import check_chart, write_chart
from paceline.core.output.files import check_file, write_file
from paceline.core.output.messages import Unfailing, say
from paceline.core.output.wording import counted
from paceline.errors import UsageError
from paceline.launch.program import ProgramConfig, validate_script
from paceline.tools.compare import report, scaling
from paceline.tools.compare.comparison import Row, compare_weights, figures, weights_difference
from paceline.tools.compare.modes import MODES, Mode, Run, Way, choose_modes, devices_of, ranks_of, scaling_ways
from paceline.tools.compare.turn_taking import Place
from paceline.tools.compare.turns_progress import showing_turns


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
        more = {
            "micro_batches": mode.accumulate * config.micro_batches,
            "batch_size": mode.accumulate * config.batch_size,
        }
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

    def check(self, target: Target, counts: Sequence[int]) -> list[Way]:
        """Return the ways to compare: modes on one number of devices, or several numbers of ranks."""
        if target.config is None:
            validate_script(target.name, target.recipes)
        if self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}")
        if list(counts) == [1]:
            raise UsageError("--nproc 1 leaves nothing to compare; give at least 2")
        config: Any = target.config
        if config is not None and max(counts) > (samples := config.batch_size // config.micro_batches):
            raise UsageError(
                f"--nproc {max(counts)} is more than the {samples} samples of a batch; give "
                "fewer ranks, or a larger --batch-size"
            )
        check_file("--json", self.json)
        check_chart("--plot", self.plot)
        is_recipe = config is not None
        if len(counts) == 1:
            return [Way(name, counts[0]) for name in choose_modes(self.modes, is_recipe=is_recipe)]
        if self.modes is not None:
            raise UsageError("--modes is for one --nproc; several numbers of ranks are compared with one process")
        return scaling_ways(counts, is_recipe=is_recipe)


def compare(target: Target, settings: Comparison, counts: Sequence[int]) -> int:
    """Run all ways, print the tables and write the files; returns the exit code of the one that failed first, or 0.

    With several `counts`, numbers of ranks are compared; with one, modes.
    """
    from paceline.launch.pinning import cores

    ways = settings.check(target, counts)
    threads = max(1, cores() // max(counts))
    records: list[dict[str, Any]] = []
    weights: list[dict[str, Tensor]] = []
    console = Console(file=cast(TextIO, Unfailing()))
    with tempfile.TemporaryDirectory(prefix="paceline-compare-") as folder:
        for together in [[way] for way in ways] if settings.one_by_one else [ways]:
            for way in together:
                summary = MODES[way.mode].summary if len(counts) == 1 else counted(way.devices, "rank")
                console.print(f"{ways.index(way) + 1}/{len(ways)} {way.mode}: {summary}", highlight=False)
            if code := _run_ways(target, together, settings.steps, threads, Path(folder)):
                return code
            for way in together:
                records.append(json.loads((Path(folder) / f"{way.name}.json").read_text("utf-8")))
                weights.append(load_file(Path(folder) / f"{way.name}.json.safetensors"))
    rows = _rows(ways, records, weights)
    title = Path(target.name).name
    if len(counts) > 1:
        points = _points(ways, rows, weights)
        scaling.show(points, title, threads, settings.steps)
        values, chart = scaling.document(points, title, threads), partial(scaling.draw, points, title)
    else:
        report.show(rows, title, threads)
        values, chart = report.document(rows, title, threads), partial(report.draw, rows, title)
    write_file("--json", settings.json, json.dumps(values, indent=2) + "\n")
    if settings.plot is not None:
        write_chart("--plot", settings.plot, chart())
    return 0


def _rows(ways: Sequence[Way], records: Sequence[dict[str, Any]], weights: Sequence[dict[str, Tensor]]) -> list[Row]:
    """Return the rows of all ways; weights are compared with those of the first one."""
    rows: dict[Way, Row] = {}
    # The mode "single" first, because times of the others are relative to it.
    for way in sorted(ways, key=lambda way: way.mode != "single"):
        verdict, index = "reference", ways.index(way)
        if index > 0:
            same_steps = MODES[way.mode].accumulate == MODES[ways[0].mode].accumulate
            verdict = compare_weights(weights[0], weights[index]) if same_steps else "fewer steps"
        rows[way] = figures(way.mode, records[index], way.devices, next(iter(rows.values()), None), verdict)
    return [rows[way] for way in ways]


def _points(ways: Sequence[Way], rows: Sequence[Row], weights: Sequence[dict[str, Tensor]]) -> list[scaling.Point]:
    """Return the figures of each number of ranks, of which the first is 1."""
    accumulated = {way.devices: row for way, row in zip(ways, rows, strict=True) if MODES[way.mode].accumulate > 1}
    points = []
    for way, row, own in zip(ways, rows, weights, strict=True):
        if MODES[way.mode].accumulate == 1:
            is_comparable = way.devices > 1 and own.keys() == weights[0].keys()
            difference, largest = weights_difference(weights[0], own) if is_comparable else (None, None)
            share = None if difference is None else difference / (largest or 1.0)
            points.append(scaling.Point(row, accumulated.get(way.devices), share))
    return points


def _run_ways(target: Target, ways: Sequence[Way], steps: int, threads: int, folder: Path) -> int:
    """Run the program in several ways that take turns; returns the exit code of the first to fail, or 0."""
    from paceline.launch.job import Job
    from paceline.tools.compare.launch_together import launch_together

    turns = folder / "turns"
    # The ways find out by its length whose turn it is.
    turns.write_bytes(b"")
    counts = [ranks_of(MODES[way.mode], way.devices) for way in ways]
    recipe = None if target.config is None else target.name
    jobs = {}
    for number, way in enumerate(ways):
        mode = MODES[way.mode]
        place = Place(str(turns), sum(counts[:number]), sum(counts))
        record, arguments = str(folder / f"{way.name}.json"), target.arguments_for(mode)
        run = Run(mode.wrapper, devices_of(way.mode, way.devices), steps, record, recipe, arguments, place)
        command = [sys.executable, "-u", "-m", "paceline.tools", "compare.measured_run", run.to_json()]
        # A device has as many threads in every way, so that one process has no more cores than one rank.
        jobs[way.name] = Job(command, counts[number], env={"OMP_NUM_THREADS": str(threads)})
    with showing_turns(turns, sum(counts), steps):
        code, failed = launch_together(jobs, lambda name: (folder / f"{name}.json").is_file())
    if failed:
        way = next(way for way in ways if way.name == failed)
        others = ",".join(way.mode for way in ways if way.name != failed)
        is_scaling = len({way.devices for way in ways}) > 1
        who = f"{way.mode} on {way.devices} ranks" if is_scaling else way.mode
        remedy = f"; to compare the others, give --modes {others}" if others and not is_scaling else ""
        if others and code == 1:
            remedy += "; if memory ran out, give --one-by-one"
        say(f"mode {who} ended with exit code {code}{remedy}")
    return code
