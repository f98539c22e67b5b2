"""GLUE's MRPC with Paceline's Trainer: the same training as Hugging Face's run_glue.py --task_name mrpc by default.

paceline run --nproc 2 examples/glue_mrpc.py                            BERT and the data from the Hugging Face hub
paceline run --nproc 2 examples/glue_mrpc.py --model DIR --data DIR     from folders, without a network

DIR is a folder with a model and tokenizer saved by save_pretrained(), or with train.tsv and dev.tsv of MRPC.
docs/trainer.md shows this script next to run_glue.py. Not tested: BERT's pretrained weights, which are only on the hub.
Tests on GPUs: docs/gpu-status.md.
"""

import argparse
import csv
import os
from typing import Any

import torch
import torch.nn.functional as F
from datasets import load_dataset
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

import paceline
from paceline.data import DataLoader
from paceline.train import Evaluation, TrainConfig, Trainer


def load(folder: str | None) -> Any:
    """Return the datasets by name, with columns sentence1, sentence2 and label."""
    if folder is None:
        return load_dataset("glue", "mrpc")
    files = {"train": os.path.join(folder, "train.tsv"), "validation": os.path.join(folder, "dev.tsv")}
    columns = {"Quality": "label", "#1 String": "sentence1", "#2 String": "sentence2"}
    table = load_dataset("csv", data_files=files, sep="\t", quoting=csv.QUOTE_NONE, encoding="utf-8-sig")
    return table.rename_columns(columns).select_columns(list(columns.values()))


def sums(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    """Return the sums of a batch for loss, accuracy and F1."""
    labels = batch.pop("labels")
    logits = module(**batch).logits
    answers = logits.argmax(1)
    counts = {"right": answers == labels, "found": answers & labels, "answers": answers, "positives": labels}
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return {"loss": loss, **{name: count.sum() for name, count in counts.items()}}, len(labels)


def scores(means: dict[str, float]) -> dict[str, float]:
    """Return loss, accuracy and F1, given the means of sums()."""
    f1 = 2 * means["found"] / max(means["answers"] + means["positives"], 1e-9)
    return {"loss": means["loss"], "accuracy": means["right"], "f1": f1}


def main() -> None:
    """Train, and print loss, accuracy and F1 on the held-out pairs."""
    parser = argparse.ArgumentParser(description="GLUE's MRPC with Paceline's Trainer.")
    parser.add_argument("--model", default="bert-base-cased", help="model name on the hub, or folder")
    parser.add_argument("--data", help="folder with train.tsv and dev.tsv (default: glue/mrpc of the hub)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="pairs per step over all ranks (default: 32)")
    parser.add_argument("--lr", type=float, default=5e-5)
    options = parser.parse_args()
    with paceline.init() as world:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        with world.main_first():  # one rank downloads from the hub, and the others use its cache
            data = load(options.data)
        data = data.map(
            lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, max_length=128),
            batched=True,
            keep_in_memory=True,
        ).select_columns([*tokenizer.model_input_names, "label"])
        with paceline.set_seed(42):
            net = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2).to(world.device)
        model = paceline.DistributedDataParallel(net)

        def loaded(part: str, batch_size: int, **how: Any) -> DataLoader:
            pad: Any = DataCollatorWithPadding(tokenizer)
            return DataLoader(data[part], batch_size, collate_fn=lambda rows: pad(rows).to(world.device), **how)

        def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            found, count = sums(model, batch)
            return found["loss"], count

        names = ("loss", "right", "found", "answers", "positives")
        evaluation = Evaluation(loaded("validation", 64), sums, names, scores)
        config = TrainConfig(epochs=options.epochs, clip_norm=1.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
        training = loaded("train", options.batch_size, shuffle=True, seed=42)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.epochs * len(training))
        result = Trainer(model, optimizer, loss, training, config, evaluation, scheduler).fit()
        world.print(", ".join(f"{name} {value:.6f}" for name, value in result.metrics.items()))


if __name__ == "__main__":
    main()
