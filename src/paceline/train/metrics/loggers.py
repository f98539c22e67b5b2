"""Destinations of metrics on rank 0: JSON Lines, TensorBoard, Weights & Biases, MLflow, and the user's own loggers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO

from paceline.core import strict_json
from paceline.core.processes import consensus
from paceline.errors import MissingExtra, UsageError
from paceline.train.config import TrainConfig


class MetricsLogger(Protocol):
    """A destination of metrics, which the Trainer writes to on rank 0 and does not close.

    ``write`` gets the optimizer step and values by name, reduced over all ranks: ``train/loss`` (the mean since the
    last call) and ``lr`` every ``log_every`` steps, the evaluation's metrics after each evaluation, and beside them
    what callbacks log.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` as of `step`."""


class Loggers:
    """All loggers of a run; only rank 0 has any.

    Args:
        given: the user's own loggers.
        opened: the config's loggers, which this object closes.
    """

    def __init__(self, given: Sequence[MetricsLogger] = (), opened: Sequence[Any] = ()) -> None:
        self._all: list[MetricsLogger] = [*opened, *given]
        self._opened = opened

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` as of `step` with every logger."""
        for logger in self._all:
            logger.write(step, values)

    def close(self) -> None:
        """Finish the files, and the run of Weights & Biases."""
        with ExitStack() as stack:  # close all of them, even if one fails
            for logger in self._opened:
                stack.callback(logger.close)


def open_loggers(
    config: TrainConfig, given: Sequence[MetricsLogger], step: int, evaluates_first: bool = False
) -> Loggers:
    """Open the loggers that `config` names, and add the `given` ones. All ranks call it together.

    Args:
        config: names the destinations.
        given: the user's own loggers.
        step: the step that the run begins at.
        evaluates_first: whether the run begins with the evaluation that was due at `step`; see :class:`JsonLines`.

    Raises:
        UsageError: on every rank, if rank 0 cannot open one.
    """
    failure, loggers = None, Loggers()
    here = consensus.here()
    if here.rank == 0:
        try:
            loggers = Loggers(given, _opened(config, step, evaluates_first))
        except UsageError as error:
            failure = error
    consensus.agree(here, failure)
    return loggers


def _opened(config: TrainConfig, step: int, evaluates_first: bool) -> list[Any]:
    """Open the config's destinations; on an error leave no destination open. Optional packages come before files."""
    opened: list[Any] = []
    try:
        if config.tensorboard_dir is not None:
            opened.append(TensorBoard(config.tensorboard_dir, step))
        if config.wandb_project is not None:
            opened.append(WeightsAndBiases(config.wandb_project, asdict(config)))
        if config.mlflow_experiment is not None:
            opened.append(MLflow(config.mlflow_experiment, asdict(config)))
        if config.metrics_file is not None:
            opened.append(JsonLines(config.metrics_file, step, evaluates_first))
    except BaseException:
        Loggers(opened=opened).close()
        raise
    return opened


