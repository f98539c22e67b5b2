"""The mrpc recipe: does a sentence say the same as another? A Hugging Face model on GLUE's MRPC, 3,668 pairs.

The default model is the one of the widespread tutorial that trains it with data parallelism, SmolLM2-360M-Instruct.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core import hub
from paceline.core.output.files import write_file
from paceline.core.processes.world import World, init
from paceline.core.state.rng import set_seed
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.tools.recipes.configs import MrpcConfig
from paceline.tools.recipes.paraphrases.data import Batch, PadToLongest, f1_score, majority_baseline
from paceline.tools.recipes.paraphrases.model import build_model, check_fitting, load_tokenizer, tokenize
from paceline.tools.recipes.recipe_report import Report, check_saved, gather_report, print_report
from paceline.train import Evaluation, Result, Trainer

REPORTED = ("accuracy", "f1", "loss", "majority_accuracy", "majority_f1")


@dataclass(frozen=True)
class Objective:
    """Loss and metrics of a classifier's micro-batches."""

    device: torch.device

    def logits(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits in float32, (samples, 2), and the labels."""
        inputs, labels = batch
        logits = model(**{name: tensor.to(self.device) for name, tensor in inputs.items()}).logits
        return logits.float(), labels.to(self.device)

    def summed_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """Return the summed cross-entropy of a batch, and its number of samples."""
        logits, labels = self.logits(model, batch)
        return F.cross_entropy(logits, labels, reduction="sum"), len(labels)

    def counts(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """Sum the loss of a batch, and count right answers, true positives, predictions and positives."""
        logits, labels = self.logits(model, batch)
        answers = logits.argmax(1)
        sums = {
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "right": (answers == labels).sum(),
            "true_positives": (answers & labels).sum(),
            "predicted": answers.sum(),
            "positives": labels.sum(),
        }
        return sums, len(labels)


def scores(means: dict[str, float]) -> dict[str, float]:
    """Return loss, accuracy and F1, given the means of :meth:`Objective.counts`."""
    f1 = f1_score(means["true_positives"], means["predicted"], means["positives"])
    return {"loss": means["loss"], "accuracy": means["right"], "f1": f1}


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
    check_fitting(net, (train_data, dev_data))
    if world.is_main:
        size = sum(parameter.numel() for parameter in net.parameters())
        print(f"{type(net).__name__}, {size:,} parameters; {len(train_data):,} pairs, {len(dev_data):,} held out")
        if note is not None:
            print(note)
    model = DistributedDataParallel(net.to(world.device))
    collate = PadToLongest(tokenizer.pad_token_id)
    objective = Objective(world.device)
    # A micro-batch that --micro-batch auto tries has the longest pairs, because any batch may come to have them.
    longest = sorted(train_data.samples, key=lambda sample: -len(sample.ids))
    config = config.fitted(model, objective.summed_loss, lambda rows: collate(longest[:rows]))
    loader = DataLoader(
        train_data,
        config.samples_per_micro_batch,
        shuffle=True,
        seed=config.seed,
        cost=train_data.lengths if config.balance else None,
        padded=config.balance,
        # The sampler takes it together with costs only.
        accumulate=config.accumulate if config.balance else 1,
        collate_fn=collate,
    )
    held_out = DataLoader(dev_data, batch_size=8 * (config.virtual_ranks or world.size), collate_fn=collate)
    names = ("loss", "right", "true_positives", "predicted", "positives")
    evaluation = Evaluation(held_out, objective.counts, names, scores)
    optimizer = optimizer_of(model, config)
    result = Trainer(model, optimizer, objective.summed_loss, loader, config.train_config(), evaluation).fit()
    report = gather_report(model, result, world)
    return replace(report, metrics={**report.metrics, **majority_baseline(*pairs)}), result


def main(text: str) -> None:
    """Train on this rank, and print the report on rank 0.

    Raises:
        CheckpointError: at the end, if the trained model could not be saved.
    """
    hub.work_offline()  # the command has fetched everything
    config = MrpcConfig.from_json(text)
    with init(config.backend) as world:
        report, result = train_mrpc(config, world)
        if world.is_main:
            print_report("mrpc", report, REPORTED)
            write_file("--json", config.json, report.to_json())
        check_saved(result, config.checkpoint_dir)
