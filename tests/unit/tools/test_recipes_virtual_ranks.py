"""Recipes with ``--virtual-ranks``: one SHA-256 of the weights on any number of ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as library
from paceline.core.processes.world import World
from paceline.core.state.rng import rng_state
from paceline.errors import UsageError
from paceline.tools.recipes.configs import DigitsConfig, LmConfig, MrpcConfig
from paceline.tools.recipes.slice_cost import SliceCost, advice
from processes import paceline
from ranks import run_ranks
from real_data import real_data
from trainings import digest

RUNS = ((1, None), (2, None), (4, None), (8, None), (2, "gloo"), (4, "gloo"), (8, "gloo"))
"""Numbers of ranks, and their backends."""


def trained(world: World, config: DigitsConfig | LmConfig | MrpcConfig) -> list[Any]:
    """Train in fp32 and in bf16; the SHA-256 of the weights and the metrics of each."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries while they are imported
        return [_outcome(world, replace(config, precision=precision)) for precision in ("fp32", "bf16")]


def _outcome(world: World, config: Any) -> Any:
    from paceline.tools.recipes.digits import train_digits
    from paceline.tools.recipes.lm import train_lm
    from paceline.tools.recipes.mrpc import train_mrpc

    match config:
        case DigitsConfig():
            report, _ = train_digits(config, world)
        case LmConfig():
            _, report, _ = train_lm(config, config.corpus(), world)
        case _:
            report, _ = train_mrpc(config, world)
    [sha] = set(report.replica_sha256)
    metrics = {name: value for name, value in report.metrics.items() if name != "tokens_per_second"}
    return sha, json.dumps(metrics, sort_keys=True), report.steps


def tiny(recipe: str, folder: Path) -> DigitsConfig | LmConfig | MrpcConfig:
    """Return the options of a training of few steps."""
    match recipe:
        case "digits":
            return DigitsConfig(max_steps=15, batch_size=120, virtual_ranks=8)  # the last batch of an epoch is short
        case "lm":
            (folder / "text.txt").write_text("the king of rats is not here, the rats are. " * 30, "utf-8")
            small = {"width": 16, "layers": 2, "heads": 2, "context": 16, "warmup_steps": 2, "sample": 0}
            return LmConfig(data=str(folder / "text.txt"), max_steps=12, batch_size=12, virtual_ranks=8, **small)
    run_ranks(1, make_bert, str(folder), timeout=300)
    return MrpcConfig(data=str(real_data("mrpc")), random_init=str(folder), max_steps=6, batch_size=9, virtual_ranks=8)


