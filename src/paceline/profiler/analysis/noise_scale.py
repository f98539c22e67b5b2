"""The gradient noise scale of a profiled run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from paceline.planner.critical_batch import NoiseScale, Norms, estimate
from paceline.profiler.analysis.step_breakdown import steps_by_number
from paceline.profiler.records.rank_file import RankRecord


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
