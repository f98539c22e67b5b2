"""Learning rates, as tables."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.train.learning_rate import lr_factor, scaled_lr

SCALED = [
    # lr, rule, batch, base -> lr
    (0.1, "none", 256, None, 0.1),
    (0.1, "none", 256, 32, 0.1),
    (0.1, "linear", 256, 32, 0.8),
    (0.1, "linear", 16, 32, 0.05),
    (0.1, "sqrt", 128, 32, 0.2),
    (0.1, "sqrt", 8, 32, 0.05),
    (0.1, "linear", 32, 32, 0.1),
]


@pytest.mark.parametrize(("lr", "rule", "batch", "base", "expected"), SCALED)
def test_the_learning_rate_follows_the_global_batch(lr, rule, batch, base, expected) -> None:
    assert scaled_lr(lr, rule, batch, base) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("base", [None, 0, -8])
def test_a_rule_without_a_base_batch_size_is_refused(base: int | None) -> None:
    with pytest.raises(UsageError, match="'sqrt' needs base_batch_size"):
        scaled_lr(0.1, "sqrt", 32, base)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UsageError, match="none, linear or sqrt, not 'cubic'"):
        scaled_lr(0.1, "cubic", 32, 32)  # type: ignore[arg-type]


FACTORS = [
    # warm-up, decay, total -> the factor of each step
    (0, "none", 4, [1, 1, 1, 1]),
    (2, "none", 4, [1 / 2, 1, 1, 1]),
    (4, "none", 4, [1 / 4, 2 / 4, 3 / 4, 1]),
    (6, "none", 4, [1 / 6, 2 / 6, 3 / 6, 4 / 6]),
    (0, "linear", 4, [1, 3 / 4, 2 / 4, 1 / 4]),
    (2, "linear", 6, [1 / 2, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
    (6, "linear", 4, [1 / 6, 2 / 6, 3 / 6, 4 / 6]),
    (4, "linear", 4, [1 / 4, 2 / 4, 3 / 4, 1]),
]


@pytest.mark.parametrize(("warmup", "decay", "total", "expected"), FACTORS)
def test_the_factor_rises_in_the_warm_up_and_falls_towards_zero(warmup, decay, total, expected) -> None:
    assert [lr_factor(step, warmup, decay, total) for step in range(total)] == pytest.approx(expected, rel=1e-12)


def test_the_factor_is_never_negative_behind_the_last_step() -> None:
    assert [lr_factor(step, 2, "linear", 6) for step in (6, 7, 100)] == [0, 0, 0]
