"""Settings of a training run, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from paceline.core.option_rules import choice, flag, path, positive, share, text, whole_number
from paceline.errors import UsageError

LrScaling = Literal["none", "linear", "sqrt"]
Decay = Literal["none", "linear", "cosine", "wsd"]
Rule = Callable[[str, Any], Any]
"""Checks a value, given the name that the user knows, and returns it in its final type."""


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
    the CPU waits for this check in every step."""
    sharded: bool = False
    """Whether every rank holds and computes only its share of the optimizer."""
    checkpoint_dir: str | None = None
    """Folder of checkpoints; None to keep none."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; None to write one at the end of every epoch."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in rank 0's memory, while training goes on."""
    keep: int = 3
    """Number of checkpoints to keep."""
    resume: bool = False
    """Resume from the newest checkpoint in ``checkpoint_dir``."""
    metrics_file: str | None = None
    """JSON Lines file to which rank 0 writes a line for every ``log_every`` steps and every evaluation, behind those
    of earlier runs: ``train/loss`` and ``lr``, or ``eval/`` and a metric's name. It may lie in ``checkpoint_dir``."""
    tensorboard_dir: str | None = None
    """Folder to which rank 0 writes the same metrics for TensorBoard."""
    wandb_project: str | None = None
    """Weights & Biases project to which rank 0 sends the same metrics, in a run of its own."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    show_progress: bool = True
    """A progress bar on rank 0, or a line for every epoch where output is no terminal."""

    allow_changed_settings: bool = False
    """Resume although settings differ from the checkpoint's. This run's settings are used, and rank 0 logs them. Batch
    size and seed never change, because the position in the data depends on them."""
    allow_changed_data: bool = False
    """Resume although the training data have changed; rank 0 logs the changes. If the number of samples differs, the
    current epoch begins again."""

    def __post_init__(self) -> None:
        for name, value in check_settings(vars(self)).items():
            object.__setattr__(self, name, value)  # in its final type; the class is frozen


def _optional(rule: Rule) -> Rule:
    return lambda name, value: None if value is None else rule(name, value)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("epochs", "accumulate", "keep", "log_every"), whole_number),
    **dict.fromkeys(("base_batch_size", "checkpoint_every", "decay_steps"), _optional(whole_number)),
    "warmup_steps": partial(whole_number, least=0),
    "lr_scaling": partial(choice, choices=get_args(LrScaling)),
    "decay": partial(choice, choices=get_args(Decay)),
    "decay_to": share,
    "clip_norm": _optional(positive),
    **dict.fromkeys(("check_finite", "sharded", "resume", "async_save", "show_progress"), flag),
    **dict.fromkeys(("allow_changed_settings", "allow_changed_data"), flag),
    **dict.fromkeys(("checkpoint_dir", "metrics_file", "tensorboard_dir"), _optional(path)),
    "wandb_project": _optional(text),
}
"""The rule of each setting alone."""
NEEDS = (
    ("resume", "checkpoint_dir", "the folder to resume from"),
    ("checkpoint_every", "checkpoint_dir", "the folder to write to"),
    ("async_save", "checkpoint_dir", "the folder to write to"),
    ("allow_changed_settings", "resume", "as it is about a checkpoint's settings"),
    ("allow_changed_data", "resume", "as it is about a checkpoint's data"),
)
"""Settings that need another one, and why."""


def check_settings(given: Mapping[str, Any], named: Callable[[str], str] = str) -> dict[str, Any]:
    """Check settings alone and together, and return them in their final types.

    Args:
        given: settings by name, all of :class:`TrainConfig` or some.
        named: the name under which the user knows a setting, such as its option on the command line.

    Raises:
        UsageError: names the setting, its value and the remedy.
    """
    values = {name: rule(named(name), given[name]) for name, rule in RULES.items() if name in given}
    for name, needed, why in NEEDS:
        if values.get(name) and not values.get(needed):
            raise UsageError(f"{named(name)} needs {named(needed)}, {why}")
    decay, lr_scaling = values["decay"], values["lr_scaling"]
    if values["decay_to"] and decay == "none":
        raise UsageError(f"{named('decay_to')} is where a decay ends and needs {named('decay')} linear, cosine or wsd")
    if values["decay_steps"] is not None and decay != "wsd":
        raise UsageError(f"{named('decay_steps')} needs {named('decay')} wsd, not {decay}")
    if lr_scaling != "none" and values["base_batch_size"] is None:
        raise UsageError(
            f"{named('lr_scaling')} {lr_scaling} needs {named('base_batch_size')}, the global batch for which the "
            "learning rate was chosen"
        )
    return values
