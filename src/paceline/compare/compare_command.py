"""``paceline compare``: runs a program in several ways, one after the other, and lays the figures side by side."""

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

from paceline.compare.bars import draw
from paceline.compare.comparison import Row, as_json, compare_weights, figures, table_of
from paceline.compare.modes import MODES, Mode, Run, choose_modes, devices_of, ranks_of
from paceline.errors import UsageError
from paceline.launch.program import ProgramConfig
from paceline.output_files import check_file, write_file
from paceline.output_tables import print_table


@dataclass(frozen=True)
class Target:
    """The program that is compared: a recipe with its configuration, or a script with its arguments."""

    name: str
    config: ProgramConfig | None
    """A recipe's, checked already; None for a script."""
    arguments: Sequence[str] = ()
    """A script's."""

    def expect_script(self) -> None:
        """Refuse a script that is not there.

        Raises:
            UsageError: names the file.
        """
        if self.config is None and not Path(self.name).is_file():
            raise UsageError(f"{self.name!r} is neither a recipe nor a file; name a recipe, or a Python script")

    def arguments_for(self, mode: Mode) -> tuple[str, ...]:
        """Return what the program gets in `mode`: a recipe accumulates batches of the size that it has."""
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

    def check(self, target: Target, nproc: int) -> list[str]:
        """Return the names of the modes.

        Raises:
            UsageError: for what cannot work, before anything runs.
        """
        target.expect_script()
        if self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}")
        if nproc < 2:
            raise UsageError("--nproc 1 leaves nothing to compare; give at least 2")
        if self.plot is not None and not self.plot.endswith(".svg"):
            raise UsageError(f"--plot {self.plot} must end with .svg")
        check_file("--json", self.json)
        check_file("--plot", self.plot)
        return choose_modes(self.modes, is_recipe=target.config is not None)


def compare(target: Target, settings: Comparison, nproc: int) -> int:
    """Run every mode, print the table and write the files; returns the exit code of a mode that failed, or 0.

    Raises:
        UsageError: for a mistake in `settings` or `target`.
    """
    from paceline.launch.job import cores

    names = settings.check(target, nproc)
    threads = max(1, cores() // nproc)
    rows: list[Row] = []
    code = 0
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="paceline-compare-") as folder:
        reference: dict[str, Any] | None = None
        for number, name in enumerate(names):
            record = Path(folder) / f"{name}.json"
            console.print(f"{number + 1}/{len(names)} {name}: {MODES[name].summary} …", highlight=False)
            if code := _run_mode(target, name, settings.steps, nproc, threads, record):
                print(f"mode {name} ended with exit code {code}", file=sys.stderr)
                break
            weights = load_file(f"{record}.safetensors")
            Path(f"{record}.safetensors").unlink()
            same_steps = MODES[name].accumulate == MODES[names[0]].accumulate
            said = compare_weights(reference or weights, weights) if same_steps else "fewer steps"
            if number == 0:
                reference, said = weights, "reference"
            single = next((row for row in rows if row.mode == "single"), None)
            rows.append(figures(name, json.loads(record.read_text("utf-8")), nproc, single, said))
    if not rows:
        return code
    title = Path(target.name).name
    print_table(table_of(rows, title, threads))
    outcome = {"target": title, "threads": threads, "modes": as_json(rows)}
    write_file("--json", settings.json, json.dumps(outcome, indent=2) + "\n")
    write_file("--plot", settings.plot, draw(rows, title))
    return code


def _run_mode(target: Target, name: str, steps: int, nproc: int, threads: int, record: Path) -> int:
    """Run the program in one mode; returns the exit code."""
    from paceline.launch import job

    mode = MODES[name]
    recipe = None if target.config is None else target.name
    run = Run(mode.wrapper, devices_of(name, nproc), steps, str(record), recipe, target.arguments_for(mode))
    command = [sys.executable, "-u", "-m", "paceline.compare", run.to_json()]
    environment = {"OMP_NUM_THREADS": str(threads)}  # a device has as many in every mode
    code = job.launch(job.Job(command, ranks_of(mode, nproc), env=environment))
    if code == 0 and not record.is_file():
        print(f"mode {name} measured nothing: the program ended its process by itself", file=sys.stderr)
        return 1
    return code
