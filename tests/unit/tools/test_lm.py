"""The lm recipe: text, tokens and windows, model and optimizer, training on several ranks, and its command."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from insides import LmConfig, datasets, lm
from paceline import World, set_seed, unwrap
from processes import paceline
from recipe_reports import FIELDS
from twins import Pools

SMALL: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "context": 16, "warmup_steps": 5, "sample": 0}


def prose(words: int) -> str:
    """Return text made of the same few words in varying order."""
    choose = random.Random(words).choice
    return " ".join(choose(["the", "king", "of", "naïve", "rats", "is\n", "not", "here,"]) for _ in range(words))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lm") / "text.txt"
    path.write_text(prose(600), "utf-8")
    return path


# -- text and tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [9, 10, 11])
def test_windows_predict_every_token_but_the_first_exactly_once(length: int) -> None:
    tokens = torch.arange(length)
    windows = datasets.Windows(tokens, 5)
    pairs = [(int(i), int(t)) for x, y in (windows[k] for k in range(len(windows))) for i, t in zip(x, y, strict=True)]
    assert [pair for pair in pairs if pair[1] != datasets.IGNORED] == [(k, k + 1) for k in range(length - 1)]
    assert windows.tokens == length - 1
    assert all(len(part) == 5 for k in range(len(windows)) for part in windows[k])


def test_validation_is_the_last_tenth_including_its_first_character() -> None:
    corpus = datasets.make_corpus("ab" * 50, 8)
    assert (corpus.training.tokens, corpus.validation.tokens) == (89, 10)


def test_decoding_restores_the_characters() -> None:
    words = "naïve 木 🙂\n\tend"
    tokenizer = datasets.Characters(words)
    assert tokenizer.size == len(set(words))
    tokens = tokenizer.encode(words)
    assert (tokens.dtype, int(tokens.max())) == (torch.int64, tokenizer.size - 1)
    assert tokenizer.decode(tokens) == words


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes("\ufeffabc".encode())
    assert datasets.read_text(str(tmp_path / "text.txt")) == "abc"


# -- the model and its optimizer ---------------------------------------------------------------------------------------


def trained_a_little(vocabulary: int = 11) -> lm.GPT:
    with set_seed(1):
        model = lm.GPT(vocabulary, context=12, width=16, layers=2, heads=2)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)  # zeros would hide mistakes
    return model


@torch.no_grad()
def test_token_does_not_affect_earlier_predictions() -> None:
    model = trained_a_little()
    tokens = torch.randint(0, 11, (1, 12), generator=torch.Generator().manual_seed(0))
    expected = model(tokens)
    for position in range(12):
        changed = tokens.clone()
        changed[0, position] = (tokens[0, position] + 1) % 11
        after = model(changed)
        torch.testing.assert_close(after[0, :position], expected[0, :position])
        assert (after[0, position] - expected[0, position]).abs().max() > 1e-3


@pytest.mark.ranks(1)
def test_muon_trains_the_blocks_and_adamw_the_rest(world: World) -> None:
    """Train one model by the combined optimizer, and another by torch's two optimizers."""
    ours, theirs = trained_a_little(), trained_a_little()
    matrices = theirs.matrices()
    others = [parameter for parameter in theirs.parameters() if parameter not in set(matrices)]
    combined = lm.optimizer_for(ours, lr=0.02)
    apart = [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.99), eps=1e-10, weight_decay=0.0, fused=True),
    ]
    tokens = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(0))
    for step in range(5):
        if step == 3:  # a new optimizer takes over its state
            state, combined = combined.state_dict(), lm.optimizer_for(ours, lr=1.0)
            combined.load_state_dict(state)
        for model, optimizers in ((ours, [combined]), (theirs, apart)):
            model.zero_grad()
            model(tokens).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name


# -- training on several ranks -----------------------------------------------------------------------------------------


