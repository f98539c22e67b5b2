"""The options that every recipe has, and the settings of the Trainer that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from paceline.core.output.files import check_file
from paceline.errors import MissingExtra, UsageError
from paceline.launch.program import ProgramConfig, option

if TYPE_CHECKING:
    from torch import nn

    from paceline.train import TrainConfig
    from paceline.train.trainer import Loss

Options = TypeVar("Options", bound="TrainingOptions")


@dataclass(frozen=True)
class TrainingOptions(ProgramConfig):
    """Base of the recipes' configurations. A recipe declares a field again to give it a default of its own."""

    epochs: int = option(3, "Passes over the training data.")
    batch_size: int = option(32, "Global batch: samples per step, all ranks.")
    lr: float = option(0.1, "Learning rate.")
    lr_scaling: str = option("none", "How the learning rate follows the global batch: none, linear or sqrt.", "RULE")
    base_batch_size: int | None = option(None, "Global batch that --lr was chosen for.")
    warmup_steps: int = option(0, "Steps in which the learning rate rises.")
    decay: str = option("none", "How the learning rate falls afterwards: none, linear, cosine or wsd.", "RULE")
    decay_steps: int | None = option(None, "Steps of the fall with --decay wsd; a tenth of all by default.")
    decay_to: float = option(0.0, "Share of the learning rate at the end of the fall.")
    clip_norm: float | None = option(None, "Largest norm of the gradient.")
    seed: int = option(0, "Decides initial weights and the order of samples.")
    accumulate: int = option(1, "Micro-batches per step and rank.")
    micro_batch: str | None = option(
        None, "auto: more micro-batches where a rank's memory is short, with the same global batch.", "auto"
    )
    sharded: bool = option(False, "Give every rank its share of the optimizer alone.")
    checkpoint_dir: str | None = option(None, "Where checkpoints go.", "DIR")
    checkpoint_every: int | None = option(None, "Steps between two checkpoints.")
    async_save: bool = option(False, "Write them in the background, from a copy in rank 0's memory.")
    resume: bool = option(False, "Go on from the newest checkpoint.")
    allow_changed_settings: bool = option(False, "Resume although settings differ: this run's are taken over.")
    allow_changed_data: bool = option(False, "Resume although the training data have changed.")
    metrics: str | None = option(None, "Write loss, learning rate and metrics there, as JSON lines.", "FILE")
    tensorboard: str | None = option(None, "Write them for TensorBoard.", "DIR")
    wandb: str | None = option(None, "Send them to Weights & Biases.", "PROJECT")
    log_every: int = option(10, "Steps between two lines of --metrics, --tensorboard and --wandb.")
    json: str | None = option(None, "Write the results there as JSON.", "FILE")
    backend: str | None = option(None, "Process group: paceline, gloo, nccl, …")

    def check(self) -> None:
        """Refuse what cannot work, before any rank starts.

        Raises:
            UsageError: names the option, its value and the remedy.
            MissingExtra: if a package is not installed.
        """
        self._check_numbers()
        self._check_learning_rate()
        self._check_checkpoints()
        for flag, value in (("--metrics", self.metrics), ("--tensorboard", self.tensorboard), ("--wandb", self.wandb)):
            if value == "":
                raise UsageError(f"{flag} must not be empty; give it a value, or leave it out")
        check_file("--json", self.json)
        for package, value in (("tensorboard", self.tensorboard), ("wandb", self.wandb)):
            if value is not None and find_spec(package) is None:
                raise MissingExtra(package, package, f"--{package}")

    def _check_numbers(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "log_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{flag_of(name)} must be at least 1, not {getattr(self, name)}")
        if self.batch_size % self.accumulate:
            raise UsageError(
                f"--batch-size {self.batch_size} is the whole step's batch and must be a multiple of --accumulate "
                f"{self.accumulate}"
            )
        if self.micro_batch not in (None, "auto"):
            raise UsageError(f"--micro-batch must be auto, not {self.micro_batch!r}; --accumulate sets a number")
        validate_positive("--lr", self.lr)
        if self.clip_norm is not None:
            validate_positive("--clip-norm", self.clip_norm)
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be at least 0 and below 2**63, not {self.seed}")

    def _check_learning_rate(self) -> None:
        from paceline.train.config import Decay, LrScaling

        validate_choice("--lr-scaling", self.lr_scaling, get_args(LrScaling))
        validate_choice("--decay", self.decay, get_args(Decay))
        if self.warmup_steps < 0:
            raise UsageError(f"--warmup-steps must be at least 0, not {self.warmup_steps}")
        if not 0 <= self.decay_to <= 1:
            raise UsageError(f"--decay-to must be from 0 to 1, not {self.decay_to}")
        if self.decay_to and self.decay == "none":
            raise UsageError("--decay-to is where a decay ends and needs --decay linear, cosine or wsd")
        if self.decay_steps is not None and self.decay != "wsd":
            raise UsageError("--decay-steps needs --decay wsd")
        if self.lr_scaling != "none" and self.base_batch_size is None:
            raise UsageError(
                f"--lr-scaling {self.lr_scaling} needs --base-batch-size, the global batch for which --lr was chosen"
            )
        for name in ("base_batch_size", "decay_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"{flag_of(name)} must be at least 1, not {getattr(self, name)}")

    def _check_checkpoints(self) -> None:
        if self.checkpoint_dir == "":
            raise UsageError("--checkpoint-dir must not be empty; name a folder, or leave it out")
        if self.checkpoint_dir is None and self.resume:
            raise UsageError("--resume needs --checkpoint-dir, the folder to resume from")
        if self.allow_changed_settings and not self.resume:
            raise UsageError("--allow-changed-settings is about a checkpoint's settings and needs --resume")
        if self.allow_changed_data and not self.resume:
            raise UsageError("--allow-changed-data is about a checkpoint's data and needs --resume")
        if self.checkpoint_dir is None and self.checkpoint_every is not None:
            raise UsageError("--checkpoint-every needs --checkpoint-dir, the folder to write to")
        if self.checkpoint_dir is None and self.async_save:
            raise UsageError("--async-save needs --checkpoint-dir, the folder to write to")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise UsageError(f"--checkpoint-every must be at least 1, not {self.checkpoint_every}")

    @property
    def samples_per_micro_batch(self) -> int:
        """Samples of a micro-batch, all ranks."""
        return self.batch_size // self.accumulate

    def fitted(self: Options, model: nn.Module, loss: Loss, batch_of: Callable[[int], Any]) -> Options:
        """Return these options, with as many micro-batches as ``--micro-batch auto`` finds that memory asks for.

        All ranks call this together; `batch_of` makes a batch of so many samples, those that take most memory.
        """
        from paceline.tools.recipes.memory_fit import find_accumulation

        if self.micro_batch is None:
            return self
        return replace(self, accumulate=find_accumulation(model, loss, batch_of, self.batch_size, self.accumulate))

    def train_config(self) -> TrainConfig:
        """Return the Trainer's settings."""
        from paceline.train import TrainConfig

        same: tuple[str, ...] = ("epochs", "accumulate", "lr_scaling", "base_batch_size", "warmup_steps")
        same += ("decay", "decay_steps", "decay_to", "clip_norm", "sharded", "checkpoint_dir")
        same += (
            "checkpoint_every",
            "async_save",
            "resume",
            "allow_changed_settings",
            "allow_changed_data",
            "log_every",
        )
        settings: dict[str, Any] = {name: getattr(self, name) for name in same}
        return TrainConfig(
            **settings, metrics_file=self.metrics, tensorboard_dir=self.tensorboard, wandb_project=self.wandb
        )


def flag_of(name: str) -> str:
    """Return the option of a field: ``--batch-size`` of ``batch_size``."""
    return f"--{name.replace('_', '-')}"


def validate_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a `value` that is none of `choices`.

    Raises:
        UsageError: names `flag` and the choices.
    """
    if value not in choices:
        raise UsageError(f"{flag} must be {', '.join(choices[:-1])} or {choices[-1]}, not {value!r}")


def validate_positive(flag: str, value: float) -> None:
    """Refuse a `value` that is not a finite number greater than 0.

    Raises:
        UsageError: names `flag`.
    """
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{flag} must be a finite number greater than 0, not {value}")
