"""The checkpoints of a run: writes them, keeps track of the best one, and compares settings and data at a resume."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import Checkpointer
from paceline.core import consensus
from paceline.core.digests import quick_digest
from paceline.core.stacks import warn
from paceline.core.step_progress import RESTARTS, job_folder
from paceline.data.dataset_digest import columns, element_bytes
from paceline.ddp import DistributedDataParallel
from paceline.errors import CheckpointMismatch, CheckpointWarning
from paceline.train.config import TrainConfig
from paceline.train.run import RunState, is_better

logger = logging.getLogger(__name__)
_numbers = itertools.count()
"""Counts the Trainers in this process that have no Checkpointer."""
_DECISIVE = ("accumulate", "clip_norm", "precision")
"""The length is not included, because a run may be made longer, unless its schedule depends on the length."""
_FIXED = ("batch_size", "scheduler", "virtual_ranks")
"""Settings that must stay the same: the data position or sums of losses depend on them, or schedulers restore them."""
WHOLE_BYTES = 2**28
"""Size of the largest tensor whose content is compared completely."""
MOST_ROWS = 2**16
"""Number of rows that are compared in other columns."""


class Saves:
    """Writes the checkpoints of a run, on all ranks together.

    Args:
        checkpointer: the Checkpointer with everything registered.
        model: the model, whose buffers are made equal before each save.
        state: has the best value; its result receives the best step and the failed saves.
    """

    def __init__(self, checkpointer: Checkpointer, model: DistributedDataParallel, state: RunState) -> None:
        self._checkpointer, self._model, self._state, self._result = checkpointer, model, state, state.result
        self.keeps_best = checkpointer.keep_best is not None
        self._metric, self._mode = checkpointer.keep_best or ("", "max")
        self._result.failed_saves = checkpointer.due.failed

    def is_best(self) -> bool:
        """Return whether the current step's evaluation is the best so far; if so, record it."""
        value, rule = self._result.metrics[self._metric], f"{self._mode} {self._metric}"
        if not is_better(value, self._state.best.get(rule), self._mode):
            return False
        self._state.best = {rule: value}
        return True

    def save(self, *, is_last: bool) -> None:
        """Save the current step, together with the results of its evaluation, if any."""
        self._model.sync_buffers()  # rank 0's buffers are saved, and a resumed run uses them on every rank
        is_evaluated = self._state.evaluated_at == self._result.steps
        metadata = dict(self._result.metrics) if is_evaluated else None
        self._checkpointer.due.save(self._checkpointer, self._result.steps, metadata, is_last=is_last)

    def finish(self, best: Sequence[str] = ()) -> None:
        """Wait until the last save is durable, find the best save, and restore the objects named in `best` from it."""
        self._checkpointer.due.finish(self._checkpointer, is_last=True)
        if not self.keeps_best:
            return
        self._result.best_step = step = self._checkpointer.best()
        if step is not None and best:
            if step != self._result.steps:
                self._checkpointer.restore(step, only=best)
            self._result.metrics = {name: float(value) for name, value in self._checkpointer.metadata(step).items()}
        elif best and consensus.here().rank == 0:
            logger.warning(
                "load_best_at_end: no checkpoint has a %s that is a number, so the model keeps the weights of the last "
                "step",
                self._metric,
            )


class Settings:
    """Raises an error at a resume if the run had different settings, unless the config allows changes."""

    state_is_constant = True

    def __init__(self, config: TrainConfig, **more: Any) -> None:
        self._allow_changed = config.allow_changed_settings
        self._values: dict[str, Any] = {name: getattr(config, name) for name in _DECISIVE} | more

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def check_state_dict(self, saved: dict[str, Any]) -> None:
        for name, saved_value, value in self._changed(saved):
            if self._allow_changed and name not in _FIXED:
                continue
            allow = "accept the change with allow_changed_settings=True (--allow-changed-settings), "
            raise CheckpointMismatch(
                f"the checkpoint was written with {name}={saved_value!r}, but this run has {name}={value!r}; "
                f"resume with the same settings, {'' if name in _FIXED else allow}or start again in another folder"
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        changed = [f"{name}={value!r} instead of {saved_value!r}" for name, saved_value, value in self._changed(saved)]
        if changed and consensus.here().rank == 0:
            warn(f"the run continues with changed settings: {', '.join(changed)}", CheckpointWarning)

    def _changed(self, saved: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return the name, the saved value and this run's value of each setting that differs."""
        rows = [(name, saved.get(name), self._values.get(name)) for name in sorted(saved.keys() | self._values.keys())]
        return [(name, saved_value, value) for name, saved_value, value in rows if saved_value != value]


class DataIdentity:
    """Raises an error at a resume if the data have changed since the checkpoint was written.

    No sample is loaded for the comparison. It uses a digest of every column from
    :func:`paceline.data.dataset_digest.columns`. The digest covers the whole column if it is a tensor of up to
    ``WHOLE_BYTES``. Otherwise it covers ``MOST_ROWS`` evenly spaced rows, and changes to other rows are not detected.
    Files are compared only by name.
    """

    state_is_constant = True

    def __init__(self, dataset: Any) -> None:
        self._fingerprint = fingerprint(dataset)

    def state_dict(self) -> dict[str, Any]:
        return self._fingerprint

    def check_state_dict(self, saved: dict[str, Any]) -> None:
        current = self._fingerprint
        if changed := [name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)]:
            raise CheckpointMismatch(
                f"the training data differ from the checkpoint's in {', '.join(changed)}; resume on the same data, or "
                "start a new run in another folder with the weights that paceline.load_weights() reads"
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep the data; :meth:`check_state_dict` has compared them."""


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Return the class and the number of samples of `dataset`, and the digest of each column, as plain values."""
    size = len(dataset) if hasattr(dataset, "__len__") else -1
    digests = {name: values if isinstance(values, str) else _column_digest(values) for name, values in columns(dataset)}
    return {"class": type(dataset).__qualname__, "number of samples": size, **digests}


def _column_digest(values: Any) -> str:
    is_dense = isinstance(values, Tensor) and values.layout is torch.strided
    if is_dense and values.numel() * values.element_size() <= WHOLE_BYTES:
        return f"{tuple(values.shape[1:])} {values.dtype} {int(quick_digest(values)):x}"
    count = len(values)
    rows: Sequence[int] = range(count)
    if count > MOST_ROWS:  # evenly spaced, including the first and the last
        rows = [number * (count - 1) // (MOST_ROWS - 1) for number in range(MOST_ROWS)]
    total = hashlib.sha256(f"{type(values).__name__} {count}".encode())
    for row in rows:
        total.update(hashlib.sha256(element_bytes(values[row])).digest())
    return total.hexdigest()


def is_restart() -> bool:
    """Return whether the launcher has restarted the ranks after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def in_memory() -> Checkpointer | None:
    """Return a Checkpointer that rescues steps in memory if the launcher restarts failed ranks; otherwise None."""
    job = job_folder()
    if job is None or not int(os.environ.get(RESTARTS, "0")):
        return None
    return Checkpointer(job / "checkpoints" / str(next(_numbers)))
