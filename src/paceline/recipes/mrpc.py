"""The mrpc recipe: does a sentence say the same as another? A Hugging Face model on GLUE's MRPC, 3,668 pairs.

The default model is the one of the widespread tutorial that trains it with data parallelism, SmolLM2-360M-Instruct.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import hub
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import MissingExtra, UsageError
from paceline.launch.program import option
from paceline.output_files import write_file
from paceline.recipes import mrpc_data
from paceline.recipes.mrpc_data import ON_THE_HUB, Batch, PadToLongest, Splits, f1_score, majority_baseline
from paceline.recipes.mrpc_model import (
    Source,
    build_model,
    expect_fitting,
    load_tokenizer,
    random_source,
    source_in,
    tokenize,
)
from paceline.recipes.recipe_report import Report, expect_saved, gather_report, print_report
from paceline.recipes.training_options import TrainingOptions
from paceline.rng import set_seed
from paceline.train import Evaluation, Result, Trainer
from paceline.world import World, init

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-360M-Instruct"
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
REPORTED = ("accuracy", "f1", "loss", "majority_accuracy", "majority_f1")


@dataclass(frozen=True)
class MrpcConfig(TrainingOptions):
    """The options of ``paceline train mrpc``."""

    epochs: int = option(3, "Passes over the training data.")
    batch_size: int = option(16, "Global batch: sentence pairs per step, all ranks.")
    lr: float = option(2e-5, "Learning rate.")
    warmup_steps: int = option(50, "Steps in which the learning rate rises.")
    decay: str = option("cosine", "How the learning rate falls afterwards: none, linear, cosine or wsd.", "RULE")
    clip_norm: float | None = option(1.0, "Largest norm of the gradient.")
    model: str = option(DEFAULT_MODEL, "Hugging Face model: a folder, or a name on the hub.", "NAME|DIR")
    random_init: str | None = option(
        None, "Random weights instead: a folder with config.json and tokenizer, or the configuration.", "DIR|FILE"
    )
    data: str = option(ON_THE_HUB, "Folder with MRPC's TSV files, or glue/mrpc for the hub's copy.", "DIR")
    max_length: int = option(128, "Tokens of a pair, at most.")
    weight_decay: float = option(0.01, "Of AdamW, for matrices.")
    dropout: float | None = option(None, "Probability of dropout; the model's own by default.")
    bf16: bool = option(False, "Compute in bfloat16 (autocast); weights stay in float32.")
    balance: bool = option(False, "Split batches among ranks by padded length instead of count.")

    def check(self) -> None:
        """Refuse what cannot work, before any rank starts, and fetch from the hub what is not on this machine.

        Raises:
            UsageError: names the option, its value and the remedy.
            MissingExtra: if a package is not installed.
        """
        super().check()
        if self.max_length < 8:
            raise UsageError(f"--max-length must be at least 8, not {self.max_length}")
        if not 0 <= self.weight_decay < 1:
            raise UsageError(f"--weight-decay must be at least 0 and below 1, not {self.weight_decay}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout must be at least 0 and below 1, not {self.dropout}")
        needed = ["transformers", "tokenizers"] + (["datasets"] if not Path(self.data).is_dir() else [])
        for package in needed:
            if find_spec(package) is None:
                raise MissingExtra(package, "recipes", "the mrpc recipe")
        hub.fetch_all([each for each in (self._absent_model(), self._absent_data()) if each is not None])
        if Path(self.data).is_dir():
            self.pairs()

    def _absent_model(self) -> hub.Absent | None:
        """Return the model, if it is to be fetched; check the files of one that is here."""
        if self.random_init is not None and self.model != DEFAULT_MODEL:
            raise UsageError("--model loads weights and --random-init makes them; leave one of them out")
        if self.random_init is not None or Path(self.model).is_dir():
            self.source()
            return None
        if not HUB_NAME.fullmatch(self.model):
            raise UsageError(f"--model {self.model} is neither a folder nor the name of a model on the hub")
        if hub.cached_model(self.model) is not None:
            return None
        return hub.Absent(
            f"the model {self.model}",
            "--model FOLDER (a model saved with its tokenizer) or --random-init FOLDER (config.json and tokenizer)",
            lambda: hub.fetch_model(self.model),
        )

    def _absent_data(self) -> hub.Absent | None:
        """Return the data, if they are to be fetched."""
        if Path(self.data).is_dir():
            return None
        if self.data != ON_THE_HUB:
            raise UsageError(f"--data {self.data}: there is no such folder; give MRPC's, or {ON_THE_HUB} for the hub's")
        if mrpc_data.hub_is_cached():
            return None
        return hub.Absent(f"the data {ON_THE_HUB}", "--data FOLDER (with MRPC's TSV files)", mrpc_data.read_hub)

    def source(self) -> Source:
        """Return the files of the model.

        Raises:
            UsageError: if something is not there.
        """
        if self.random_init is not None:
            return random_source(Path(self.random_init))
        folder = Path(self.model) if Path(self.model).is_dir() else hub.cached_model(self.model)
        if folder is None:
            raise UsageError(f"the model {self.model} is not in the cache of the Hugging Face hub on this machine")
        return source_in(folder, "--model")

    def pairs(self) -> Splits:
        """Read the data.

        Raises:
            UsageError: if they cannot be read.
        """
        return mrpc_data.read_folder(Path(self.data)) if Path(self.data).is_dir() else mrpc_data.read_hub()


@dataclass(frozen=True)
class Objective:
    """Loss and metrics of a classifier's micro-batches."""

    device: torch.device
    bf16: bool

    def logits(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits in float32, (samples, 2), and the labels."""
        inputs, labels = batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = model(**{name: tensor.to(self.device) for name, tensor in inputs.items()}).logits
        return logits.float(), labels.to(self.device)

    def summed_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """Return the summed cross-entropy of a batch, and its number of samples."""
        logits, labels = self.logits(model, batch)
        return F.cross_entropy(logits, labels, reduction="sum"), len(labels)

    def counts(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """Sum the loss of a batch, and count what accuracy and F1 are made of."""
        logits, labels = self.logits(model, batch)
        answers = logits.argmax(1)
        sums = {
            "dev_loss": F.cross_entropy(logits, labels, reduction="sum"),
            "right": (answers == labels).sum(),
            "true_positives": (answers & labels).sum(),
            "predicted": answers.sum(),
            "positives": labels.sum(),
        }
        return sums, len(labels)


def scores(means: dict[str, float]) -> dict[str, float]:
    """Return loss, accuracy and F1, given the means of :meth:`Objective.counts`."""
    f1 = f1_score(means["true_positives"], means["predicted"], means["positives"])
    return {"dev_loss": means["dev_loss"], "accuracy": means["right"], "f1": f1}


def optimizer_of(model: nn.Module, config: MrpcConfig) -> torch.optim.Optimizer:
    """Return AdamW, with weight decay for matrices but not for biases and gains of norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, fused=fused)


