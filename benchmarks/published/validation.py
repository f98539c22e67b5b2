"""Cross-validation by source: predictions of the planner for published rows outside its fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch

from paceline.planner.calibration import ASSUMED, MEASURED, PUBLISHED
from paceline.planner.hardware import table
from paceline.planner.predictions import Prediction
from published.fit import LEVELS, Fits, quantile
from published.rows import Row

RULE_OF_THUMB = ((2, 8, 0.95, 0.99), (16, 64, 0.85, 0.95), (100, None, 0.70, 0.90))
"""Fewest and most devices, lowest and highest efficiency, as tutorials give them."""


@dataclass(frozen=True)
class Checked:
    """A row and its prediction."""

    row: Row
    made: Prediction
    """With constants and intervals that have not seen its source."""
    shipped: Prediction
    """With the constants and intervals of the package."""
    rule: float
    """The middle of the rule of thumb's range."""
    by_size: float | None
    """Median efficiency of the other sources' rows with the same integer part of log2 of the devices, or of all their
    rows; None if there are none."""

    @property
    def error(self) -> float:
        """Predicted minus reported efficiency."""
        return self.made.efficiency - self.row.efficiency

    @property
    def is_covered(self) -> bool:
        """Whether the reported efficiency is inside the interval."""
        return self.made.low <= self.row.efficiency <= self.made.high


@dataclass(frozen=True)
class Score:
    """Absolute errors of a predictor, in points."""

    median: float
    p90: float
    sources_median: float
    sources_p90: float
    """The same, with all sources weighing the same."""


@dataclass(frozen=True)
class SourceScore:
    """Median absolute errors on one source, in points."""

    source: str
    rows: int
    model: float
    rule: float
    by_size: float | None
    bias: float
    """Median error of the model."""
    covered: float
    """Share of the rows inside the interval."""

    @property
    def is_best(self) -> bool:
        """Whether the model is better than both trivial predictors."""
        return self.model < self.rule and (self.by_size is None or self.model < self.by_size)


def cross_validate(rows: Sequence[Row]) -> Iterable[tuple[list[Checked], list[Checked]]]:
    """Yield each source's rows with predictions that have not seen that source.

    Predictions use the speed of one device that a row states, and then the assumed speed. A source of the shipped
    calibration is predicted with constants and intervals fitted to all other such sources; any other source, with the
    shipped ones.
    """
    known = {row["source"] for row in table("sources")}
    fitted = [row for row in rows if row.source in known]
    fits = Fits(fitted) if len({row.source for row in fitted}) > 1 else None
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source]
        others = [row for row in rows if row.source != source]
        result: tuple[list[Checked], list[Checked]] = ([], [])
        for checked, speed, shipped in zip(result, ("measured", "assumed"), (MEASURED, ASSUMED), strict=True):
            calibration, intervals = PUBLISHED, shipped
            if fits is not None and source in known:
                calibration, intervals = fits.without(source), fits.intervals(speed, source)
            for row in own:
                used = row if speed == "measured" else replace(row, job=row.from_flags)
                predictions = used.predict(calibration, intervals), used.predict(PUBLISHED, shipped)
                checked.append(Checked(row, *predictions, *_trivial(row, others)))
        yield result


def _trivial(row: Row, others: Sequence[Row]) -> tuple[float, float | None]:
    same = [other.efficiency for other in others if other.devices.bit_length() == row.devices.bit_length()]
    same = same or [other.efficiency for other in others]
    low, high = next(bounds for _, most, *bounds in RULE_OF_THUMB if most is None or row.devices <= most)
    return round((low + high) / 2, 3), median(same) if same else None


def covered(rows: Sequence[Checked]) -> dict[str, float | None]:
    """Return the share of a source's rows inside the interval, averaged over the sources, by number of devices."""
    result: dict[str, float | None] = {}
    least = 0.0
    for most, _ in (*LEVELS["measured"], (None, None)):
        here = [row for row in rows if most is None or least < row.row.devices <= most]
        shares = [entry.covered for entry in by_source(here)]
        name = "all" if most is None else f"over {least:.0f}" if most == math.inf else f"to {most:.0f}"
        result[name] = fmean(shares) if shares else None
        least = most or 0.0
    return result


def score(rows: Sequence[Checked], predicted: Sequence[float]) -> Score:
    """Return the errors of `predicted`, one for each row."""
    reported = torch.tensor([row.row.efficiency for row in rows], dtype=torch.float64, device="cpu")
    errors = 100 * (torch.tensor(predicted, dtype=torch.float64, device="cpu") - reported).abs()
    counts = Counter(row.row.source for row in rows)
    by_source = torch.tensor([1 / counts[row.row.source] for row in rows], dtype=torch.float64, device="cpu")
    weights = (torch.ones_like(by_source), by_source)
    return Score(*(quantile(errors, weight, share) for weight in weights for share in (0.5, 0.9)))


def by_source(rows: Sequence[Checked]) -> Sequence[SourceScore]:
    """Return the errors on each source, the largest first."""
    result = []
    for source in dict.fromkeys(row.row.source for row in rows):
        own = [row for row in rows if row.row.source == source]
        sizes = [100 * abs(row.by_size - row.row.efficiency) for row in own if row.by_size is not None]
        result.append(
            SourceScore(
                source,
                len(own),
                100 * median(abs(row.error) for row in own),
                100 * median(abs(row.rule - row.row.efficiency) for row in own),
                median(sizes) if sizes else None,
                100 * median(row.error for row in own),
                sum(row.is_covered for row in own) / len(own),
            )
        )
    return sorted(result, key=lambda entry: -entry.model)
