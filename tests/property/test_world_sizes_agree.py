"""The number of ranks does not matter: one seed and one global batch give the same weights, up to rounding.

Per tensor, the largest difference is measured against the tensor's largest element.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from drawn import draws
from paceline.train import TrainConfig
from processes import paceline
from trainings import Outcome, Run, Settings, relative_difference, train
from twins import Pools

SIZES = (1, 2, 4)
BOUND = {torch.float32: 1e-4, torch.float64: 1e-9}


def trained(pools: Pools, size: int, run: Run) -> Outcome:
    """Rank 0's outcome; the replicas are the same, bit by bit, on every rank."""
    outcomes = pools.run(size, train, run)
    assert {outcome.weights_sha256 for outcome in outcomes} == {outcomes[0].weights_sha256}
    assert outcomes[0].error == ""
    return outcomes[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_ranks_and_micro_batches_give_the_same_weights_after_two_epochs(pools: Pools, dtype: torch.dtype) -> None:
    outcomes = {}
    for accumulate in (1, 2, 4):
        warmup = {"warmup_steps": 3}
        config = Settings(epochs=2, accumulate=accumulate, clip_norm=1.0, schedule=warmup, show_progress=False)
        run = Run(config, batch_size=24 // accumulate, samples=200, dtype=dtype)
        for size in SIZES:
            outcomes[size, accumulate] = trained(pools, size, run)
    reference = outcomes[1, 1]
    for case, outcome in outcomes.items():
        assert outcome.result.steps == reference.result.steps == 18, case
        assert relative_difference(outcome.weights, reference.weights) < BOUND[dtype], case


@pytest.mark.slow
@draws(12)
@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    accumulate=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**31),
)
def test_any_data_set_and_batch_size_even_with_empty_slices(
    pools: Pools, samples: int, batch_size: int, accumulate: int, seed: int
) -> None:
    config = TrainConfig(epochs=2, accumulate=accumulate, show_progress=False)
    run = Run(config, batch_size=batch_size, samples=samples, seed=seed)
    one, *others = [trained(pools, size, run) for size in SIZES]
    for other in others:
        assert relative_difference(other.weights, one.weights) < BOUND[torch.float64]


def digits(folder: Path, size: int) -> tuple[dict[str, Any], list[str]]:
    """Weights after an epoch of the real command, and the digest that each rank computed of its replica."""
    folder.mkdir()
    options = ["--epochs", "1", "--checkpoint-dir", "points", "--json", "report.json"]
    arguments = ("train", "digits", "--nproc", str(size), *options)
    done = paceline(folder, *arguments, fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "report.json").read_text())
    step = max((folder / "points").iterdir())
    assert step.name == f"step-{report['steps']:08d}"
    return load_file(step / "model.safetensors"), report["replica_sha256"]


@pytest.mark.slow
def test_the_digits_command_agrees_in_single_precision(tmp_path: Path) -> None:
    reference, _ = digits(tmp_path / "1", 1)
    for size in SIZES[1:]:
        weights, digests = digits(tmp_path / str(size), size)
        assert digests == [digests[0]] * size
        assert relative_difference(weights, reference) < BOUND[torch.float32], size
