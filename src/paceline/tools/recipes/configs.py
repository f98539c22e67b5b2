"""The recipes' configurations: each field is an option, checked before any rank starts.

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
from paceline.core.output_files import check_file
from paceline.errors import MissingExtra, NoCheckpoint, UsageError
from paceline.tools import hub
from paceline.tools.program import ProgramConfig, option

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from paceline.ddp import DistributedDataParallel
    from paceline.tools.recipes.datasets import Corpus, Splits
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
        None, "Slices per global batch, a power of two: the same bits on any number of ranks that divides V.", "V"
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
        from paceline.core.virtual_ranks import check_virtual_ranks, slices_of_rank

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


DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-360M-Instruct"
ON_THE_HUB = "glue/mrpc"


@dataclass(frozen=True)
class DigitsConfig(TrainingOptions):
    """The options of ``paceline train digits``."""

    summary: ClassVar[str] = "Train a small classifier of handwritten digits in seconds, on CPU or GPU."
    needs: ClassVar[tuple[str, ...]] = ("sklearn.datasets", "sklearn.model_selection")
    passes: ClassVar[int] = 20
    warmup_steps: int = changed("warmup_steps", 10)
    decay: str = changed("decay", "linear")

    def check(self) -> None:
        super().check()
        validate_installed(("sklearn",), "digits", "the digits recipe")


@dataclass(frozen=True)
class LmConfig(TrainingOptions):
    """The options of ``paceline train lm``."""

    summary: ClassVar[str] = "Train a compact GPT on the characters of a text file, in minutes."
    passes: ClassVar[int] = 2
    batch_size: int = changed("batch_size", 16)
    lr: float = changed("lr", 0.02)
    warmup_steps: int = changed("warmup_steps", 100)
    decay: str = changed("decay", "linear")
    data: str | None = option(None, "Required: a UTF-8 text file. Its last tenth is for validation.", "FILE")
    context: int = option(128, "Tokens in a sequence.")
    width: int = option(128, "Width of the model.")
    layers: int = option(4, "Number of layers.")
    heads: int = option(4, "Number of attention heads.")
    sample: int = option(256, "Tokens to generate at the end; 0 for none.")
    sync_every: int | None = option(
        None,
        "Average between hosts, or the ranks of one host, only every H steps, with DiLoCo. Default: every step.",
        "H",
    )

    def check(self) -> None:
        super().check()
        for name, minimum in {"context": 1, "width": 1, "layers": 1, "heads": 1, "sample": 0}.items():
            whole_number(flag_of(name), getattr(self, name), minimum)
        if self.width % (2 * self.heads):  # gpt.rotate() rotates pairs of a head's dimensions
            raise UsageError(f"--width {self.width} must be a multiple of twice --heads {self.heads}")
        if self.sharded:
            raise UsageError("--sharded cannot shard Muon, which updates whole matrices; leave it out")
        if self.sync_every is not None:
            whole_number("--sync-every", self.sync_every)
            if self.virtual_ranks is not None:
                raise UsageError(
                    f"--virtual-ranks {self.virtual_ranks} averages in every step, but --sync-every {self.sync_every} "
                    "does not; give only one of them"
                )
        self.corpus()  # to check it before ranks start; each rank reads it again

    def corpus(self) -> Corpus:
        """Read the text, and cut it into windows of tokens."""
        from paceline.tools.recipes.datasets import make_corpus, read_text

        return make_corpus(read_text(self.data), self.context)


@dataclass(frozen=True)
class MrpcConfig(TrainingOptions):
    """The options of ``paceline train mrpc``."""

    summary: ClassVar[str] = "Train a Hugging Face model to recognize paraphrases, on GLUE's MRPC."
    batch_size: int = changed("batch_size", 16)
    lr: float = changed("lr", 2e-5)
    warmup_steps: int = changed("warmup_steps", 50)
    decay: str = changed("decay", "cosine")
    clip_norm: float | None = changed("clip_norm", 1.0)
    model: str = option(DEFAULT_MODEL, "Hugging Face model: a folder, or a name on the hub.", "NAME|DIR")
    random_init: str | None = option(None, "Start from random weights: folder with config.json and tokenizer.", "DIR")
    data: str = option(ON_THE_HUB, "Folder with MRPC's TSV files, or glue/mrpc for the hub's copy.", "DIR")
    max_length: int = option(128, "Maximum number of tokens in a pair.")
    dropout: float | None = option(None, "Dropout probability. Default: the model's.")
    balance: bool = option(False, "Balance padded lengths between ranks instead of pair counts.")

    def check(self) -> None:
        from paceline.tools.recipes import datasets

        super().check()
        whole_number("--max-length", self.max_length, minimum=8)
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout must be at least 0 and below 1, not {self.dropout}")
        if self.balance and self.virtual_ranks is not None:
            raise UsageError(
                f"--balance cuts batches into unequal slices, but --virtual-ranks {self.virtual_ranks} needs equal "
                "ones; leave one of them out"
            )
        if self.random_init is not None and self.model != DEFAULT_MODEL:
            raise UsageError("--model and --random-init exclude each other; leave one of them out")
        in_folder = Path(self.data).is_dir()
        validate_installed(("transformers", *(() if in_folder else ("datasets",))), "recipes", "the mrpc recipe")
        if not in_folder and self.data != ON_THE_HUB:
            raise UsageError(
                f"--data {self.data}: no such folder; give MRPC's folder, or {ON_THE_HUB} for the hub's copy"
            )
        remedy = "--model FOLDER (a model saved with its tokenizer) or --random-init FOLDER (config.json and tokenizer)"
        if self.random_init is None and not Path(self.model).is_dir() and hub.cached_model(self.model) is None:
            hub.fetch(f"the model {self.model}", remedy, partial(hub.fetch_model, self.model))
        if not in_folder and not datasets.hub_is_cached():
            hub.fetch(f"the data {ON_THE_HUB}", "--data FOLDER (with MRPC's TSV files)", datasets.read_hub)
        self.folder()
        if in_folder:
            self.pairs()  # reports a broken row before ranks start

    def folder(self) -> Path:
        """Return the folder with configuration, tokenizer and, without ``--random-init``, weights."""
        from paceline.tools.recipes.hugging_face import folder_of

        return folder_of(self.model) if self.random_init is None else folder_of(self.random_init, "--random-init")

    def pairs(self) -> Splits:
        from paceline.tools.recipes import datasets

        return datasets.read_folder(Path(self.data)) if Path(self.data).is_dir() else datasets.read_hub()
