"""The options of every recipe, and the Trainer that they describe.

Importing this module does not import torch, so that ``paceline train RECIPE --help`` is fast.
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

SETTINGS = ("max_steps", "clip_norm", "precision", "evaluate_every", "resume", "allow_changed_settings", "log_every")
"""Options that have the same name as a setting of the Trainer."""
PANELS = {
    "Training": "epochs max_steps batch_size lr warmup_steps decay dropout clip_norm precision seed "
    "micro_batches virtual_ranks sharded evaluate_every",
    "Checkpoints": "checkpoint_dir checkpoint_every resume allow_changed_settings",
    "Results": "metrics tensorboard log_every json profile",
    "Ranks": "nproc backend",
    "Failures": "max_restarts hang_timeout min_nproc requeue_exit_code",
}
"""Sections of ``--help`` and their options; all other options are in :data:`OWN_PANEL`."""
OWN_PANEL = "Data and model"


@dataclass(frozen=True)
class TrainingOptions(ProgramConfig):
    """Base class of the recipes' configurations. A recipe redeclares a field to change its default."""

    summary: ClassVar[str] = ""
    """One sentence for ``--help``."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Slow modules, which are imported only once, before ranks are forked."""
    passes: ClassVar[int] = 3
    """Number of epochs if neither ``--epochs`` nor ``--max-steps`` is given."""
    epochs: int | None = option(None, "Passes over the training data. Default: digits 20, lm 2, mrpc 3.")
    max_steps: int | None = option(None, "Number of steps, instead of --epochs.")
    batch_size: int = option(32, "Samples per step, over all ranks.")
    lr: float = option(0.1, "Learning rate.")
    warmup_steps: int = option(0, "Steps over which the learning rate rises.")
    decay: str = option("none", "Decay of the learning rate: none, linear, cosine or wsd.", "RULE")
    clip_norm: float | None = option(None, "Norm to which the gradient is clipped.")
    precision: str = option("fp32", "Precision of forward and loss (autocast).", "bf16|fp16|fp32")
    seed: int = option(0, "Seed of weights and sample order.")
    micro_batches: int = option(1, "Micro-batches per step; more of them need less memory.")
    virtual_ranks: int | None = option(
        None,
        "Slices per global batch, a power of two: the same bits on any number of ranks that divides V.",
        "V",
    )
    sharded: bool = option(False, "Shard the optimizer's state over the ranks.")
    evaluate_every: int | None = option(None, "Steps between evaluations. Default: one epoch.")
    checkpoint_dir: str | None = option(None, "Folder for checkpoints.", "DIR")
    checkpoint_every: int | None = option(None, "Steps between checkpoints. Default: one epoch.")
    resume: bool = option(False, "Resume from the newest checkpoint.")
    allow_changed_settings: bool = option(False, "Resume with changed settings.")
    metrics: str | None = option(None, "Write loss, learning rate and metrics as JSON lines.", "FILE")
    tensorboard: str | None = option(None, "Write the same values for TensorBoard.", "DIR")
    log_every: int = option(10, "Steps between lines of metrics.")
    json: str | None = option(None, "Write the results as JSON.", "FILE")
    backend: str | None = option(None, "Process group: paceline, gloo, nccl, …")

    def check(self) -> None:
        """Reject invalid options before any rank starts."""
        from paceline.train.config import check_settings

        check_settings(self._settings(), lambda name: "--micro-batches" if name == "accumulate" else flag_of(name))
        whole_number("--batch-size", self.batch_size)
        if self.checkpoint_every is not None:
            whole_number("--checkpoint-every", self.checkpoint_every)
        positive("--lr", self.lr)
        whole_number("--warmup-steps", self.warmup_steps, minimum=0)
        choice("--decay", self.decay, ("none", "linear", "cosine", "wsd"))
        for name in ("metrics", "tensorboard", "checkpoint_dir"):
            if getattr(self, name) is not None:
                text(flag_of(name), getattr(self, name))
        for name in ("resume", "checkpoint_every"):
            if getattr(self, name) and self.checkpoint_dir is None:
                raise UsageError(f"{flag_of(name)} needs --checkpoint-dir")
        if self.resume and not Path(self.checkpoint_dir or "").is_dir():
            raise NoCheckpoint(
                f"the folder {self.checkpoint_dir} to resume from does not exist; check it, or start without --resume"
            )
        cut = f"--batch-size {self.batch_size} cannot be cut into"
        if self.batch_size % self.micro_batches:
            raise UsageError(f"{cut} --micro-batches {self.micro_batches}; give a multiple of {self.micro_batches}")
        if self.virtual_ranks is not None and self.batch_size < self.virtual_ranks:
            raise UsageError(f"{cut} --virtual-ranks {self.virtual_ranks}; give at least {self.virtual_ranks}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be at least 0 and below 2**63, not {self.seed}")
        check_file("--json", self.json)
        if self.tensorboard is not None:
            validate_installed(("tensorboard",), "tensorboard", "--tensorboard")

    def environment(self, ranks: int) -> dict[str, str]:
        """Return environment variables for the ranks."""
        from paceline.core.state.virtual_ranks import check_virtual_ranks, slices_of_rank

        if self.virtual_ranks is None:
            return {}
        slices_of_rank(check_virtual_ranks("--virtual-ranks", self.virtual_ranks), 0, ranks)
        # Kernels split sums among threads, and the default number of threads depends on the number of ranks.
        return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}

    def _settings(self) -> dict[str, Any]:
        """Return the Trainer's settings."""
        epochs = self.passes if self.epochs is None and self.max_steps is None else self.epochs
        return {**{name: getattr(self, name) for name in SETTINGS}, "epochs": epochs, "accumulate": self.micro_batches}

    def train(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        loss: Loss,
        data: Dataset[Any],
        evaluation: Evaluation,
        **loading: Any,
    ) -> Result:
        """Train `model` on `data`; `loading` holds additional arguments for the DataLoader."""
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
        loggers: list[train.Logger] = []
        if self.tensorboard is not None:
            loggers.append(train.TensorBoard(self.tensorboard))
        if self.metrics is not None:
            loggers.append(train.JsonLines(self.metrics))
        checkpointer = None
        if self.checkpoint_dir is not None:
            checkpointer = Checkpointer(self.checkpoint_dir, every=self.checkpoint_every)
        trainer = train.Trainer(
            model, optimizer, loss, loader, config, evaluation, scheduler, loggers, checkpointer=checkpointer
        )
        return trainer.fit()


def validate_installed(packages: tuple[str, ...], extra: str, purpose: str) -> None:
    """Check that `packages` are installed; the error names the pip command."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(package, extra, purpose)


def panel_of(name: str) -> str:
    """Return the section of ``--help`` that lists the option `name`."""
    return next((panel for panel, names in PANELS.items() if name in names.split()), OWN_PANEL)


def changed(name: str, default: Any) -> Any:
    """Declare the common option `name` with another default."""
    return dataclasses.field(default=default, metadata=TrainingOptions.__dataclass_fields__[name].metadata)
