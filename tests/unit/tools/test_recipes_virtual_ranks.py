"""Recipes with ``--virtual-ranks``: one SHA-256 of the weights on any number of ranks."""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.processes.world import World
from paceline.tools.recipes.configs import DigitsConfig, LmConfig, MrpcConfig
from processes import paceline
from ranks import run_ranks
from real_data import real_data
from recipe_reports import FIELDS
from tiny_bert import make_bert

RUNS = ((1, None), (2, "gloo"), (4, None), (8, None))
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
    [sha] = set(report["replica_sha256"])
    own = {*FIELDS, "tokens_per_second"}
    metrics = {name: value for name, value in report.items() if name not in own}
    return sha, json.dumps(metrics, sort_keys=True), report["steps"]


def tiny(recipe: str, folder: Path) -> DigitsConfig | LmConfig | MrpcConfig:
    """Return the options of a training of few steps."""
    match recipe:
        case "digits":
            return DigitsConfig(max_steps=15, batch_size=120, virtual_ranks=8)  # the last batch of an epoch is short
        case "lm":
            (folder / "text.txt").write_text("the king of rats is not here, the rats are. " * 30, "utf-8")
            small = {"width": 16, "layers": 2, "heads": 2, "context": 16, "warmup_steps": 2, "sample": 0}
            return LmConfig(data=str(folder / "text.txt"), max_steps=12, batch_size=12, virtual_ranks=8, **small)
    data = str(real_data("mrpc"))  # may skip the test, which a rank cannot
    run_ranks(1, make_bert, data, str(folder), timeout=300)
    return MrpcConfig(data=data, random_init=str(folder), max_steps=6, batch_size=9, virtual_ranks=8)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["digits", "lm", "mrpc"])
def test_weights_and_metrics_have_the_same_bits_on_any_number_of_ranks(recipe: str, tmp_path: Path) -> None:
    config = tiny(recipe, tmp_path)
    runs = RUNS[:3] if recipe == "mrpc" else RUNS  # whose ranks import transformers
    found = {(size, backend): run_ranks(size, trained, config, backend=backend, timeout=300) for size, backend in runs}
    [alone] = found[1, None]
    assert alone[0] != alone[1]
    assert {run: outcomes for run, outcomes in found.items() if outcomes != [alone] * run[0]} == {}


@pytest.mark.slow
def test_a_command_has_one_sha256_on_1_rank_and_on_4_that_go_on_as_2(tmp_path: Path) -> None:
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
