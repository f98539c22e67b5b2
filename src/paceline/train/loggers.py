"""Loggers: destinations of metrics on rank 0, including the progress display."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.core import consensus, strict_json
from paceline.core.messages import with_article
from paceline.errors import MissingExtra, UsageError
from paceline.train.run import Run

WANDB_TIMEOUT_S = 20.0
"""Shorter than wandb's default of 90 s, because all other ranks wait for rank 0."""


class Logger(Protocol):
    """A destination of metrics, used on rank 0 only. Only the method ``write`` is required."""

    def open(self, run: Run) -> None:
        """Called before the first line, with the restored run. A :class:`UsageError` ends the training on all ranks."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` of the optimizer step `step`, reduced over all ranks.

        The values are ``train/loss`` (the mean since the last line) and ``lr`` every ``log_every`` steps, ``eval/…``
        after an evaluation, and the values that callbacks log.
        """

    def close(self) -> None:
        """Called at the end, even if an exception is propagating."""


class TensorBoard:
    """Writes event files for TensorBoard into `folder`; a resumed run replaces the values that it repeats."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)

    def open(self, run: Run) -> None:
        """Open the file; see :meth:`Logger.open`."""
        tensorboard = _imported("torch.utils.tensorboard", "tensorboard", "writing TensorBoard files")
        try:
            # Only for a resumed run, because a purge from step 1 would hide other runs in the folder.
            self._board = tensorboard.SummaryWriter(self._folder, purge_step=run.step + 1 if run.step else None)
        except OSError as error:
            raise UsageError(
                f"TensorBoard files cannot be written to {self._folder}: {error.strerror}; choose another folder"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record a scalar for each of `values`."""
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the file."""
        self._board.close()


class WeightsAndBiases:
    """Sends metrics to a new run of a Weights & Biases `project`; wandb's environment variables take precedence."""

    def __init__(self, project: str) -> None:
        self._project = project

    def open(self, run: Run) -> None:
        """Start the run; see :meth:`Logger.open`."""
        wandb = _imported("wandb", "wandb", "logging to Weights & Biases")
        limit = wandb.Settings(init_timeout=WANDB_TIMEOUT_S, silent=True)
        try:
            self._run = wandb.init(project=self._project, config=dict(run.settings), settings=limit)
        except (wandb.Error, OSError) as error:
            raise UsageError(
                f"Weights & Biases cannot start a run in project {self._project!r}: {' '.join(str(error).split())}; "
                "run wandb login, or set WANDB_MODE=offline"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` together with `step`."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Finish the run, and mark it as failed if an exception is propagating."""
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


class JsonLines:
    """Writes each step's metrics to `file` as one JSON object per line. NaN and infinities become null.

    A new run appends to the lines of earlier runs. A resumed run first drops the lines of the steps and the evaluation
    that it repeats.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self._path = Path(file)

    def open(self, run: Run) -> None:
        """Open the file; see :meth:`Logger.open`."""
        path = self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            kept_lines = lines[: lines_to_keep(lines, run.step, run.is_evaluation_due)] if run.step else lines
            self._file = path.open("a")
            # Truncate instead of rewriting the file, so that no line is lost if the run is killed.
            self._file.truncate(sum(map(len, kept_lines)))
            if kept_lines and not kept_lines[-1].endswith(b"\n"):
                self._file.write("\n")  # an earlier run was killed while it wrote this line
        except OSError as error:
            raise UsageError(f"metrics cannot be written to {path}: {error.strerror}; choose another file") from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line."""
        self._file.write(strict_json.lenient({"step": step, **values}) + "\n")
        self._file.flush()  # no line may be lost if the run is killed

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def lines_to_keep(lines: Sequence[bytes], step: int, evaluates_first: bool) -> int:
    """Return how many `lines` to keep if a run resumes at `step`; the run writes the remaining lines again.

    A run that starts with the evaluation of `step` also writes that evaluation's line again.
    """
    end, following = len(lines), math.inf
    while end:
        number = _step_of(lines[end - 1])
        if number is not None:
            is_repeated = number > step or (evaluates_first and number == step and b'"eval/' in lines[end - 1])
            if number > following or not is_repeated:  # lines of an earlier run may have higher steps
                break
            following = number
        end -= 1
    return end


def _step_of(line: bytes) -> float | None:
    """Return the step of a line; None for an incomplete line left by a killed run."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def _imported(module: str, package: str, purpose: str) -> Any:
    """Import and return the `module` of an optional `package`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(package, package, purpose) from None


class Loggers:
    """The loggers of a run. Ranks other than 0 have none."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._all = loggers
        self._open = ExitStack()

    def open(self, run: Run) -> None:
        """Open all loggers, or none. Collective."""
        world = consensus.here()
        if world.rank != 0:
            self._all = ()
        consensus.agree(world, consensus.error_of(self._open_all, run))

    def _open_all(self, run: Run) -> None:
        try:
            for logger in self._all:
                getattr(logger, "open", lambda _: None)(run)
                self._open.callback(getattr(logger, "close", lambda: None))
        except BaseException:
            self.close()
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` of `step` to every logger."""
        for logger in self._all:
            logger.write(step, values)

    def close(self) -> None:
        """Close all open loggers, even if one of them fails."""
        self._open.close()


def validate_loggers(loggers: Any) -> None:
    """Check that `loggers` is a list of loggers."""
    is_list = isinstance(loggers, list | tuple)
    for logger in loggers if is_list else [loggers]:
        if not is_list or not callable(getattr(logger, "write", None)):
            raise UsageError(
                f"loggers has {with_article(type(logger).__qualname__)}; give a list of objects with a method "
                "write(step, values)"
            )


class ProgressDisplay:
    """Rank 0's progress bar on a terminal, otherwise a line per epoch; disabled unless `on`."""

    def __init__(self, total_steps: int | None, step: int, *, on: bool) -> None:
        console = Console(file=sys.stdout)
        self._on, self._bar = on, None
        if on and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("training", total=total_steps, completed=step)

    def advance(self, epoch: int) -> None:
        """Advance by one step."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=f"epoch {epoch + 1}")

    def epoch_ended(self, epoch: int, epochs: int | None, values: Mapping[str, float]) -> None:
        """Show the results of an epoch."""
        self._show(f"epoch {epoch + 1}" if epochs is None else f"epoch {epoch + 1}/{epochs}", values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Show the results of an evaluation after `step`."""
        self._show(f"step {step}", values)

    def _show(self, label: str, values: Mapping[str, float]) -> None:
        if not self._on:
            return
        line = f"{label}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
