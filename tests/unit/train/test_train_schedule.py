"""Learning rates, as tables."""

from __future__ import annotations

import pytest
import torch

from paceline.train.schedule import lr_factor, scaled_lr

SCALED = [
    # lr, rule, batch, base -> lr
    (0.1, "none", 256, 32, 0.1),
    (0.1, "linear", 256, 32, 0.8),
    (0.1, "linear", 16, 32, 0.05),
    (0.1, "sqrt", 128, 32, 0.2),
]


@pytest.mark.parametrize(("lr", "rule", "batch", "base", "expected"), SCALED)
def test_learning_rate_follows_the_global_batch_size(lr, rule, batch, base, expected) -> None:
    assert scaled_lr(lr, rule, batch, base) == pytest.approx(expected, rel=1e-12)


FACTORS = [
    # warm-up, decay, decay_steps, decay_to, total -> the factor of each step
    (6, "linear", None, 0.0, 4, [1 / 6, 2 / 6, 3 / 6, 4 / 6]),
    (2, "linear", None, 0.0, 6, [1 / 2, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
    (2, "cosine", None, 0.0, 4, [1 / 2, 1, 1, 1 / 2]),
    (0, "linear", None, 0.5, 4, [1, 7 / 8, 6 / 8, 5 / 8]),
    (2, "wsd", 2, 0.0, 6, [1 / 2, 1, 1, 1, 1, 1 / 2]),
    (1, "wsd", 4, 0.5, 6, [1, 1, 1, 7 / 8, 6 / 8, 5 / 8]),
    (3, "wsd", 9, 0.0, 6, [1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3]),  # at most the number of steps after the warm-up
    (0, "wsd", None, 0.0, 20, [1] * 19 + [1 / 2]),
    (
        0,
        "wsd",
        None,
        0.0,
        4,
        [1, 1, 1, 1],
    ),  # a tenth is less than a step, so the decay is one step, whose factor is still 1
]


@pytest.mark.parametrize(("warmup", "decay", "decay_steps", "decay_to", "total", "expected"), FACTORS)
def test_factor_follows_the_decay_to_its_end(warmup, decay, decay_steps, decay_to, total, expected) -> None:
    factors = [lr_factor(step, warmup, decay, total, decay_steps, decay_to) for step in range(total)]
    assert factors == pytest.approx(expected, rel=1e-12)
    if warmup < total:
        assert lr_factor(total, warmup, decay, total, decay_steps, decay_to) == pytest.approx(decay_to)


def test_cosine_equals_torch() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9, eta_min=0.2)
    for step in range(9):
        assert 2.0 * lr_factor(step, 0, "cosine", 9, decay_to=0.1) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()
