"""The mrpc recipe equals single-process training, from pretrained and from random weights.

Only ranks import transformers, once each, because the import takes seconds.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from insides import COLUMNS, MrpcConfig, mrpc, read_folder, train_mrpc, weights_sha256
from paceline import World
from paceline.errors import UsageError
from twins import Pools

pytestmark = pytest.mark.slow

WORDS = "a the cat dog sat ran on under mat tree said that it was not red blue".split()  # noqa: SIM905
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "attention_dropout": 0.1,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Worlds that import transformers once."""
    with Pools(timeout=300) as pools:
        yield pools


def write_pairs(file: Path, count: int, seed: int) -> None:
    """Write pairs, labeling pairs with shared words as paraphrases."""
    generator = torch.Generator().manual_seed(seed)

    def words() -> list[str]:
        length = int(torch.randint(2, 9, (), generator=generator))
        return [WORDS[index] for index in torch.randint(len(WORDS), (length,), generator=generator).tolist()]

    lines = ["\t".join(COLUMNS)]
    for number in range(count):
        first = words()
        same = number % 3 > 0
        second = first if same else words()
        lines.append(f"{int(same)}\t{seed}{number}\t{seed}{number}b\t{' '.join(first)}\t{' '.join(second)}")
    file.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with MRPC files of a few short pairs."""
    folder = tmp_path_factory.mktemp("data")
    write_pairs(folder / "train.tsv", 45, 1)
    write_pairs(folder / "dev.tsv", 21, 2)
    return folder


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small decoder's configuration and a tokenizer with a larger vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder = tmp_path_factory.mktemp("architecture")
    words = ["[UNK]", "[PAD]", *WORDS, *(f"other{number}" for number in range(40))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def config(data: Path, architecture: Path) -> MrpcConfig:
    return MrpcConfig(
        data=str(data), random_init=str(architecture), batch_size=8, epochs=2, lr=1e-3, warmup_steps=2, log_every=1
    )


def train(world: World, config: MrpcConfig) -> tuple[dict[str, Any], str]:
    """Train on this rank; return the report and the digest of the weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    models: list[torch.nn.Module] = []
    made = mrpc.optimizer_of

    def seen(model: torch.nn.Module, config: MrpcConfig) -> torch.optim.Optimizer:
        models.append(model)
        return made(model, config)

    with patch.object(mrpc, "optimizer_of", seen), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from library imports
        report, _ = train_mrpc(config, world)
    return report, weights_sha256(models[0])


def refused(world: World, config: MrpcConfig) -> str:
    try:
        train(world, config)
    except UsageError as error:
        return str(error)
    return "nothing"


