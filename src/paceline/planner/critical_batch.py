"""The critical batch size: up to it, a larger batch mostly saves steps; beyond it, it mostly costs samples.

After McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training" (2018). Its
appendix A.1 estimates it from gradient norms. A rank's gradient over b samples and the average over B = N·b samples
have expected squared norms

    |G|² + S / b        and        |G|² + S / B

so together they give unbiased estimates of |G|², the true gradient's squared norm, and of S, the variance of one
sample's gradient. S and |G|² are averaged over steps before they are divided. The noise scale S / |G|² is the critical
batch size C, and steps and samples to the same loss follow (steps/Smin - 1)·(samples/Emin - 1) = 1:

    steps = Smin · (1 + C/B)        and        samples = Emin · (1 + B/C)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

FEWEST = 5
"""Minimum number of steps for an estimate."""
Norms = tuple[float, float, float, int]
"""One step: mean squared norm of the ranks' gradients, squared norm of their average, total samples, number of
ranks."""


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale of measured steps."""

    batch: float
    """Samples in a step, summed over all ranks."""
    value: float | None
    """Critical batch size in samples; None if noise hides the gradient."""


@dataclass(frozen=True)
class Training:
    """A training to the same loss with a global batch, each figure relative to the least possible or the least seen."""

    devices: int
    batch: float
    steps: float
    """Optimizer steps, relative to those with the true gradient."""
    samples: float
    """Samples, relative to those with a tiny batch."""
    time: float
    """Time, relative to the fastest of the compared trainings."""
    cost: float
    """Device hours, relative to the cheapest of the compared trainings."""


def estimate(steps: Sequence[Norms]) -> NoiseScale | None:
    """Return the noise scale; None if too few steps had two or more ranks."""
    gradients, variances = [], []
    for local, averaged, samples, ranks in steps:
        if ranks > 1 and samples > 0:
            gradients.append((ranks * averaged - local) / (ranks - 1))
            variances.append((local - averaged) * samples / (ranks - 1))
    gradient, variance = math.fsum(gradients), math.fsum(variances)
    if len(gradients) < FEWEST or variance <= 0:
        return None
    value = variance / gradient if gradient > 0 else None
    return NoiseScale(fmean(samples for _, _, samples, _ in steps), value)


def trade_off(batch: float, critical_batch: float) -> tuple[float, float]:
    """Return steps and samples, relative to the fewest possible. At the knee, `critical_batch`, both are 2."""
    return 1 + critical_batch / batch, 1 + batch / critical_batch


def trainings(choices: Sequence[tuple[int, float, float]], critical_batch: float) -> list[Training]:
    """Return the time and cost of trainings on a number of devices, with a global batch and the seconds of a step."""
    times = [trade_off(batch, critical_batch)[0] * step_s for _, batch, step_s in choices]
    costs = [devices * time for (devices, _, _), time in zip(choices, times, strict=True)]
    return [
        Training(devices, batch, *trade_off(batch, critical_batch), time / min(times), cost / min(costs))
        for (devices, batch, _), time, cost in zip(choices, times, costs, strict=True)
    ]


def verdict(batch: float, critical_batch: float | None) -> str:
    """Return a sentence that says whether a larger global batch pays."""
    if critical_batch is None:
        return (
            f"Noise hides the gradient: the critical batch size is far above the {batch:.0f} samples of a step, so "
            "more ranks pay off."
        )
    pays = "more ranks pay off" if batch < critical_batch / 2 else "more ranks pay off only a little"
    if batch > 2 * critical_batch:
        pays = "more ranks do not pay off"
    steps, samples = trade_off(batch, critical_batch)
    return (
        f"The critical batch size is about {critical_batch:.0f} samples at this point in training, and a step has "
        f"{batch:.0f}: {pays}. Training takes {steps:.1f} times the fewest possible steps and {samples:.1f} "
        "times the fewest possible samples."
    )
