"""The options that every recipe has, and the settings of the Trainer that follow from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from paceline.core.option_rules import flag_of, positive, whole_number
from paceline.core.output.files import check_file
from paceline.errors import MissingExtra, UsageError
from paceline.launch.program import ProgramConfig, option

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.train import TrainConfig
    from paceline.train.training_step import Loss

Options = TypeVar("Options", bound="TrainingOptions")
OPTIONS = {
    "metrics_file": "metrics",
    "tensorboard_dir": "tensorboard",
    "wandb_project": "wandb",
    "mlflow_experiment": "mlflow",
}
"""Options whose names differ from those of the Trainer's settings, by setting."""


@dataclass(frozen=True)
class TrainingOptions(ProgramConfig):
    """Base of the recipes' configurations. A recipe declares a field again to give it a default of its own."""

    passes: ClassVar[int] = 3
    """The epochs where neither ``--epochs`` nor ``--max-steps`` is given."""
    epochs: int | None = option(None, f"Passes over the training data; {passes} by default, without --max-steps.")
    max_steps: int | None = option(None, "Steps of the training instead, over as many passes as it takes.")
    batch_size: int = option(32, "Global batch: samples per step, all ranks.")
    lr: float = option(0.1, "Learning rate.")
    lr_scaling: str = option("none", "How the learning rate follows the global batch: none, linear or sqrt.", "RULE")
    base_batch_size: int | None = option(None, "Global batch that --lr was chosen for.")
    warmup_steps: int = option(0, "Steps in which the learning rate rises.")
    decay: str = option("none", "How the learning rate falls afterwards: none, linear, cosine or wsd.", "RULE")
    decay_steps: int | None = option(None, "Steps of the fall with --decay wsd; a tenth of all by default.")
    decay_to: float = option(0.0, "Share of the learning rate at the end of the fall.")
    clip_norm: float | None = option(None, "Largest norm of the gradient.")
    precision: str = option("fp32", "Of forwards and losses (autocast); weights stay in theirs.", "bf16|fp16|fp32")
    seed: int = option(0, "Decides initial weights and the order of samples.")
    accumulate: int = option(1, "Micro-batches per step and rank.")
    virtual_ranks: int | None = option(
        None,
        "Slices of each global batch, a power of two: the same bits on every number of ranks that divides it.",
        "V",
    )
    micro_batch: str | None = option(
        None, "auto: more micro-batches where a rank's memory is short, with the same global batch.", "auto"
    )
    sharded: bool = option(False, "Give every rank its share of the optimizer alone.")
    evaluate_every: int | None = option(None, "Steps between two evaluations; at the end of every epoch by default.")
    checkpoint_dir: str | None = option(None, "Where checkpoints go.", "DIR")
    checkpoint_every: int | None = option(None, "Steps between two checkpoints.")
    async_save: bool = option(False, "Write them in the background, from a copy in rank 0's memory.")
    resume: bool = option(False, "Go on from the newest checkpoint.")
    allow_changed_settings: bool = option(False, "Resume although settings differ: this run's are taken over.")
    allow_changed_data: bool = option(False, "Resume although the training data have changed.")
    metrics: str | None = option(None, "Write loss, learning rate and metrics there, as JSON lines.", "FILE")
    tensorboard: str | None = option(None, "Write them for TensorBoard.", "DIR")
    wandb: str | None = option(None, "Send them to Weights & Biases.", "PROJECT")
    mlflow: str | None = option(None, "Send them to MLflow.", "EXPERIMENT")
    log_every: int = option(10, "Steps between two lines of these.")
    json: str | None = option(None, "Write the results there as JSON.", "FILE")
    backend: str | None = option(None, "Process group: paceline, gloo, nccl, …")

    def check(self) -> None:
        """Refuse options that cannot work, before any rank starts.

        Raises:
            UsageError: names the option, its value and the remedy.
            MissingExtra: if a package is not installed.
        """
        from paceline.train.config import check_settings

        check_settings(self._settings(), _option_of)
        whole_number("--batch-size", self.batch_size)
        positive("--lr", self.lr)
        if self.batch_size % self.accumulate:
            raise UsageError(
                f"--batch-size {self.batch_size} is the whole step's batch and must be a multiple of --accumulate "
                f"{self.accumulate}"
            )
        if self.micro_batch not in (None, "auto"):
            raise UsageError(f"--micro-batch must be auto, not {self.micro_batch!r}; --accumulate sets a number")
        if self.virtual_ranks is not None:
            self._check_virtual_ranks(self.virtual_ranks)
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be at least 0 and below 2**63, not {self.seed}")
        check_file("--json", self.json)
        for package in ("tensorboard", "wandb", "mlflow"):
            if getattr(self, package) is not None and find_spec(package) is None:
                raise MissingExtra(package, package, f"--{package}")

    def _check_virtual_ranks(self, count: int) -> None:
        if count > self.batch_size:
            raise UsageError(
                f"--batch-size {self.batch_size} cannot be cut into --virtual-ranks {count} slices; give at least "
                f"--batch-size {count}"
            )
        if self.micro_batch is not None:
            raise UsageError(
                f"--micro-batch {self.micro_batch} depends on the number of ranks, and --virtual-ranks {count} does "
                "not; leave one of the two out, and give a larger --virtual-ranks where memory is short"
            )

    def environment(self, ranks: int) -> dict[str, str]:
        """Return the settings of the environment that so many ranks need beside the user's.

        Raises:
            UsageError: for a number of ranks that the options do not go with; lists those that do.
        """
        from paceline.core.state.virtual_ranks import slices_of_rank

        if self.virtual_ranks is None:
            return {}
        slices_of_rank(self.virtual_ranks, 0, ranks)
        # Kernels divide their sums among threads, and each rank's share of the cores depends on the number of ranks.
        return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}

    @property
    def samples_per_micro_batch(self) -> int:
        """Samples of a micro-batch, all ranks."""
        return self.batch_size // self.accumulate

    def fitted(self: Options, model: nn.Module, loss: Loss, batch_of: Callable[[int], Any]) -> Options:
        """Return these options, with ``--micro-batch auto`` replaced by the number of micro-batches that memory allows.

        All ranks call this together. `batch_of` makes a batch of so many samples, those that take most memory. With
        ``--virtual-ranks``, rank 0 says where slices are so small that they cost much.
        """
        from paceline.tools.recipes.memory_fit import find_accumulation
        from paceline.train.training_step import autocast

        if self.micro_batch is None and self.virtual_ranks is None:
            return self

        def loss_in_precision(module: nn.Module, batch: Any) -> tuple[Tensor, float]:
            with autocast(module, self.precision):
                return loss(module, batch)

        if self.virtual_ranks is not None:
            self._look_at_slices(self.virtual_ranks, model, loss_in_precision, batch_of)
            return self
        found = find_accumulation(model, loss_in_precision, batch_of, self.batch_size, self.accumulate)
        return replace(self, accumulate=found)

    def _look_at_slices(self, count: int, model: nn.Module, loss: Loss, batch_of: Callable[[int], Any]) -> None:
        from paceline.core.processes.consensus import here
        from paceline.tools.recipes.slice_cost import advice, measure
        from paceline.train.resume.checkpoint_folder import is_restart

        samples, slices = self.batch_size // count, count // here().size
        # One slice is what an ordinary rank computes; a run that goes on keeps its slices, whatever they cost.
        if slices == 1 or self.resume or is_restart():
            return
        cost = measure(model, loss, batch_of, samples, slices)
        if here().rank == 0 and cost is not None and (remark := advice(cost, count, samples)):
            print(remark, flush=True)

    def train_config(self) -> TrainConfig:
        """Return the Trainer's settings."""
        from paceline.train import TrainConfig

        return TrainConfig(**self._settings())

    def _settings(self) -> dict[str, Any]:
        """Return the options that are settings of the Trainer, by their names there."""
        from paceline.train.config import RULES

        options = {name: OPTIONS.get(name, name) for name in RULES}
        settings = {name: getattr(self, option) for name, option in options.items() if hasattr(self, option)}
        if self.epochs is None and self.max_steps is None:
            settings["epochs"] = self.passes
        return settings


def _option_of(setting: str) -> str:
    """Return the option of a setting of the Trainer: ``--metrics`` of ``metrics_file``."""
    return flag_of(OPTIONS.get(setting, setting))