def lines_of(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_two_ranks_equal_one_and_learn(pools: Pools, config: MrpcConfig, tmp_path: Path) -> None:
    chosen = replace(config, dropout=0.0, balance=True, micro_batches=2, decay="wsd")
    [(alone, _)] = pools.run(1, train, chosen)
    file = tmp_path / "metrics.jsonl"
    (first, digest), (second, other) = pools.run(2, train, replace(chosen, metrics=str(file)))
    losses = [line["train/loss"] for line in lines_of(file) if "train/loss" in line]
    assert sum(losses[-6:]) < sum(losses[:6])
    assert digest == other
    assert first["replicas_identical"]
    assert first["steps"] == 12
    for name in ("loss", "accuracy", "f1"):
        assert first[name] == pytest.approx(alone[name], abs=1e-5), name
        assert first[name] == second[name], name


def test_virtual_ranks_give_the_same_weights_and_metrics_on_1_and_2_ranks(pools: Pools, config: MrpcConfig) -> None:
    chosen = replace(config, batch_size=9, max_steps=6, epochs=None, virtual_ranks=8, precision="bf16")
    outcomes = [outcome for size in (1, 2) for outcome in pools.run(size, train, chosen)]
    assert len({digest for _, digest in outcomes}) == 1
    assert len({tuple(report[name] for name in ("loss", "accuracy", "f1", "steps")) for report, _ in outcomes}) == 1


# -- pretrained weights ------------------------------------------------------------------------------------------------


def train_and_save(world: World, data: str, folder: str) -> dict[str, float]:
    """Train a small BERT with a plain loop and save it; return its metrics on the held-out pairs, with batch size 1."""
    from tokenizers import BertWordPieceTokenizer, Tokenizer
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, PreTrainedTokenizerFast

    train, dev = read_folder(Path(data))
    pieces = BertWordPieceTokenizer()
    pieces.train_from_iterator((pair.first for pair in train), vocab_size=80, show_progress=False)
    names = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]"}
    tokens = {f"{name}_token": token for name, token in names.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(pieces.to_str()), **tokens)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=len(tokenizer), num_labels=2, **size))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    texts = [pair.first for pair in train], [pair.second for pair in train]
    batch = tokenizer(*texts, padding=True, return_tensors="pt")
    for _ in range(15):
        optimizer.zero_grad()
        model(**batch, labels=torch.tensor([pair.label for pair in train])).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    losses, right = [], 0
    with torch.no_grad():
        for pair in dev:
            inputs = tokenizer(pair.first, pair.second, return_tensors="pt")
            out = model(**inputs, labels=torch.tensor([pair.label]))
            losses.append(float(out.loss))
            right += int(out.logits.argmax()) == pair.label
    return {"loss": sum(losses) / len(dev), "accuracy": right / len(dev)}


@pytest.fixture(scope="module")
def saved(pools: Pools, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """The folder of a trained model, and its metrics."""
    folder = tmp_path_factory.mktemp("saved")
    [metrics] = pools.run(1, train_and_save, str(data), str(folder))
    return folder, metrics


def test_saved_model_is_loaded_with_weights_and_tokenizer(
    pools: Pools, config: MrpcConfig, saved: tuple[Path, dict[str, float]]
) -> None:
    folder, metrics = saved
    chosen = replace(config, random_init=None, model=str(folder), epochs=1, lr=1e-12)  # effectively no step
    report, _ = pools.run(2, train, chosen)[0]
    assert report["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
    assert report["accuracy"] == pytest.approx(metrics["accuracy"], abs=1e-12)


def damaged(folder: Path, into: Path, damage: str) -> None:
    """Copy a saved model with one defect."""
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    match damage:
        case "weights of another model":
            config = json.loads((into / "config.json").read_text())
            (into / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
        case "half the weights":
            weights = (into / "model.safetensors").read_bytes()
            (into / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        case "empty tokenizer":
            (into / "tokenizer.json").unlink()
            (into / "tokenizer_config.json").unlink()
            (into / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")


DAMAGE = {
    "weights of another model": "of the model's tensors, such as 'bert.encoder.layer.1",
    "half the weights": "no classifier can be made from",
    "empty tokenizer": "of the text; give all of its files",
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.items(), ids=DAMAGE)
def test_incompatible_model_is_refused_in_one_line(
    pools: Pools, config: MrpcConfig, saved: tuple[Path, dict[str, float]], tmp_path: Path, damage: str, message: str
) -> None:
    # transformers initializes missing weights randomly, and says so only among other warnings.
    damaged(saved[0], tmp_path / "model", damage)
    [said] = pools.run(1, refused, replace(config, random_init=None, model=str(tmp_path / "model")))
    assert message in said
    assert "\n" not in said


def test_pairs_longer_than_the_model_supports_are_refused(
    pools: Pools, config: MrpcConfig, architecture: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 8}))
    (tmp_path / "tokenizer.json").write_bytes((architecture / "tokenizer.json").read_bytes())
    [said] = pools.run(1, refused, replace(config, random_init=str(tmp_path)))
    assert "but the model has 8 positions; lower --max-length" in said
