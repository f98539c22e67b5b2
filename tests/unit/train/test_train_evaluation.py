"""Evaluation counts every sample exactly once on any number of ranks, and has no side effects."""

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

# Samples and batch sizes: even, uneven last batch, batches smaller than the number of ranks, a single sample.
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
    # Powers of two make the sum reveal how often each sample was counted.
    return {"out": module(x).sum(), "which": (2.0 ** numbers.double()).sum()}, len(x)


def evaluated(world: World, samples: int, batch_size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the results of evaluate(), called twice, and of one pass over the data on this rank alone."""
    model = model_of(world)
    data = data_of(samples)
    evaluation = Evaluation(DataLoader(data, batch_size), sums, ("out", "which"))
    state = digest(rng_state())
    metrics = evaluate(model, evaluation)
    assert evaluate(model, evaluation) == metrics
    assert digest(rng_state()) == state
    assert model.training
    model.module.eval()
    with torch.no_grad():
        naive, _ = sums(model.module, data.tensors)
    return metrics, {name: float(value) / samples for name, value in naive.items()}


@pytest.mark.parametrize("size", [1, 3])
def test_every_sample_counts_exactly_once(pools: Pools, size: int) -> None:
    for samples, batch_size in CASES:
        results = pools.run(size, evaluated, samples, batch_size)
        for metrics, naive in results:
            assert metrics["which"] == (2**samples - 1) / samples == naive["which"], (samples, batch_size)
            assert metrics["out"] == pytest.approx(naive["out"], rel=1e-12), (samples, batch_size)
        assert all(metrics == results[0][0] for metrics, _ in results), "ranks differ"


@pytest.mark.ranks(1)
def test_module_in_eval_mode_stays_in_eval_mode(world: World) -> None:
    # Evaluation switched every module to training mode, so frozen statistics were updated afterward.
    model = model_of(world)
    model.train()
    model.module[1].eval()  # frozen statistics
    initial = [part.training for part in model.modules()]
    evaluate(model, Evaluation(DataLoader(data_of(4), 2), sums, ("out", "which")))
    assert initial == [part.training for part in model.modules()]


@pytest.mark.ranks(1)
def test_metrics_without_a_name_are_refused(world: World) -> None:
    message = refusal(evaluate, model_of(world), Evaluation(DataLoader(data_of(4), 2), sums, ("out",)))
    assert message == "the evaluation's sums returned ['out', 'which'], but its names are ['out']"
