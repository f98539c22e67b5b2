"""The mrpc recipe: fine-tune a Hugging Face model to recognize paraphrases, on the 3,668 pairs of GLUE's MRPC."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.rng import set_seed
from paceline.core.world import World, init
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.tools import hub
from paceline.tools.recipes.configs import MrpcConfig
from paceline.tools.recipes.datasets import f1_score, tokenize
from paceline.tools.recipes.hugging_face import classifier, load_tokenizer, validate_fitting, validate_known
from paceline.tools.recipes.report import Report, finish, gather_report
from paceline.train import Evaluation, Result

REPORTED = ("accuracy", "f1", "loss")
WEIGHT_DECAY = 0.01
SUMS = ("loss", "right", "true_positives", "predicted", "positives")


def logits_of(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the logits in float32, (samples, 2), and the labels."""
    batch = {name: tensor.to(next(model.parameters()).device) for name, tensor in batch.items()}
    labels = batch.pop("labels")
    return model(**batch).logits.float(), labels


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Return the summed cross-entropy of a batch, and its number of samples."""
    logits, labels = logits_of(model, batch)
    return F.cross_entropy(logits, labels, reduction="sum"), len(labels)


def sums(model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    """Return the sums of a batch: loss, correct answers, true positives, predictions and positives."""
    logits, labels = logits_of(model, batch)
    answers = logits.argmax(1)
    counted = (answers == labels, answers & labels, answers, labels)
    values = [F.cross_entropy(logits, labels, reduction="sum"), *(part.sum() for part in counted)]
    return dict(zip(SUMS, values, strict=True)), len(labels)


def scores(means: dict[str, float]) -> dict[str, float]:
    """Return loss, accuracy and F1, given the means of :func:`sums`."""
    f1 = f1_score(means["true_positives"], means["predicted"], means["positives"])
    return {"loss": means["loss"], "accuracy": means["right"], "f1": f1}


def optimizer_of(model: nn.Module, config: MrpcConfig) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, fused=fused)


def train_mrpc(config: MrpcConfig, world: World) -> tuple[Report, Result]:
    """Train on this rank; the report is the same on every rank."""
    from transformers import DataCollatorWithPadding

    pairs, folder = config.pairs(), config.folder()
    tokenizer = load_tokenizer(folder)
    train_data, dev_data = (tokenize(tokenizer, part, config.max_length) for part in pairs)
    validate_known(tokenizer, [row["input_ids"] for row in train_data.rows])
    with set_seed(config.seed):
        net = classifier(folder, tokenizer, config.dropout, is_random=config.random_init is not None)
    validate_fitting(net, len(tokenizer), max(train_data.lengths + dev_data.lengths))
    size = sum(parameter.numel() for parameter in net.parameters())
    world.print(f"{type(net).__name__}, {size:,} parameters; {len(train_data):,} pairs, {len(dev_data):,} held out")
    model = DistributedDataParallel(net.to(world.device), virtual_ranks=config.virtual_ranks)
    collate: Any = DataCollatorWithPadding(tokenizer)
    held_out = DataLoader(dev_data, batch_size=8 * (config.virtual_ranks or world.size), collate_fn=collate)
    evaluation = Evaluation(held_out, sums, SUMS, scores)
    # The loader accepts `accumulate` only with `cost`.
    balance = {"cost": train_data.lengths, "padded": True, "accumulate": config.micro_batches}
    loading = {"collate_fn": collate, **(balance if config.balance else {})}
    result = config.train(model, optimizer_of(model, config), loss, train_data, evaluation, **loading)
    return gather_report(model, result, world), result


def main(text: str) -> None:
    """Train on this rank, and print the report on rank 0."""
    hub.work_offline()  # the command has downloaded everything before starting ranks
    config = MrpcConfig.from_json(text)
    with init(config.backend) as world:
        report, result = train_mrpc(config, world)
        finish("mrpc", report, REPORTED, result, config)