def trained(world: World, config: LmConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the training report and rank 0's generated text."""
    corpus = config.corpus()
    model, report, _ = lm.train_lm(config, corpus, world)
    sample = lm.written_on(unwrap(model), corpus.validation[0][0][:1], 20, config.context, seed=3)
    return report, [corpus.tokenizer.decode(sample)]


@pytest.mark.slow
def test_ranks_and_micro_batches_give_the_same_loss(pools: Pools, text: Path) -> None:
    config = LmConfig(data=str(text), epochs=1, batch_size=8, **SMALL)
    losses = {}
    for size, accumulate in ((1, 1), (2, 2)):
        reports = [report for report, _ in pools.run(size, trained, replace(config, micro_batches=accumulate))]
        assert len({sha for report in reports for sha in report["replica_sha256"]}) == 1
        losses[size, accumulate] = reports[0]["loss"]
    assert list(losses.values()) == pytest.approx([losses[1, 1]] * 2, rel=1e-4)
    assert losses[1, 1] < 2.6  # a uniform prediction gives 3.1


@pytest.mark.parametrize("size", [1, 2])
def test_averages_every_few_steps_end_with_equal_replicas(pools: Pools, text: Path, size: int) -> None:
    config = LmConfig(data=str(text), epochs=1, batch_size=8, sync_every=4, **SMALL)
    for report, _ in pools.run(size, trained, config):
        assert report["replicas_identical"]
        assert report["gradient_bytes_per_step"] == 0
        assert report["loss"] < 3.0  # a uniform prediction gives 3.1


def naive_loss(model: torch.nn.Module, tokens: Tensor, context: int) -> float:
    """Compute the reported loss by its definition, one token at a time."""
    losses = []
    for index in range(1, len(tokens)):
        start = (index - 1) // context * context
        logits = model(tokens[None, start:index])[0, -1]
        losses.append(F.cross_entropy(logits, tokens[index]))
    return float(torch.stack(losses).double().mean())


def loss_twice(world: World, config: LmConfig) -> tuple[float, float]:
    corpus = config.corpus()
    model, report, _ = lm.train_lm(config, corpus, world)
    training, validation = (corpus.tokenizer.encode(part) for part in datasets.split(datasets.read_text(config.data)))
    tokens = torch.cat([training[-1:], validation])
    with torch.no_grad():
        return report["loss"], naive_loss(unwrap(model), tokens, config.context)


def test_reported_loss_is_the_mean_over_all_validation_tokens(pools: Pools, text: Path) -> None:
    config = LmConfig(data=str(text), epochs=1, batch_size=16, **SMALL)
    for reported, expected in pools.run(2, loss_twice, config):
        assert reported == pytest.approx(expected, rel=1e-5)


# -- the command -------------------------------------------------------------------------------------------------------


TEXT = "so we'll live, and pray, and sing, and tell old tales, and laugh\n" * 60
OPTIONS = ["--context", "32", "--width", "16", "--layers", "1", "--heads", "2", "--epochs", "1", "--batch-size", "32"]


PROMISED = {"loss": float, "perplexity": float, "tokens_per_second": float, **FIELDS}


def test_run_reports_its_figures_and_generates_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--data", "text.txt", *OPTIONS, "--sample", "40", "--json", "report.json"]
    done = paceline(tmp_path, "train", "lm", "--nproc", "2", *options, fork="all", OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: type(value) for name, value in report.items()} == PROMISED
    assert (report["world_size"], report["replicas_identical"]) == (2, True)
    assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))
    assert report["tokens_per_second"] == pytest.approx(32 * report["samples_per_second"])
    lines = [" ".join(line.replace("│", " ").split()) for line in done.stdout.splitlines()]
    assert f"loss {report['loss']:.4f}" in lines
    assert f"perplexity {report['perplexity']:.4f}" in lines
    assert any(line.startswith("tokens per second") for line in lines)
    table, sample = done.stdout.split("A sample of the model's text:\n")
    assert "lm, 2 ranks" in table
    assert len(sample) == 1 + 40 + 1  # the prompt token, the requested tokens and the newline of print
    assert set(sample) <= set(TEXT)


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["gate rank=1 at=1", "forward rank=1 at=4", "boundary rank=0 at=4"])
def test_killed_rank_between_averages_changes_no_bit(tmp_path: Path, failure: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--data", "text.txt", *OPTIONS, "--sample", "0", "--sync-every", "2", "--max-restarts", "1"]
    shas = []
    for orders in ("", failure):
        done = paceline(
            *(tmp_path, "train", "lm", "--nproc", "2", *options, "--json", "report.json"),
            **{"fork": "all", "OMP_NUM_THREADS": "1", "PACELINE_FAILPOINTS": orders},
        )
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["restarts"] == bool(orders)
        shas.append(report["replica_sha256"])
    assert shas[0] == shas[1]
