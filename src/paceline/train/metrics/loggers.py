"""Loggers: destinations of metrics on rank 0."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from paceline.core import strict_json
from paceline.core.output.wording import with_article
from paceline.core.processes import consensus
from paceline.errors import MissingExtra, UsageError
from paceline.train.run.run import Run

WANDB_TIMEOUT_S = 20.0
"""Less than wandb's own 90 s, because all other ranks wait for rank 0 meanwhile."""


class Logger(Protocol):
    """A destination of metrics. The Trainer opens it, writes to it and closes it, on rank 0 alone.

    Any object with a method ``write`` will do; the other methods are called if it has them.
    """

    def open(self, run: Run) -> None:
        """Begin, with the run as it was restored; a :class:`UsageError` ends all ranks."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` as of the optimizer step `step`, reduced over all ranks.

        They are ``train/loss`` (the mean since the last call) and ``lr`` every ``log_every`` steps, the evaluation's
        metrics (``eval/loss``, …) after each evaluation, and beside them what callbacks log.
        """

    def close(self) -> None:
        """Finish, also while an exception is propagating."""


class Loggers:
    """All loggers of a run; only rank 0 has any."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._all = loggers
        self._open = ExitStack()

    def open(self, run: Run) -> None:
        """Open all of them, or none. All ranks call it together."""
        here = consensus.here()
        self._all = self._all if here.rank == 0 else ()
        consensus.agree(here, consensus.error_of(self._open_all, run))

    def _open_all(self, run: Run) -> None:
        try:
            for logger in self._all:
                getattr(logger, "open", lambda _: None)(run)
                self._open.callback(getattr(logger, "close", lambda: None))
        except BaseException:
            self.close()
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` as of `step` with every logger."""
        for logger in self._all:
            logger.write(step, values)

    def close(self) -> None:
        """Close those that are open, all of them even if one fails."""
        self._open.close()


def validate_loggers(loggers: Any) -> None:
    """Check that `loggers` is a list of loggers."""
    is_list = isinstance(loggers, list | tuple)
    for logger in loggers if is_list else [loggers]:
        if not is_list or not callable(getattr(logger, "write", None)):
            raise UsageError(
                f"{with_article(type(logger).__qualname__)} is no list of loggers, nor a logger in one; give a list of "
                "objects with a method write(step, values)"
            )


def _imported(module: str, package: str, purpose: str) -> Any:
    """Return the `module` of an optional `package`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(package, package, purpose) from None


class TensorBoard:
    """Writes event files for TensorBoard into `folder`; a resumed run discards the values that it repeats."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)

    def open(self, run: Run) -> None:
        """Open the file; see :meth:`Logger.open`."""
        tensorboard = _imported("torch.utils.tensorboard", "tensorboard", "writing TensorBoard files")
        try:
            # Only where a run is resumed: to purge from step 1 on would hide what other runs wrote into the folder.
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
    """Sends metrics to Weights & Biases, as a new run of `project` unless its own environment variables say other."""

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
        """Record `values`, and `step` beside them."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Finish the run, with the state failed if an exception is propagating."""
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


class MLflow:
    """Sends metrics to MLflow as a new run of `experiment`, which is made if it does not exist.

    MLflow's environment variables (``MLFLOW_TRACKING_URI``, …) apply.
    """

    def __init__(self, experiment: str) -> None:
        self._experiment = experiment

    def open(self, run: Run) -> None:
        """Start the run; see :meth:`Logger.open`."""
        mlflow = _imported("mlflow", "mlflow", "logging to MLflow")
        self._metric = mlflow.entities.Metric
        try:
            # A client of its own, because the module's functions would end or continue a run of the script's.
            self._client = mlflow.MlflowClient()
            found = self._client.get_experiment_by_name(self._experiment)
            number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
            self._run = self._client.create_run(number).info.run_id
            params = [mlflow.entities.Param(name, str(value)) for name, value in run.settings.items()]
            self._client.log_batch(self._run, params=params)
        except (mlflow.MlflowException, OSError) as error:
            raise UsageError(
                f"MLflow cannot start a run in experiment {self._experiment!r}: {' '.join(str(error).split())[:400]}; "
                "set MLFLOW_TRACKING_URI to a server or a database, such as sqlite:///mlflow.db"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values`, in one request."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        """Finish the run, with the state failed if an exception is propagating."""
        self._client.set_terminated(self._run, "FAILED" if sys.exc_info()[0] is not None else "FINISHED")


class JsonLines:
    """Writes a JSON object a line to `file`, with its step. NaN and infinities, which JSON does not know, become null.

    Lines are appended to those of earlier runs. A resumed run drops its own lines of the steps and the evaluation that
    it repeats.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self._path = Path(file)

    def open(self, run: Run) -> None:
        """Open the file; see :meth:`Logger.open`."""
        path = self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            kept = lines[: lines_to_keep(lines, run.step, run.is_evaluation_due)] if run.step else lines
            self._file = path.open("a")
            self._file.truncate(sum(map(len, kept)))  # not rewritten, so that a kill at this point loses nothing
            if kept and not kept[-1].endswith(b"\n"):
                self._file.write("\n")  # another run was killed in the middle of its last line
        except OSError as error:
            raise UsageError(f"metrics cannot be written to {path}: {error.strerror}; choose another file") from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line."""
        self._file.write(strict_json.lenient({"step": step, **values}) + "\n")
        self._file.flush()  # a killed run must not lose its last lines

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def lines_to_keep(lines: Sequence[bytes], step: int, evaluates_first: bool) -> int:
    """Return how many of `lines` stay when a run resumes at `step`: the last run repeats the others.

    If the evaluation at `step` follows, only the training's line of `step` stays, if there is one.
    """
    end, following = len(lines), math.inf
    while end:
        number = _step_of(lines[end - 1])
        if number is not None:
            is_repeated = number > step or (evaluates_first and number == step and b'"eval/' in lines[end - 1])
            if number > following or not is_repeated:  # an earlier run's lines may have higher steps
                break
            following = number
        end -= 1
    return end


def _step_of(line: bytes) -> float | None:
    """Return the step of a line; None for a line that is incomplete because its run was killed."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
