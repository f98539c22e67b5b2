"""The gradient noise scale: the batch size beyond which larger batches, and so more ranks, stop paying.

After McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training" (2018),
appendix A.1. A rank's gradient over b samples and the average over B = N·b samples have expected squared norms

    |G|² + S / b        and        |G|² + S / B

so both together give unbiased estimates of |G|², the true gradient's squared norm, and of S, the variance of one
sample's gradient. The noise scale S / |G|² is the critical batch size: a step over B samples makes 1 / (1 + S/|G|²/B)
of the progress that a step with the true gradient makes. Both are averaged over steps before they are divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.profiler.analysis.step_breakdown import steps_by_number
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.report.report import NoiseScale

FEWEST = 5
"""Fewest steps of an estimate."""
CURVE = 13
"""Points of the curve."""


@dataclass(frozen=True)
class Estimate:
    """An estimate from several steps."""

    batch_size: float
    """Samples in a step, all ranks together."""
    gradient: float
    """|G|², the squared norm of the true gradient."""
    variance: float
    """S, the variance of one sample's gradient."""
    steps: int
    error: float
    """Standard error of the value, by the jackknife; infinite where the gradient's norm cannot be told from 0."""

    @property
    def value(self) -> float | None:
        """Noise scale in samples; None where noise hides the gradient, so that only more steps could tell."""
        return self.variance / self.gradient if self.gradient > 0 and self.variance > 0 else None


def estimate(steps: Sequence[tuple[float, float, float, int]]) -> Estimate | None:
    """Return the noise scale of steps: mean squared norm on a rank, of the average, samples in all, and ranks.

    None for fewer than :data:`FEWEST` steps of two ranks or more.
    """
    pairs = []
    for local, averaged, samples, ranks in steps:
        if ranks > 1 and samples > 0:
            gradient = (ranks * averaged - local) / (ranks - 1)
            pairs.append((gradient, (local - averaged) * samples / (ranks - 1)))
    if len(pairs) < FEWEST:
        return None
    count = len(pairs)
    gradients = math.fsum(gradient for gradient, _ in pairs)
    variances = math.fsum(variance for _, variance in pairs)
    # The jackknife, because the formula for the error of a mean does not hold for a ratio: the ratio of the sums with
    # one step left out, for each step.
    without = [
        (variances - variance) / (gradients - gradient) if gradients > gradient else math.inf
        for gradient, variance in pairs
    ]
    mean = math.fsum(without) / count if all(map(math.isfinite, without)) else math.inf
    spread = math.fsum((value - mean) ** 2 for value in without) if math.isfinite(mean) else math.inf
    batch = math.fsum(samples for _, _, samples, _ in steps) / len(steps)
    return Estimate(batch, gradients / count, variances / count, count, math.sqrt(spread * (count - 1) / count))


def noise_scale(records: Sequence[RankRecord]) -> Estimate | None:
    """Return the noise scale of a run; None where it was not measured."""
    found = []
    for ranks in steps_by_number(records).values():
        norms = [step.norms for step in ranks if step is not None and step.norms is not None]
        # A rank without samples has no norm, and the formulas are for equal shares of the batch.
        if len(norms) == len(records):
            local = math.fsum(norm for norm, _ in norms) / len(norms)
            averaged = math.fsum(norm for _, norm in norms) / len(norms)
            found.append((local, averaged, float(sum(step.rows for step in ranks if step)), len(norms)))
    return estimate(found)


def describe(scale: Estimate | None) -> NoiseScale | None:
    """Return the scale with its verdict and curve for the report."""
    if scale is None:
        return None
    value, batch = scale.value, scale.batch_size
    if value is None:
        text = (
            f"In {scale.steps} steps noise hides the gradient: the critical batch size is far above the {batch:.0f} "
            "samples of a step, so more ranks pay."
        )
        return NoiseScale(text, batch)

    def progress(size: float) -> float:
        return 1 / (1 + value / size)

    verdict = "more ranks pay" if batch < value / 2 else "more ranks pay little"
    if batch > 2 * value:
        verdict = "more ranks do not pay"
    text = (
        f"The critical batch size is about {value:.0f} samples at this point of the training, and a step has "
        f"{batch:.0f}: {verdict}. A step makes {progress(batch):.0%} of the progress that the true gradient would, and "
        f"twice the batch {progress(2 * batch):.0%}."
    )
    sizes = [value * 2.0 ** (power - CURVE // 2) for power in range(CURVE)]
    error = scale.error if math.isfinite(scale.error) else None
    return NoiseScale(text, batch, value, error, [(size, progress(size)) for size in sizes])
