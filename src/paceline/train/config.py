"""Settings of a training run, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from paceline.core.option_rules import choice, flag, positive, text, whole_number
from paceline.core.state.virtual_ranks import check_virtual_ranks
from paceline.errors import UsageError

Precision = Literal["fp32", "bf16", "fp16"]
Best = Literal["max", "min"]
Rule = Callable[[str, Any], Any]
"""Checks a value, given the name that the user knows, and returns it in its final type."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    The global batch of a step is ``accumulate`` times the loader's. Steps are optimizer steps. Schedules, checkpoints
    and loggers are objects of their own, which the Trainer gets beside these settings.

    Raises:
        UsageError: for values of another type, out of range, or that need one another.
    """

    epochs: int | None = None
    """Passes over the training data. Give this or ``max_steps``."""
    max_steps: int | None = None
    """Steps of the training, over as many passes as it takes; data of unknown length need it."""
    accumulate: int = 1
    """Micro-batches of the loader in each step, whose batch is larger by this factor."""
    virtual_ranks: int | None = None
    """Slices into which each global batch is cut, a power of two that the number of ranks divides: training has the
    same bits on any such number. The model and the loaders are told. Slices take the place of ``accumulate``."""
    clip_norm: float | None = None
    """Largest norm of the gradient, that of the parameters that the optimizer trains; None for no clipping."""
    precision: Precision = "fp32"
    """Precision of forwards and losses, also in evaluations: with ``"bf16"`` and ``"fp16"`` under ``torch.autocast``,
    while weights stay in theirs. ``"fp16"`` scales the loss by a ``GradScaler``, whose state is in checkpoints. A step
    that it skips counts for nothing: its batches belong to the next step."""
    check_finite: bool = True
    """Whether a gradient that holds NaN or Inf ends training on every rank, before the optimizer steps. On a GPU
    the CPU waits for this check in every step. Not with ``"fp16"``, whose GradScaler skips such a step."""
    evaluate_every: int | None = None
    """Steps between two evaluations; None for one at the end of every epoch. The last step is always evaluated."""
    monitor: str = "loss"
    """The evaluation's metric that a ``ReduceLROnPlateau`` follows."""
    load_best_at_end: bool = False
    """Whether the model ends with the weights of the best checkpoint, by the Checkpointer's ``keep_best``, and the
    result with its metrics."""
    resume: bool = False
    """Resume from the newest checkpoint of the Checkpointer."""
    allow_changed_settings: bool = False
    """Resume although settings differ from the checkpoint's. This run's settings are used, and rank 0 logs them. Batch
    size and seed never change, because the position in the data depends on them."""
    allow_changed_data: bool = False
    """Resume although the training data have changed; rank 0 logs the changes. If the number of samples differs, the
    current epoch begins again."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    show_progress: bool = True
    """A progress bar on rank 0, or a line for every epoch where output is no terminal."""

    def __post_init__(self) -> None:
        for name, value in check_settings(vars(self)).items():
            object.__setattr__(self, name, value)  # in its final type; the class is frozen


def _optional(rule: Rule) -> Rule:
    return lambda name, value: None if value is None else rule(name, value)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("accumulate", "log_every"), whole_number),
    **dict.fromkeys(("epochs", "max_steps", "evaluate_every"), _optional(whole_number)),
    "virtual_ranks": _optional(check_virtual_ranks),
    "clip_norm": _optional(positive),
    "precision": partial(choice, choices=get_args(Precision)),
    "monitor": lambda name, value: text(name, value).removeprefix("eval/"),
    **dict.fromkeys(("check_finite", "load_best_at_end", "resume", "show_progress"), flag),
    **dict.fromkeys(("allow_changed_settings", "allow_changed_data"), flag),
}
"""The rule of each setting alone."""


def check_settings(given: Mapping[str, Any], named: Callable[[str], str] = str) -> dict[str, Any]:
    """Check settings alone and together, and return them in their final types.

    Args:
        given: settings by name; those that are left out are not checked.
        named: the name under which the user knows a setting, such as its option on the command line.
    """
    values = {name: rule(named(name), given[name]) for name, rule in RULES.items() if name in given}
    for name in ("allow_changed_settings", "allow_changed_data"):
        if values.get(name) and not values["resume"]:
            raise UsageError(f"{named(name)} needs {named('resume')}, as it is about a checkpoint")
    epochs, max_steps = values["epochs"], values["max_steps"]
    if epochs is not None and max_steps is not None:
        raise UsageError(
            f"{named('epochs')} {epochs} and {named('max_steps')} {max_steps} both say how long to train; give one"
        )
    if epochs is None and max_steps is None:
        raise UsageError(f"{named('epochs')} or {named('max_steps')} must say how long to train; give one")
    if (count := values["virtual_ranks"]) and (accumulate := values["accumulate"]) > 1:
        raise UsageError(
            f"{named('virtual_ranks')} {count} cuts a step's batch into its micro-batches; leave {named('accumulate')} "
            f"{accumulate} out, or give a larger {named('virtual_ranks')}"
        )
    return values