def train_mrpc(config: MrpcConfig, world: World) -> tuple[Report, Result]:
    """Train on this rank; the report is the same on every rank."""
    hub.quiet_libraries()
    pairs, source = config.pairs(), config.source()
    tokenizer = load_tokenizer(source)
    train_data, dev_data = (tokenize(tokenizer, part, config.max_length) for part in pairs)
    with set_seed(config.seed):
        net, note = build_model(source, tokenizer, config.dropout)
    expect_fitting(net, (train_data, dev_data))
    if world.is_main:
        size = sum(parameter.numel() for parameter in net.parameters())
        print(f"{type(net).__name__}, {size:,} parameters; {len(train_data):,} pairs, {len(dev_data):,} held out")
        if note is not None:
            print(note)
    model = DistributedDataParallel(net.to(world.device))
    collate = PadToLongest(tokenizer.pad_token_id)
    objective = Objective(world.device, config.bf16)
    longest = sorted(train_data.samples, key=lambda sample: -len(sample.ids))
    config = config.fitted(model, objective.summed_loss, lambda rows: collate(longest[:rows]))
    loader = DataLoader(
        train_data,
        config.samples_per_micro_batch,
        shuffle=True,
        seed=config.seed,
        cost=train_data.lengths if config.balance else None,
        padded=config.balance,
        accumulate=config.accumulate if config.balance else 1,
        collate_fn=collate,
    )
    held_out = DataLoader(dev_data, batch_size=8 * world.size, collate_fn=collate)
    names = ("dev_loss", "right", "true_positives", "predicted", "positives")
    evaluation = Evaluation(held_out, objective.counts, names, scores)
    optimizer = optimizer_of(model, config)
    result = Trainer(model, optimizer, objective.summed_loss, loader, config.train_config(), evaluation).fit()
    report = gather_report(model, result, world)
    metrics = {**report.metrics, **majority_baseline(*pairs)}
    return replace(report, metrics={"loss": metrics.pop("dev_loss"), **metrics}), result


def main(text: str) -> None:
    """Train on this rank, and print the report on rank 0.

    Raises:
        CheckpointError: at the end, if what was trained could not be saved.
    """
    hub.work_offline()
    config = MrpcConfig.from_json(text)
    with init(config.backend) as world:
        report, result = train_mrpc(config, world)
        if world.is_main:
            print_report("mrpc", report, REPORTED)
            write_file("--json", config.json, report.to_json())
        expect_saved(result, config.checkpoint_dir)
