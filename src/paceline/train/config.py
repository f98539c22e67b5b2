"""Settings of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from paceline.core.option_rules import choice, flag, positive, text, whole_number
from paceline.errors import UsageError

Precision = Literal["fp32", "bf16", "fp16"]
Best = Literal["max", "min"]
Rule = Callable[[str, Any], Any]
"""Takes the name and value of a setting, checks the value, and returns it in its final type."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    Steps are optimizer steps. The Trainer takes schedules, checkpoints and loggers as separate objects.

    Raises:
        UsageError: if a value has the wrong type or is out of range, or if settings contradict each other.
    """

    epochs: int | None = None
    """Passes over the training data. Give this or ``max_steps``."""
    max_steps: int | None = None
    """Number of steps, over as many passes as needed. Required for data of unknown length."""
    accumulate: int = 1
    """Number of the loader's batches in each step; the step's global batch is larger by this factor."""
    clip_norm: float | None = None
    """Maximum norm of the gradient over all parameters in the optimizer; None for no clipping."""
    precision: Precision = "fp32"
    """Precision of the forward pass and the loss, including in evaluations: ``"bf16"`` and ``"fp16"`` use
    ``torch.autocast``, and weights keep their dtype. ``"fp16"`` scales the loss with a ``GradScaler``, whose state is
    in checkpoints. A skipped step does not count; its batches belong to the next step."""
    check_finite: bool = True
    """Whether NaN or Inf in a gradient ends the training on every rank before the optimizer steps. On a GPU, the CPU
    waits for this check in every step. Ignored with ``"fp16"``, because the GradScaler skips such steps."""
    evaluate_every: int | None = None
    """Steps between evaluations; None to evaluate at the end of every epoch. The last step is always evaluated."""
    monitor: str = "loss"
    """The evaluation metric passed to a ``ReduceLROnPlateau`` scheduler."""
    load_best_at_end: bool = False
    """Whether to load the best checkpoint, according to ``keep_best``, after training and return its metrics."""
    resume: bool = False
    """Resume from the newest checkpoint of the Checkpointer."""
    allow_changed_settings: bool = False
    """Resume even if settings differ from the checkpoint's. This run's settings apply, and rank 0 logs the differences.
    Batch size, seed and virtual ranks cannot change."""
    log_every: int = 10
    """Steps between lines of metrics."""

    def __post_init__(self) -> None:
        for name, value in check_settings(vars(self)).items():
            object.__setattr__(self, name, value)  # the class is frozen


def _optional(rule: Rule) -> Rule:
    return lambda name, value: None if value is None else rule(name, value)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("accumulate", "log_every"), whole_number),
    **dict.fromkeys(("epochs", "max_steps", "evaluate_every"), _optional(whole_number)),
    "clip_norm": _optional(positive),
    "precision": partial(choice, choices=get_args(Precision)),
    "monitor": lambda name, value: text(name, value).removeprefix("eval/"),
    **dict.fromkeys(("check_finite", "load_best_at_end", "resume", "allow_changed_settings"), flag),
}
"""The rule for checking each setting."""


def check_settings(settings: Mapping[str, Any], named: Callable[[str], str] = str) -> dict[str, Any]:
    """Check settings and their combinations, and return them in their final types.

    Args:
        settings: settings by name; missing ones are not checked.
        named: returns the name of a setting for messages, such as its option on the command line.
    """
    values = {name: rule(named(name), settings[name]) for name, rule in RULES.items() if name in settings}
    if values.get("allow_changed_settings") and not values["resume"]:
        raise UsageError(f"{named('allow_changed_settings')} needs {named('resume')}")
    epochs, max_steps = values["epochs"], values["max_steps"]
    if epochs is not None and max_steps is not None:
        raise UsageError(
            f"{named('epochs')} {epochs} and {named('max_steps')} {max_steps} both set the length; give one of them"
        )
    if epochs is None and max_steps is None:
        raise UsageError(f"the length of the training is missing; give {named('epochs')} or {named('max_steps')}")
    return values
