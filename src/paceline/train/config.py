"""Settings of a training run, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from paceline.core.option_rules import choice, flag, path, positive, share, text, whole_number
from paceline.core.state.virtual_ranks import check_virtual_ranks
from paceline.errors import UsageError

LrScaling = Literal["none", "linear", "sqrt"]
Decay = Literal["none", "linear", "cosine", "wsd"]
Precision = Literal["fp32", "bf16", "fp16"]
Best = Literal["max", "min"]
Rule = Callable[[str, Any], Any]
"""Checks a value, given the name that the user knows, and returns it in its final type."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run: its length, its schedule, and its outputs.

    The global batch of a step is ``accumulate`` times the loader's. Steps are optimizer steps.

    Raises:
        UsageError: for values of another type, out of range, or that need one another.
    """

    epochs: int | None = None
    """Passes over the training data. Give this or ``max_steps``."""
    max_steps: int | None = None
    """Steps of the training, over as many passes as it takes; data of unknown length need it."""
    accumulate: int = 1
    """Micro-batches per step."""
    virtual_ranks: int | None = None
    """Slices into which each global batch is cut, a power of two that the number of ranks divides: training has the
    same bits on any such number. The model and the loaders are told. Slices take the place of ``accumulate``."""
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
    """Largest norm of the gradient, that of the parameters that the optimizer trains; None for no clipping."""
    precision: Precision = "fp32"
    """Precision of forwards and losses, also in evaluations: with ``"bf16"`` and ``"fp16"`` under ``torch.autocast``,
    while weights stay in theirs. ``"fp16"`` scales the loss by a ``GradScaler``, whose state is in checkpoints. A step
    that it skips counts for nothing: its batches belong to the next step."""
    check_finite: bool = True
    """Whether a gradient that holds NaN or Inf ends training on every rank, before the optimizer steps. On a GPU
    the CPU waits for this check in every step. Not with ``"fp16"``, whose GradScaler skips such a step."""
    sharded: bool = False
    """Whether every rank holds and computes only its share of the optimizer."""
    evaluate_every: int | None = None
    """Steps between two evaluations; None for one at the end of every epoch. The last step is always evaluated."""
    monitor: str = "loss"
    """The evaluation's metric that a ``ReduceLROnPlateau`` follows."""
    checkpoint_dir: str | None = None
    """Folder of checkpoints; None to keep none."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; None to write one at the end of every epoch."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in rank 0's memory, while training goes on."""
    keep: int = 3
    """Number of checkpoints to keep."""
    keep_best: str | None = None
    """The evaluation's metric, such as ``"loss"``, whose best value's checkpoint is also kept, however old it is. Every
    evaluation that is the best so far is saved."""
    best: Best | None = None
    """Whether the largest or the smallest ``keep_best`` is best; for a name that ends in "loss" the smallest."""
    load_best_at_end: bool = False
    """Whether the model ends with the weights of the best checkpoint, and the result with its metrics."""
    resume: bool = False
    """Resume from the newest checkpoint in ``checkpoint_dir``."""
    metrics_file: str | None = None
    """JSON Lines file to which rank 0 writes a line for every ``log_every`` steps and every evaluation, behind those
    of earlier runs: ``train/loss`` and ``lr``, or ``eval/`` and a metric's name. It may lie in ``checkpoint_dir``."""
    tensorboard_dir: str | None = None
    """Folder to which rank 0 writes the same metrics for TensorBoard."""
    wandb_project: str | None = None
    """Weights & Biases project to which rank 0 sends the same metrics, in a run of its own."""
    mlflow_experiment: str | None = None
    """MLflow experiment to which rank 0 sends the same metrics, in a run of its own; ``MLFLOW_TRACKING_URI`` and other
    variables of MLflow apply."""
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


def plain_metric(name: str) -> str:
    """Return the name of an evaluation's metric; in lines of metrics it has the prefix ``eval/``."""
    return name.removeprefix("eval/")


