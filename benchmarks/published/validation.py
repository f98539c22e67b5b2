"""Cross-validation by source: predictions of the planner for published rows outside its fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from paceline.planner.hardware import PUBLISHED, Calibration, table
from paceline.planner.predictions import RULE_OF_THUMB
from published.fit import Columns, fit, quantile
from published.rows import Row


@dataclass(frozen=True)
class Checked:
    """A row and its prediction."""

    row: Row
    predicted: float
    low: float
    high: float
    """The 80 % interval."""
    rule: float
    """The middle of the rule of thumb's range."""
    by_size: float | None
    """Median efficiency of the other sources' rows with the same integer part of log2 of the devices, or of all their
    rows; None if there are none."""

    @property
    def error(self) -> float:
        """Predicted minus reported efficiency."""
        return self.predicted - self.row.efficiency

    @property
    def is_covered(self) -> bool:
        """Whether the reported efficiency is inside the interval."""
        return self.low <= self.row.efficiency <= self.high


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


def cross_validate(rows: Sequence[Row]) -> Iterable[Sequence[Checked]]:
    """Yield each source's rows with predictions of constants that were fitted to other sources.

    A source of the shipped calibration is predicted with constants and intervals fitted to all other sources in `rows`;
    any other source, with the shipped ones.
    """
    known = {row["source"] for row in table("sources")}
    columns = Columns(rows)
    for source in dict.fromkeys(row.source for row in rows):
        others = [row for row in rows if row.source != source]
        calibration = PUBLISHED
        if source in known and others:
            calibration = fit(columns, torch.tensor([row.source != source for row in rows], device="cpu").double())
        yield [_check(row, others, calibration) for row in rows if row.source == source]


def _check(row: Row, others: Sequence[Row], calibration: Calibration) -> Checked:
    prediction = row.predict(calibration)
    same = [other.efficiency for other in others if other.devices.bit_length() == row.devices.bit_length()]
    same = same or [other.efficiency for other in others]
    low, high = next(bounds for _, most, *bounds in RULE_OF_THUMB if most is None or row.devices <= most)
    by_size = median(same) if same else None
    return Checked(row, prediction.efficiency, prediction.low, prediction.high, round((low + high) / 2, 3), by_size)


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