def make_bert(world: World, folder: str) -> None:
    """Write the configuration of a small BERT with dropout, and a tokenizer that has learnt its words from MRPC."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig

    from paceline.tools.recipes.paraphrases.data import read_folder

    pieces = BertWordPieceTokenizer()
    pairs = read_folder(real_data("mrpc")).train[:200]
    pieces.train_from_iterator((pair.first for pair in pairs), vocab_size=300, show_progress=False)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertConfig(vocab_size=300, **sizes).save_pretrained(folder)
    pieces.save(f"{folder}/tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["digits", "lm", "mrpc"])
def test_weights_and_metrics_have_the_same_bits_on_1_2_4_and_8_ranks(recipe: str, tmp_path: Path) -> None:
    config = tiny(recipe, tmp_path)
    found = {(size, backend): run_ranks(size, trained, config, backend=backend, timeout=300) for size, backend in RUNS}
    [alone] = found[1, None]
    assert alone[0] != alone[1]
    assert {run: outcomes for run, outcomes in found.items() if outcomes != [alone] * run[0]} == {}


@pytest.mark.slow
def test_the_command_has_one_sha256_on_1_and_2_ranks_whatever_their_share_of_the_cores(tmp_path: Path) -> None:
    digests = set()
    for nproc in ("1", "2"):
        options = ("--virtual-ranks", "8", "--batch-size", "120", "--epochs", "1")
        done = paceline(tmp_path, "train", "digits", "--nproc", nproc, *options)
        assert (done.returncode, done.stderr) == (0, "")
        [digest] = re.findall(r"SHA-256 of the weights (\w{64})", done.stdout)
        digests.add(digest)
    assert len(digests) == 1


@pytest.mark.slow
def test_a_recipe_goes_on_with_fewer_ranks_to_the_same_sha256(tmp_path: Path) -> None:
    digests = set()
    options = ("--virtual-ranks", "8", "--batch-size", "120", "--epochs", "1", "--report", "report.json")
    orders = "forward rank=3 at=4; stepped rank=3 at=2 start=1"
    for nproc, more, struck in ((1, (), ""), (4, ("--min-nproc", "2"), orders)):
        started = ("train", "digits", "--nproc", str(nproc), *more, *options)
        done = paceline(tmp_path, *started, PACELINE_FAILPOINTS=struck)
        assert done.returncode == 0, done.stderr
        digests |= set(re.findall(r"SHA-256 of the weights (\w{64})", done.stdout))
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(change["from"], change["to"], change["steps_redone"]) for change in report["changes"]] == [(4, 2, 0)]
    assert len(digests) == 1


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DigitsConfig(virtual_ranks=6), "--virtual-ranks must be a power of two"),
        (DigitsConfig(virtual_ranks=64), "--batch-size 32 cannot be cut into --virtual-ranks 64 slices; give at least"),
        (DigitsConfig(virtual_ranks=8, accumulate=2), "--virtual-ranks 8 cuts a step's batch into its micro-batches"),
        (DigitsConfig(virtual_ranks=8, micro_batch="auto"), "--micro-batch auto depends on the number of ranks"),
        (MrpcConfig(virtual_ranks=8, balance=True), "--balance cuts batches into unlike slices for the ranks"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line_before_any_rank_starts(config: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        config.check()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digits", "--nproc", "3", "--force"], "3 ranks do not divide virtual_ranks=8; start 1 or 2 or 4 or"),
        (["profile", "digits", "--nproc", "3", "--force"], "3 ranks do not divide virtual_ranks=8; start 1 or 2 or 4"),
        (["compare", "digits"], "--virtual-ranks is this library's alone, and compare runs other wrappers, too; leave"),
    ],
)
def test_a_command_that_cannot_work_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = paceline(tmp_path, *arguments, "--virtual-ranks", "8")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


# -- small slices ---------------------------------------------------------------------------------------------------


def test_slices_that_cost_more_than_a_quarter_are_named_with_the_number_that_would_do() -> None:
    # 1 ms that no slice is without, and 0.5 ms for its samples: 8 slices take 8 + 4 ms in place of 1 + 4.
    cost = SliceCost(slices=8, once=1.5e-3, twice=2.0e-3)
    assert [cost.more(slices) for slices in (8, 4, 2, 1)] == pytest.approx([7 / 5, 3 / 5, 1 / 5, 0])
    message = advice(cost, virtual_ranks=16, samples=2)
    assert message is not None
    assert (
        "virtual_ranks=16 cuts a batch into slices of 2, which take 1.5 ms, and twice as many samples 2.0 ms" in message
    )
    assert "about 140% longer" in message
    assert "virtual_ranks=4 would take 20% longer" in message
    assert "\n" not in message
    assert advice(SliceCost(slices=8, once=1.5e-3, twice=2.99e-3), 16, 2) is None
    assert SliceCost(slices=8, once=1.0e-3, twice=2.5e-3).more(8) == 0  # twice as many took more than twice as long
    assert SliceCost(slices=8, once=1.5e-3, twice=1.0e-3).more(8) == 7  # and less than once


SMALL, LARGE = ([1.5, 1.52, 1.51, 1.6] * 4, [2.0, 2.1, 2.02, 2.03] * 4), ([1.5, 1.52, 1.51, 1.6] * 4, [2.99, 3.0] * 8)


@pytest.mark.parametrize(
    ("once", "twice", "is_told"),
    [
        (*SMALL, True),
        (*LARGE, False),
        ([9.0, *SMALL[0]], [7.0, *SMALL[1]], True),  # few times of many are longer
        # Twice as many take twice as long, but other programs run beside it; the shortest times alone would tell.
        ([1.6, 2.4, 1.7, 3.0, 1.8, 2.2, 1.6, 2.6], [3.0, 2.7, 4.4, 4.0, 5.2, 3.1, 3.3, 3.9], False),
        ([1.6, 2.4, 1.7], [3.0, 2.7, 4.4], False),
        ([1.0, *[2.0] * 5], [2.0, *[2.5] * 5], False),  # or the median alone
        ([6.0, 6.2, 6.1], [2.8, 2.9, 3.0], False),  # four ranks on two loaded cores
        ([1.5, 1.52, 1.6], [2.0, 2.1, 2.2], True),
    ],
)
def test_times_that_do_not_agree_tell_nothing(once: list[float], twice: list[float], is_told: bool) -> None:
    message = advice(SliceCost.of(8, once, twice), virtual_ranks=16, samples=2)
    assert (message is not None) == is_told


def measured(world: World, batch_size: int) -> tuple[str, bool]:
    """What rank 0 says before training with so large a batch, and whether the model is as it was."""
    config = DigitsConfig(virtual_ranks=32, batch_size=batch_size)
    torch.manual_seed(0)
    model = library.DistributedDataParallel(nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8)))
    before, streams = digest(model.state_dict()), digest(rng_state())
    with contextlib.redirect_stdout(io.StringIO()) as said:
        chosen = config.fitted(model, lambda module, x: (module(x).square().sum(), len(x)), lambda n: torch.ones(n, 64))
    assert chosen == config
    return said.getvalue(), (digest(model.state_dict()), digest(rng_state())) == (before, streams)


def test_slices_are_timed_before_training_and_the_model_is_left_as_it_was() -> None:
    (said, is_unchanged), second = run_ranks(2, measured, 128)
    assert is_unchanged
    assert not said or said.startswith("virtual_ranks=32 cuts a batch into slices of 4, which take ")  # as times are
    assert second == ("", True)