class TensorBoard:
    """Writes event files for TensorBoard; a resumed run discards the values written after `step`.

    Raises:
        UsageError: if the folder cannot be written to.
        MissingExtra: if TensorBoard is not installed.
    """

    def __init__(self, folder: str, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra("tensorboard", "tensorboard", "writing TensorBoard files") from None
        try:
            # Only where a run is resumed: to purge from step 1 on would hide what other runs wrote into the folder.
            self._board = SummaryWriter(folder, purge_step=step + 1 if step else None)
        except OSError as error:
            raise UsageError(
                f"TensorBoard files cannot be written to {folder}: {error.strerror}; choose another folder"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record a scalar for each of `values`."""
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the file."""
        self._board.close()


class WeightsAndBiases:
    """Sends metrics to Weights & Biases as a new run; its environment variables (WANDB_MODE, …) apply.

    The steps are a separate metric, ``step``, because W&B drops values for steps before its latest one, which a
    resumed run may repeat.

    Raises:
        UsageError: if W&B cannot start a run.
        MissingExtra: if it is not installed.
    """

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtra("wandb", "wandb", "logging to Weights & Biases") from None
        try:
            limit = wandb.Settings(init_timeout=WANDB_TIMEOUT_S, silent=True)
            self._run = wandb.init(project=project, config=dict(settings), settings=limit)
        except (wandb.Error, OSError) as error:
            raise UsageError(
                f"Weights & Biases cannot start a run in project {project!r}: {' '.join(str(error).split())}; "
                "run wandb login, or set WANDB_MODE=offline"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values`, and `step` beside them."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Finish the run, with the state failed if an exception is propagating."""
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


# Less than wandb's own 90 s, because all other ranks wait for rank 0 meanwhile.
WANDB_TIMEOUT_S = 20.0


class MLflow:
    """Sends metrics to MLflow as a new run of an experiment, which is made if it does not exist.

    MLflow's environment variables (``MLFLOW_TRACKING_URI``, …) apply.

    Raises:
        UsageError: if MLflow cannot start a run.
        MissingExtra: if it is not installed.
    """

    def __init__(self, experiment: str, settings: Mapping[str, Any]) -> None:
        try:
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise MissingExtra("mlflow", "mlflow", "logging to MLflow") from None
        self._metric = Metric
        try:
            # A client of its own, because the module's functions would end or continue a run of the script's.
            self._client = MlflowClient()
            found = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if found is None else found.experiment_id
            self._run = self._client.create_run(number).info.run_id
            params = [Param(name, str(value)) for name, value in settings.items()]
            self._client.log_batch(self._run, params=params)
        except (MlflowException, OSError) as error:
            raise UsageError(
                f"MLflow cannot start a run in experiment {experiment!r}: {' '.join(str(error).split())[:400]}; set "
                "MLFLOW_TRACKING_URI to a server or a database, such as sqlite:///mlflow.db"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values`, in one request."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        """Finish the run, with the state failed if an exception is propagating."""
        self._client.set_terminated(self._run, "FAILED" if sys.exc_info()[0] is not None else "FINISHED")


class JsonLines:
    """Writes a JSON object for each call, with its step. NaN and infinities, which JSON does not know, become null.

    Args:
        file: lines are appended to those of earlier runs; a resumed run drops its own lines after `step`, because it
            repeats those steps.
        step: the step that the run begins at.
        evaluates_first: whether the run begins with the evaluation that was due at `step`, whose line, if an earlier
            run came to write one, is dropped as well.

    Raises:
        UsageError: if the file cannot be written.
    """

    def __init__(self, file: str, step: int, evaluates_first: bool = False) -> None:
        self._file = _reopen(Path(file), step, evaluates_first)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line."""
        self._file.write(strict_json.lenient({"step": step, **values}) + "\n")
        self._file.flush()  # a killed run must not lose its last lines

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _reopen(path: Path, step: int, evaluates_first: bool) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = lines[: _lines_until(lines, step, evaluates_first)] if step else lines
        file = path.open("a")
        file.truncate(sum(map(len, kept)))  # truncated, not rewritten, so that a kill at this point loses nothing
        if kept and not kept[-1].endswith(b"\n"):
            file.write("\n")  # another run was killed in the middle of its last line
        return file
    except OSError as error:
        raise UsageError(f"metrics cannot be written to {path}: {error.strerror}; choose another file") from error


def _lines_until(lines: Sequence[bytes], step: int, evaluates_first: bool) -> int:
    """Return how many of `lines` stay when a run is resumed at `step`: those of earlier runs, and its own up to `step`.

    If the evaluation at `step` follows, only the training's line of `step` stays, if there is one.
    """
    steps = [_step_of(line) for line in lines]
    begin, before = 0, 0.0
    for index, number in enumerate(steps):
        if number is not None:
            begin = index if number < before else begin  # another run began here
            before = number
    end = next((index for index in range(begin, len(steps)) if (steps[index] or 0) > step), len(steps))
    if evaluates_first:
        found = (index for index in range(begin, end) if steps[index] == step and b'"eval/' in lines[index])
        end = next(found, end)
    # A line that a kill has cut off goes, too: what it was about is repeated.
    while end > begin and steps[end - 1] is None:
        end -= 1
    return end


def _step_of(line: bytes) -> float | None:
    """Return the step of a line; None for a line that is incomplete because its run was killed."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
