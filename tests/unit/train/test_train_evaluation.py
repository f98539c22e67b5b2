"""Evaluation counts every sample exactly once, on any number of ranks, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.core.rng import rng_state
from paceline.core.world import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.train import Evaluation, evaluate
from trainings import digest, refusal
from twins import Pools

# Samples and batch sizes: even, uneven last batch, batches smaller than the number of ranks, one sample alone.
CASES = [(24, 6), (25, 6), (5, 2), (1, 1)]


def model_of(world: World) -> DistributedDataParallel:
    torch.manual_seed(5)
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    )


def data_of(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    return TensorDataset(torch.randn(samples, 3, generator=generator, dtype=torch.float64), torch.arange(samples))


def sums(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    x, numbers = batch
    # Powers of two, so that the sum tells how often each sample was there.
    return {"out": module(x).sum(), "which": (2.0 ** numbers.double()).sum()}, len(x)


def evaluated(world: World, samples: int, batch_size: int) -> tuple[dict[str, float], dict[str, float]]:
    """What evaluate() says, twice the same, and what one pass over the data on this rank alone says."""
    model = model_of(world)
    data = data_of(samples)
    evaluation = Evaluation(DataLoader(data, batch_size), sums, ("out", "which"))
    before = digest(rng_state())
    found = evaluate(model, evaluation)
    assert evaluate(model, evaluation) == found
    assert digest(rng_state()) == before
    assert model.training
    model.module.eval()
    with torch.no_grad():
        naive, _ = sums(model.module, data.tensors)
    return found, {name: float(value) / samples for name, value in naive.items()}


@pytest.mark.parametrize("size", [1, 3])
def test_every_sample_counts_exactly_once(pools: Pools, size: int) -> None:
    for samples, batch_size in CASES:
        results = pools.run(size, evaluated, samples, batch_size)
        for found, naive in results:
            assert found["which"] == (2**samples - 1) / samples == naive["which"], (samples, batch_size)
            assert found["out"] == pytest.approx(naive["out"], rel=1e-12), (samples, batch_size)
        assert all(found == results[0][0] for found, _ in results), "ranks differ"


def modes(world: World) -> tuple[list[bool], list[bool]]:
    model = model_of(world)
    model.train()
    model.module[1].eval()  # frozen statistics
    before = [part.training for part in model.modules()]
    evaluate(model, Evaluation(DataLoader(data_of(4), 2), sums, ("out", "which")))
    return before, [part.training for part in model.modules()]


def test_a_part_that_was_in_eval_mode_stays_there(pools: Pools) -> None:
    # Every part was put into training mode after an evaluation, so frozen statistics were updated from then on.
    [(before, after)] = pools.run(1, modes)
    assert before == after


def misnamed(world: World) -> str:
    return refusal(evaluate, model_of(world), Evaluation(DataLoader(data_of(4), 2), sums, ("out",)))


def test_metrics_without_a_name_are_refused(pools: Pools) -> None:
    [message] = pools.run(1, misnamed)
    assert message == "the evaluation's sums returned ['out', 'which'], but its names are ['out']"
