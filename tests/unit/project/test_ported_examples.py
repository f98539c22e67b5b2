"""Examples ported from other trainers end with the same results as the original or a plain loop."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.data import GlobalBatchSampler
from processes import paceline as command
from processes import script

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
EPOCHS = 5
"""Epochs of the autoencoder here, instead of 20."""


def output(
    folder: Path, *arguments: str, program: tuple[str, ...] = (), first: Callable[[], None] | None = None
) -> str:
    done = command(
        folder, *arguments, program=program, fork="all", first=first, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def autoencoder_by_hand() -> float:
    """Return the validation loss after a plain PyTorch loop over the same batches."""
    from sklearn.datasets import load_digits

    with paceline.set_seed(0):
        encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 3))
        net = nn.Sequential(encoder, nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 64)))
        images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
        order = torch.randperm(len(images))
    train, val = images[order[:1500]], images[order[1500:]]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    batches = GlobalBatchSampler(len(train), 50, shuffle=True)
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            F.mse_loss(net(train[batch]), train[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return F.mse_loss(net(val), val).item()


@pytest.mark.slow
def test_the_autoencoder_matches_a_plain_loop_on_one_and_two_ranks(tmp_path: Path) -> None:
    whole = (EXAMPLES / "autoencoder.py").read_text()
    assert "epochs=20" in whole
    file = script(tmp_path, whole.replace("epochs=20", f"epochs={EPOCHS}"))
    outputs = [output(tmp_path, program=(file,)), output(tmp_path, "run", "--nproc", "2", file)]
    losses = [float(re.findall(r"^loss ([\d.]+)$", text, re.MULTILINE)[0]) for text in outputs]
    assert losses == pytest.approx([autoencoder_by_hand()] * 2, rel=1e-3)
    assert losses[0] < 0.06  # a constant image has 0.07


THEIRS = """
import csv, json, sys
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer
from transformers import TrainingArguments

model, data, order = sys.argv[1:]
files = {"train": f"{data}/train.tsv", "validation": f"{data}/dev.tsv"}
table = load_dataset("csv", data_files=files, sep="\\t", quoting=csv.QUOTE_NONE)
tokenizer = AutoTokenizer.from_pretrained(model)
table = table.map(lambda rows: tokenizer(rows["#1 String"], rows["#2 String"], truncation=True, max_length=128),
                  batched=True).rename_column("Quality", "label")

class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return json.loads(order)  # of the same global batches

arguments = TrainingArguments("out", num_train_epochs=1, per_device_train_batch_size=16, learning_rate=5e-3,
                              use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
trainer = InOrder(
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=2),
    arguments,
    train_dataset=table["train"],
    eval_dataset=table["validation"],
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
)
trainer.train()
found = trainer.evaluate()
print(f"loss {found['eval_loss']:.6f}, accuracy {found['eval_accuracy']:.6f}")
"""


def make_pairs(folder: Path, words: list[str]) -> None:
    """Write MRPC's files; a pair is equivalent if the second sentence contains the first one's word."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 250), ("dev", 70)):
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for number in range(count):
            chosen = [words[int(index)] for index in torch.randint(len(words), (8,), generator=generator)]
            label = int(words.index(chosen[0]) < len(words) // 2)
            lines.append(f"{label}\t{number}\t{number}\t{chosen[0]} {' '.join(chosen[:label])}\t{' '.join(chosen[1:])}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", "utf-8")


def make_bert(folder: Path, words: list[str]) -> None:
    """Save a small BERT with random weights, without dropout, and its tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    tokens = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    with paceline.set_seed(0):
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        BertForSequenceClassification(BertConfig(vocab_size=len(tokens), **sizes, **off)).save_pretrained(folder)


def figures(text: str) -> dict[str, float]:
    [line] = re.findall(r"^loss .*$", text, re.MULTILINE)
    return {name: float(value) for name, value in (part.split() for part in line.split(", "))}


@pytest.mark.slow
def test_mrpc_matches_loss_and_accuracy_of_the_hugging_face_trainer(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    words = [f"word{number}" for number in range(20)]
    make_pairs(tmp_path / "data", words)
    make_bert(tmp_path / "model", words)
    folders = [str(tmp_path / "model"), str(tmp_path / "data")]
    order = json.dumps([index for batch in GlobalBatchSampler(250, 16, shuffle=True, seed=42) for index in batch])
    theirs = figures(output(tmp_path, program=(script(tmp_path, THEIRS), *folders, order)))
    how: Any = ["--model", folders[0], "--data", folders[1], "--epochs", "1", "--batch-size", "16", "--lr", "5e-3"]
    first = partial(import_module, "transformers.models.bert.modeling_bert")  # once, before the ranks are forked
    ours = figures(output(tmp_path, "run", "--nproc", "2", str(EXAMPLES / "glue_mrpc.py"), *how, first=first))
    assert ours["accuracy"] == theirs["accuracy"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
    assert ours["accuracy"] > 0.9
