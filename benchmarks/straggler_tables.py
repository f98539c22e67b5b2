"""Various tables of compute times, with and without slow ranks, for ``straggler_detection.py``.

A table combines noise, a plan of slow ranks, and steps that are slow on all ranks. `find_stragglers` was developed with
the kinds in `NOISES` and `PLANS`; `OTHER_NOISES` and `OTHER_PLANS` are only for evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Array = NDArray[np.float64]
Noise = Callable[[Generator, int, int, float], Array]
"""Returns time factors of shape (steps, ranks) with a median near 1. A scale of 0.1 means 10 %."""


@dataclass
class Plan:
    """Time factors, and the first and last slow step of each slow rank."""

    factors: Array
    slow: dict[int, tuple[int, int]] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)
    """For each rank that slows down gradually, the number of steps until it counts as slow."""

    def slow_down(self, rank: int, first: int, end: int, factor: float) -> None:
        """Make `rank` slower from step `first` up to, but not including, `end`."""
        self.factors[first:end, rank] *= factor
        self.slow[rank] = (first, end - 1)

    def ramp(self, rank: int, first: int, top: int, factor: float) -> None:
        """Make `rank` gradually slower from step `first` to `top`."""
        self.factors[first:top, rank] *= np.linspace(1, factor, top - first)
        self.factors[top:, rank] *= factor
        self.slow[rank] = (first, len(self.factors) - 1)
        self.begins[rank] = round((top - first) * min(0.5, 0.15 / (factor - 1)))


Planner = Callable[[Generator, int, int, float], Plan]
"""Returns a plan, given the numbers of steps and ranks and the factor of slow steps."""


def gaussian(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    return np.clip(1 + scale * draw.standard_normal((steps, ranks)), 0.05, None)


def log_normal(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    return np.exp(scale * draw.standard_normal((steps, ranks)))


def heavy_tails(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    return np.exp(np.clip(scale * draw.standard_t(3, (steps, ranks)) / 3**0.5, -2, 3))


def lasting(draw: Generator, steps: int, ranks: int, scale: float, kept: float = 0.6) -> Array:
    """Return autocorrelated noise: part of it carries over to the next step."""
    noise = draw.standard_normal((steps, ranks))
    for step in range(1, steps):
        noise[step] = kept * noise[step - 1] + (1 - kept**2) ** 0.5 * noise[step]
    return np.exp(scale * noise)


def shocks(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    """Return noise of steps that vary in length, with a pause of all ranks every few steps."""
    common = np.exp(0.3 * draw.standard_normal((steps, 1)))
    common[:: int(draw.integers(7, 60))] *= 3
    return log_normal(draw, steps, ranks, scale) * common


def warm_up(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    noise = gaussian(draw, steps, ranks, scale)
    first = int(draw.integers(2, 12))
    noise[:first] *= np.linspace(draw.uniform(3, 40), 1.5, first)[:, None] * log_normal(draw, first, ranks, 0.3)
    return noise


def missing(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    noise = log_normal(draw, steps, ranks, scale)
    noise[draw.random((steps, ranks)) < draw.uniform(0.01, 0.2)] = np.nan
    return noise


def spikes(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    """Return noise with occasional steps that wait for late data on one rank."""
    return gaussian(draw, steps, ranks, scale) + (draw.random((steps, ranks)) < 0.03) * draw.uniform(
        0.5, 4, (steps, ranks)
    )


def laplace(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    return np.exp(scale / 2**0.5 * draw.laplace(size=(steps, ranks)))


def skewed(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    return 1 + scale * (draw.exponential(size=(steps, ranks)) - 0.69)


def uneven(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    """Return noise that is larger on some ranks than on others."""
    return np.exp(scale * draw.standard_normal((steps, ranks)) * draw.uniform(0.3, 1.5, ranks))


def pauses(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    """Return noise with periodic pauses of each rank in different steps, and periodic saves on rank 0."""
    noise = gaussian(draw, steps, ranks, scale)
    every = int(draw.integers(10, 50))
    for rank in range(ranks):
        noise[int(draw.integers(every)) :: every, rank] += 1.5
    noise[:: int(draw.integers(30, 100)), 0] += 3
    return noise


def swing(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    """Return noise whose scale slowly rises and falls on all ranks together."""
    period = draw.uniform(0.1, 1.5) * steps
    return gaussian(draw, steps, ranks, scale) * (1.5 + np.sin(np.arange(steps) / period * 6.28))[:, None]


def long_lasting(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    """Return noise with a component that persists for tens of steps."""
    slow = lasting(draw, steps, ranks, scale / 4, 0.9)
    return log_normal(draw, steps, ranks, scale) * slow


def coarse(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    return np.maximum(np.round(gaussian(draw, steps, ranks, scale) * 20), 1) / 20


def gaps(draw: Generator, steps: int, ranks: int, scale: float) -> Array:
    """Return noise of ranks that start late or are missing for a while."""
    noise = log_normal(draw, steps, ranks, scale)
    for rank in draw.permutation(ranks)[: ranks // 4].tolist():
        first = int(draw.integers(steps))
        noise[first : first + steps // 8, rank] = np.nan
    return noise


NOISES: dict[str, Noise] = {
    f.__name__: f for f in (gaussian, log_normal, heavy_tails, lasting, shocks, warm_up, missing, spikes)
}
OTHER_NOISES: dict[str, Noise] = {
    f.__name__: f for f in (laplace, skewed, uneven, pauses, swing, long_lasting, coarse, gaps)
}


def _plan(steps: int, ranks: int) -> Plan:
    return Plan(np.ones((steps, ranks)))


def even(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    return _plan(steps, ranks)


def one(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    """Make one rank slow from the start."""
    plan = _plan(steps, ranks)
    plan.slow_down(int(draw.integers(ranks)), 0, steps, factor)
    return plan


def several(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    """Make several ranks slow from the start, at most half of them."""
    plan = _plan(steps, ranks)
    for rank in draw.permutation(ranks)[: int(draw.integers(1, ranks // 2 + 1))].tolist():
        plan.slow_down(rank, 0, steps, factor * draw.uniform(1, 1.2))
    return plan


def a_while(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    plan, first = _plan(steps, ranks), int(draw.integers(steps // 10, steps // 2))
    plan.slow_down(int(draw.integers(ranks)), first, first + int(draw.integers(steps // 6, steps // 3)), factor)
    return plan


def halfway(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    plan = _plan(steps, ranks)
    plan.slow_down(int(draw.integers(ranks)), int(steps * draw.uniform(0.3, 0.7)), steps, factor)
    return plan


def slower(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    """Make one rank gradually slower to the end."""
    plan = _plan(steps, ranks)
    plan.ramp(int(draw.integers(ranks)), int(steps * draw.uniform(0.1, 0.5)), steps, factor)
    return plan


def among_steady(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    """Make one rank slow halfway, while others are always 10 % slower."""
    plan = halfway(draw, steps, ranks, factor)
    some = draw.permutation(ranks)[: int(draw.integers(1, max(2, ranks // 2)))]
    plan.factors[:, some] *= 1.1
    return plan


def most(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    """Make more than half of the ranks slow from the start."""
    plan = _plan(steps, ranks)
    for rank in draw.permutation(ranks)[: ranks * 5 // 8].tolist():
        plan.slow_down(rank, 0, steps, factor)
    return plan


def half(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    plan = _plan(steps, ranks)
    for rank in range(ranks // 2):
        plan.slow_down(rank, 0, steps, factor)
    return plan


def bursts(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    """Make one rank repeatedly slow for tens of steps."""
    plan, rank = _plan(steps, ranks), int(draw.integers(ranks))
    length, first = int(draw.integers(10, 30)), int(draw.integers(steps // 4))
    for begin in range(first, steps - length, 2 * length):
        plan.slow_down(rank, begin, begin + length, factor)
    plan.slow[rank] = (first, plan.slow[rank][1])
    return plan


def host(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    """Make all ranks of a host slow from some step on."""
    plan, first = _plan(steps, ranks), int(steps * draw.uniform(0.2, 0.8))
    at = int(draw.integers(4)) * ranks // 4
    for rank in range(at, at + max(1, ranks // 4)):
        plan.slow_down(rank, first, steps, factor)
    return plan


def one_after_another(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    """Make three ranks slow: from the start, for a while, and towards the end."""
    plan = _plan(steps, ranks)
    first, second, third = draw.permutation(ranks)[:3].tolist()
    plan.slow_down(first, 0, steps // 3, factor)
    plan.slow_down(second, steps // 4, steps * 3 // 4, factor)
    plan.slow_down(third, steps * 2 // 3, steps, factor)
    return plan


def plateau(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    plan, first = _plan(steps, ranks), int(steps * draw.uniform(0.1, 0.4))
    plan.ramp(int(draw.integers(ranks)), first, first + steps // 4, factor)
    return plan


def among_a_fleet(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    """Make one rank slow halfway, while all differ by a few percent."""
    plan = halfway(draw, steps, ranks, factor)
    plan.factors *= draw.uniform(0.93, 1.07, ranks)
    return plan


def one_of_a_fleet(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    """Make one rank slow from the start, while all differ by a few percent."""
    plan = one(draw, steps, ranks, factor)
    plan.factors *= np.exp(0.03 * draw.standard_normal(ranks)).clip(0.94, 1.06)
    return plan


def even_fleet(draw: Generator, steps: int, ranks: int, factor: float) -> Plan:
    plan = _plan(steps, ranks)
    plan.factors *= draw.uniform(0.95, 1.05, ranks)
    return plan


PLANS: dict[str, Planner] = {f.__name__: f for f in (even, one, several, a_while, halfway, slower, among_steady)}
OTHER_PLANS: dict[str, Planner] = {
    f.__name__: f
    for f in (even_fleet, most, half, bursts, host, one_after_another, plateau, among_a_fleet, one_of_a_fleet)
}
