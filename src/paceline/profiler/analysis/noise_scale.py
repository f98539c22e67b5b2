"""The gradient noise scale: the batch size beyond which larger batches, and thus more ranks, no longer pay off.

After McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training" (2018),
appendix A.1. A rank's gradient over b samples and the average over B = N·b samples have expected squared norms

    |G|² + S / b        and        |G|² + S / B

so together they give unbiased estimates of |G|², the true gradient's squared norm, and of S, the variance of one
sample's gradient. The noise scale S / |G|² is the critical batch size: a step over B samples makes 1 / (1 + S/|G|²/B)
of the progress that a step with the true gradient makes. S and |G|² are averaged over steps before they are divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from paceline.profiler.analysis.step_breakdown import steps_by_number
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.report.report import NoiseScale

FEWEST = 5
"""Minimum number of steps for an estimate."""
CURVE = 13
"""Number of points on the curve."""
Norms = tuple[float, float, float, int]
"""One step: mean squared norm of the ranks' gradients, squared norm of their average, total samples, number of
ranks."""


def noise_scale(records: Sequence[RankRecord]) -> NoiseScale | None:
    """Return the noise scale of a run; None if it was not measured."""
    steps: list[Norms] = []
    for ranks in steps_by_number(records).values():
        norms = [step.norms for step in ranks if step is not None and step.norms is not None]
        # The formulas assume equal shares of the batch, and a rank without samples has no norm.
        if len(norms) == len(records):
            rows = float(sum(step.rows for step in ranks if step))
            steps.append(
                (fmean(local for local, _ in norms), fmean(averaged for _, averaged in norms), rows, len(norms))
            )
    return estimate(steps)


def estimate(steps: Sequence[Norms]) -> NoiseScale | None:
    """Return the noise scale with its verdict and curve; None if too few steps had two or more ranks."""
    gradients, variances = [], []
    for local, averaged, samples, ranks in steps:
        if ranks > 1 and samples > 0:
            gradients.append((ranks * averaged - local) / (ranks - 1))
            variances.append((local - averaged) * samples / (ranks - 1))
    if len(gradients) < FEWEST:
        return None
    gradient, variance = math.fsum(gradients), math.fsum(variances)
    batch = fmean(samples for _, _, samples, _ in steps)
    if gradient <= 0 or variance <= 0:
        text = (
            f"In {len(gradients)} steps noise hides the gradient: the critical batch size is far above the {batch:.0f} "
            "samples of a step, so more ranks pay off."
        )
        return NoiseScale(text, batch)
    value = variance / gradient

    def progress(size: float) -> float:
        return 1 / (1 + value / size)

    verdict = "more ranks pay off" if batch < value / 2 else "more ranks pay off only a little"
    if batch > 2 * value:
        verdict = "more ranks do not pay off"
    text = (
        f"The critical batch size is about {value:.0f} samples at this point in training, and a step has "
        f"{batch:.0f}: {verdict}. A step makes {progress(batch):.0%} of the progress that the true gradient would "
        f"make, and twice the batch {progress(2 * batch):.0%}."
    )
    sizes = [value * 2.0 ** (power - CURVE // 2) for power in range(CURVE)]
    return NoiseScale(text, batch, value, [(size, progress(size)) for size in sizes])
