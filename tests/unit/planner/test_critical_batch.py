"""The critical batch size: its estimate from gradients with known noise, and its effect on time and cost."""

from __future__ import annotations

import pytest
import torch

from insides import NoiseScale, estimate, trade_off, trainings
from insides import critical_batch_verdict as verdict


@pytest.mark.parametrize("ranks", [2, 4])
def test_noise_scale_matches_known_gradient_noise(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(1000, generator=generator, dtype=torch.float64) / 10
    sigma, batch = 0.5, 16
    steps = []
    for _ in range(200):
        noise = torch.randn(ranks, 1000, generator=generator, dtype=torch.float64) * sigma / batch**0.5
        local = true + noise
        norms = (local.square().sum(1).mean().item(), local.mean(0).square().sum().item())
        steps.append((*norms, float(batch * ranks), ranks))
    scale = estimate(steps)
    assert scale is not None
    assert scale.value == pytest.approx(1000 * sigma**2 / true.square().sum().item(), rel=0.1)
    assert scale.batch == batch * ranks


def test_noise_scale_is_unknown_with_few_steps_one_rank_or_dominating_noise() -> None:
    assert estimate([(2.0, 1.0, 8.0, 2)] * 4) is None
    assert estimate([(2.0, 1.0, 8.0, 1)] * 9) is None
    assert estimate([(2.0, 0.9, 8.0, 2)] * 9) == NoiseScale(8.0, None)


@pytest.mark.parametrize(
    ("batch", "steps", "samples"), [(1000.0, 2.0, 2.0), (250.0, 5.0, 1.25), (4000.0, 1.25, 5.0), (1.0, 1001.0, 1.001)]
)
def test_time_and_cost_trade_off(batch: float, steps: float, samples: float) -> None:
    assert trade_off(batch, 1000.0) == pytest.approx((steps, samples))


def test_time_and_cost_are_relative_to_the_fastest_and_the_cheapest_choice() -> None:
    # devices, global batch, seconds per step; the knee is at 64
    choices = [(1, 8.0, 1.0), (8, 64.0, 1.0), (16, 128.0, 1.25), (64, 512.0, 4.0)]
    assert [(training.time, training.cost) for training in trainings(choices, 64.0)] == [
        pytest.approx((9 / 1.875, 1.0)),
        pytest.approx((2 / 1.875, 16 / 9)),
        pytest.approx((1.0, 30 / 9)),
        pytest.approx((4.5 / 1.875, 32.0)),
    ]


@pytest.mark.parametrize(
    ("batch", "critical_batch", "words"),
    [
        (64, 900, "has 64: more ranks pay off. Training takes 15.1 times the fewest possible steps and 1.1 times"),
        (900, 900, "more ranks pay off only a little. Training takes 2.0 times the fewest possible steps and 2.0"),
        (4000, 900, "more ranks do not pay off"),
        (64, None, "far above the 64 samples of a step, so more ranks pay off"),
    ],
)
def test_verdict_states_whether_more_ranks_pay_off(batch: float, critical_batch: float | None, words: str) -> None:
    assert words in verdict(batch, critical_batch)
