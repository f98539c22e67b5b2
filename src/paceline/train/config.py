"""Settings of a training run, checked when they are made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any, Literal, SupportsIndex, get_args

from paceline.errors import UsageError

LrScaling = Literal["none", "linear", "sqrt"]
Decay = Literal["none", "linear", "cosine", "wsd"]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run: its length, its schedule, and its outputs.

    The global batch of a step is ``accumulate`` times the loader's. Steps are optimizer steps.

    Raises:
        UsageError: for values of another type, out of range, or that need one another.
    """

    epochs: int
    """Passes over the training data."""
    accumulate: int = 1
    """Micro-batches per step."""
    lr_scaling: LrScaling = "none"
    """Rule by which the learning rate, chosen for ``base_batch_size``, follows the global batch."""
    base_batch_size: int | None = None
    """The global batch for which the learning rate was chosen, in samples."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly."""
    decay: Decay = "none"
    """How the learning rate falls after the warm-up; :mod:`paceline.train.learning_rate` has the formulas."""
    decay_steps: int | None = None
    """Steps at the end in which it falls with ``decay="wsd"``; None for a tenth of all."""
    decay_to: float = 0.0
    """The share of the learning rate that the decay ends at."""
    clip_norm: float | None = None
    """Largest norm of the gradient; None for no clipping."""
    check_finite: bool = True
    """Whether a gradient that holds NaN or Inf ends training on every rank, before the optimizer steps. On a GPU
    the CPU waits for that in every step."""
    sharded: bool = False
    """Whether every rank holds and computes only its share of the optimizer."""
    checkpoint_dir: str | None = None
    """Folder of checkpoints; None to keep none."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; None to write one at the end of every epoch."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in rank 0's memory, while training goes on."""
    keep: int = 3
    """Number of checkpoints that stay."""
    resume: bool = False
    """Go on from the newest checkpoint in ``checkpoint_dir``."""
    metrics_file: str | None = None
    """JSON Lines file to which rank 0 writes a line for every ``log_every`` steps and every evaluation, behind those
    of earlier runs: ``train/loss`` and ``lr``, or ``eval/`` and a metric's name. It may lie in ``checkpoint_dir``."""
    tensorboard_dir: str | None = None
    """Folder to which rank 0 writes the same for TensorBoard."""
    wandb_project: str | None = None
    """Project of Weights & Biases to which rank 0 sends the same, as a run of its own."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    show_progress: bool = True
    """A progress bar on rank 0, or a line for every epoch where output is no terminal."""

    allow_changed_settings: bool = False
    """Resume although settings differ from the checkpoint's: this run's are taken over, and rank 0 says which. Batch
    size and seed never change, because the position in the data depends on them."""
    allow_changed_data: bool = False
    """Resume although the training data have changed; rank 0 says how. With another number of samples the epoch at
    hand begins again."""

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("accumulate", 1), ("keep", 1), ("log_every", 1), ("warmup_steps", 0)):
            self._take(name, _whole_number(name, getattr(self, name), least))
        for name in ("base_batch_size", "checkpoint_every", "decay_steps"):
            if (value := getattr(self, name)) is not None:
                self._take(name, _whole_number(name, value, 1))
        flags = ("sharded", "resume", "show_progress", "async_save", "allow_changed_settings", "allow_changed_data")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in ("checkpoint_dir", "metrics_file", "tensorboard_dir"):
            if (value := getattr(self, name)) is not None:
                self._take(name, _path(name, value))
        for name, choices in (("lr_scaling", get_args(LrScaling)), ("decay", get_args(Decay))):
            if (value := getattr(self, name)) not in choices:
                raise UsageError(f"{name} must be {' or '.join(choices)}, not {value!r}")
        if self.clip_norm is not None:
            self._take("clip_norm", _positive("clip_norm", self.clip_norm))
        self._take("decay_to", _share("decay_to", self.decay_to))
        if self.decay_to and self.decay == "none":
            raise UsageError(f"decay_to={self.decay_to} is where a decay ends, but decay is none; choose a decay")
        if self.decay_steps is not None and self.decay != "wsd":
            raise UsageError(f"decay_steps is for decay='wsd'; with decay={self.decay!r} leave it out")
        if self.wandb_project is not None and not (isinstance(self.wandb_project, str) and self.wandb_project):
            raise UsageError(f"wandb_project must be a project's name, not {self.wandb_project!r}")
        for name in ("resume", "checkpoint_every", "async_save"):
            if self.checkpoint_dir is None and getattr(self, name):
                raise UsageError(f"{name} needs checkpoint_dir, the folder of the checkpoints")
        if self.allow_changed_settings and not self.resume:
            raise UsageError("allow_changed_settings is about a checkpoint's settings and needs resume=True")
        if self.allow_changed_data and not self.resume:
            raise UsageError("allow_changed_data is about a checkpoint's data and needs resume=True")

    def _take(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen for everyone else


def _whole_number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    if index(value) < least:
        raise UsageError(f"{name} must be at least {least}, not {value}")
    return index(value)


def _positive(name: str, value: Any) -> float:
    if not _number(name, value) > 0:
        raise UsageError(f"{name} must be greater than 0, not {value}")
    return float(value)


def _share(name: str, value: Any) -> float:
    if not 0 <= _number(name, value) <= 1:
        raise UsageError(f"{name} must be from 0 to 1, not {value}")
    return float(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} must be a number, not {value!r}")
    return float(value)


def _path(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str):
        raise UsageError(f"{name} must be a path, not {value!r}")
    if not path:
        raise UsageError(f"{name} must not be empty; name a path, or leave {name} out")
    return path