def _optional(rule: Rule) -> Rule:
    return lambda name, value: None if value is None else rule(name, value)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("accumulate", "keep", "log_every"), whole_number),
    **dict.fromkeys(("epochs", "max_steps", "evaluate_every", "checkpoint_every"), _optional(whole_number)),
    **dict.fromkeys(("base_batch_size", "decay_steps"), _optional(whole_number)),
    "virtual_ranks": _optional(check_virtual_ranks),
    "warmup_steps": partial(whole_number, least=0),
    "lr_scaling": partial(choice, choices=get_args(LrScaling)),
    "decay": partial(choice, choices=get_args(Decay)),
    "decay_to": share,
    "clip_norm": _optional(positive),
    "precision": partial(choice, choices=get_args(Precision)),
    "best": _optional(partial(choice, choices=get_args(Best))),
    "monitor": lambda name, value: plain_metric(text(name, value)),
    "keep_best": _optional(lambda name, value: plain_metric(text(name, value))),
    **dict.fromkeys(("check_finite", "sharded", "resume", "async_save", "show_progress"), flag),
    **dict.fromkeys(("load_best_at_end", "allow_changed_settings", "allow_changed_data"), flag),
    **dict.fromkeys(("checkpoint_dir", "metrics_file", "tensorboard_dir"), _optional(path)),
    **dict.fromkeys(("wandb_project", "mlflow_experiment"), _optional(text)),
}
"""The rule of each setting alone."""
NEEDS = (
    ("resume", "checkpoint_dir", "the folder to resume from"),
    ("checkpoint_every", "checkpoint_dir", "the folder to write to"),
    ("async_save", "checkpoint_dir", "the folder to write to"),
    ("keep_best", "checkpoint_dir", "the folder to keep it in"),
    ("best", "keep_best", "the metric that it is about"),
    ("load_best_at_end", "keep_best", "the metric that says which is best"),
    ("allow_changed_settings", "resume", "as it is about a checkpoint's settings"),
    ("allow_changed_data", "resume", "as it is about a checkpoint's data"),
)
"""Settings that need another one, and why."""


def check_settings(given: Mapping[str, Any], named: Callable[[str], str] = str) -> dict[str, Any]:
    """Check settings alone and together, and return them in their final types.

    Args:
        given: settings by name, all of :class:`TrainConfig`.
        named: the name under which the user knows a setting, such as its option on the command line.

    Raises:
        UsageError: names the setting, its value and the remedy.
    """
    values = {name: rule(named(name), given[name]) for name, rule in RULES.items() if name in given}
    for name, needed, why in NEEDS:
        if values.get(name) and not values.get(needed):
            raise UsageError(f"{named(name)} needs {named(needed)}, {why}")
    _check_length(values, named)
    if (count := values["virtual_ranks"]) and (accumulate := values["accumulate"]) > 1:
        raise UsageError(
            f"{named('virtual_ranks')} {count} cuts a step's batch into its micro-batches; leave {named('accumulate')} "
            f"{accumulate} out, or give a larger {named('virtual_ranks')}"
        )
    if (metric := values.get("keep_best")) and values["best"] is None:
        if not metric.endswith("loss"):
            raise UsageError(
                f"{named('keep_best')} {metric}: is the largest or the smallest best? Give {named('best')} max or min"
            )
        values["best"] = "min"
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


def _check_length(values: Mapping[str, Any], named: Callable[[str], str]) -> None:
    epochs, max_steps = values.get("epochs"), values.get("max_steps")
    if epochs is not None and max_steps is not None:
        raise UsageError(
            f"{named('epochs')} {epochs} and {named('max_steps')} {max_steps} both say how long to train; give one"
        )
    if epochs is None and max_steps is None:
        raise UsageError(f"{named('epochs')} or {named('max_steps')} must say how long to train; give one")
