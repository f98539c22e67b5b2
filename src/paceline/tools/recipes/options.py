"""The options that every recipe has, and the Trainer that follows from them.

Importing this needs no torch, because ``paceline train RECIPE --help`` does; checking and training do.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.core.option_rules import choice, flag_of, positive, text, whole_number
from paceline.core.output.files import check_file
from paceline.errors import MissingExtra, NoCheckpoint, UsageError
from paceline.tools.shared.program import ProgramConfig, option

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from paceline.ddp import DistributedDataParallel
    from paceline.train import Evaluation, Result
    from paceline.train.training_step import Loss

SETTINGS = "max_steps virtual_ranks clip_norm precision evaluate_every resume allow_changed_settings allow_changed_data"
"""Options with the names of the Trainer's settings."""
LOGGERS = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases", "mlflow": "MLflow", "metrics": "JsonLines"}
"""Options that name a destination, and the logger that writes there."""


@dataclass(frozen=True)
class TrainingOptions(ProgramConfig):
    """Base of the recipes' configurations. A recipe declares a field again to give it a default of its own."""

    summary: ClassVar[str] = ""
    """One sentence for ``--help``."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Modules that take long to import; they are loaded once, before ranks are forked."""
    passes: ClassVar[int] = 3
    """The epochs if neither ``--epochs`` nor ``--max-steps`` is given."""
    epochs: int | None = option(None, "Passes over the training data; digits 20, lm 2, mrpc 3 without --max-steps.")
    max_steps: int | None = option(None, "Steps of the training instead, over as many passes as it takes.")
    batch_size: int = option(32, "Global batch: samples per step, all ranks.")
    lr: float = option(0.1, "Learning rate.")
    warmup_steps: int = option(0, "Steps in which the learning rate rises.")
    decay: str = option("none", "How the learning rate falls afterwards: none, linear, cosine or wsd.", "RULE")
    clip_norm: float | None = option(None, "Largest norm of the gradient.")
    precision: str = option("fp32", "Of forwards and losses (autocast); weights stay in theirs.", "bf16|fp16|fp32")
    seed: int = option(0, "Decides initial weights and the order of samples.")
    micro_batches: int = option(1, "Parts that each rank computes a step's batch in; more of them take less memory.")
    virtual_ranks: int | None = option(
        None,
        "Slices of each global batch, a power of two: the same bits on every number of ranks that divides it.",
        "V",
    )
    sharded: bool = option(False, "Give every rank its share of the optimizer alone.")
    evaluate_every: int | None = option(None, "Steps between two evaluations; at the end of every epoch by default.")
    checkpoint_dir: str | None = option(None, "Where checkpoints go.", "DIR")
    checkpoint_every: int | None = option(None, "Steps between two checkpoints; at the end of every epoch by default.")
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
        """Refuse options that cannot work, before any rank starts."""
        from paceline.train.config import check_settings

        check_settings(self._settings(), lambda name: "--micro-batches" if name == "accumulate" else flag_of(name))
        for name in ("batch_size", "log_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                whole_number(flag_of(name), getattr(self, name))
        positive("--lr", self.lr)
        whole_number("--warmup-steps", self.warmup_steps, least=0)
        choice("--decay", self.decay, ("none", "linear", "cosine", "wsd"))
        for name in (*LOGGERS, "checkpoint_dir"):
            if getattr(self, name) is not None:
                text(flag_of(name), getattr(self, name))
        for name in ("resume", "checkpoint_every", "async_save"):
            if getattr(self, name) and self.checkpoint_dir is None:
                raise UsageError(f"{flag_of(name)} needs --checkpoint-dir")
        if self.resume and not Path(self.checkpoint_dir or "").is_dir():
            raise NoCheckpoint(
                f"there is no folder {self.checkpoint_dir} to resume from; check the path, or start without --resume"
            )
        for name in ("micro_batches", "virtual_ranks"):
            count = getattr(self, name) or 1
            if self.batch_size < count or (name == "micro_batches" and self.batch_size % count):
                raise UsageError(
                    f"--batch-size {self.batch_size} is the whole step's batch and cannot be cut into {flag_of(name)} "
                    f"{count}; give a multiple of it"
                )
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be at least 0 and below 2**63, not {self.seed}")
        check_file("--json", self.json)
        for package in ("tensorboard", "wandb", "mlflow"):
            if getattr(self, package) is not None:
                validate_installed((package,), package, f"--{package}")

    def environment(self, ranks: int) -> dict[str, str]:
        """Return the settings of the environment that so many ranks need beside the user's."""
        from paceline.core.state.virtual_ranks import slices_of_rank

        if self.virtual_ranks is None:
            return {}
        slices_of_rank(self.virtual_ranks, 0, ranks)
        # Kernels divide their sums among threads, and each rank's share of the cores depends on the number of ranks.
        return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}

    def _settings(self) -> dict[str, Any]:
        """Return the options that are settings of the Trainer, by their names there."""
        no_length = self.epochs is None and self.max_steps is None
        given = {name: getattr(self, name) for name in (*SETTINGS.split(), "log_every")}
        return {**given, "epochs": self.passes if no_length else self.epochs, "accumulate": self.micro_batches}

    def train(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        loss: Loss,
        data: Dataset[Any],
        evaluation: Evaluation,
        **loading: Any,
    ) -> Result:
        """Train `model` on `data` on this rank as the options say; `loading` are arguments for the DataLoader."""
        from torch.optim.lr_scheduler import LambdaLR

        from paceline import train
        from paceline.checkpoint import Checkpointer
        from paceline.data import DataLoader
        from paceline.optim import ShardedOptimizer

        if self.sharded:
            optimizer = ShardedOptimizer(optimizer.param_groups, type(optimizer), model.process_group)
        loader = DataLoader(data, self.batch_size // self.micro_batches, shuffle=True, seed=self.seed, **loading)
        config = train.TrainConfig(**self._settings())
        scheduler = None
        if self.warmup_steps or self.decay != "none":
            steps = config.max_steps or (config.epochs or 0) * -(-len(loader) // self.micro_batches)
            schedule = {"warmup_steps": self.warmup_steps, "decay": self.decay, "total_steps": steps}
            scheduler = LambdaLR(optimizer, partial(train.lr_factor, **schedule))  # type: ignore[arg-type]
        chosen = ((logger, getattr(self, name)) for name, logger in LOGGERS.items())
        loggers = [getattr(train, logger)(place) for logger, place in chosen if place is not None]
        checkpointer = None
        if self.checkpoint_dir is not None:
            checkpointer = Checkpointer(self.checkpoint_dir, every=self.checkpoint_every, async_save=self.async_save)
        trainer = train.Trainer(
            model, optimizer, loss, loader, config, evaluation, scheduler, loggers, checkpointer=checkpointer
        )
        return trainer.fit()


def validate_installed(packages: tuple[str, ...], extra: str, purpose: str) -> None:
    """Refuse to work without one of the `packages`; the message names the pip command."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(package, extra, purpose)


def changed(name: str, default: Any) -> Any:
    """Declare the option `name` of every recipe again, with another default."""
    return dataclasses.field(default=default, metadata=TrainingOptions.__dataclass_fields__[name].metadata)
