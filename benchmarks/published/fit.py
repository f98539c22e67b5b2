"""The fit of the calibration to published rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.planner.calibration import CROWD, FLOOR, PROFILED, PUBLISHED, Calibration, Intervals
from paceline.planner.predictions import Prediction, backward_timeline, spread
from published.rows import Row

PRIOR = Calibration(
    inside=1.5,  # a third of a link's speed is lost: 200 of 300 GB/s on eight A100, nccl-tests issue 149 (2023)
    staged=2.0,  # two copies over PCIe
    between=0.6,  # 85 % of the line rate (nccl-tests issue 119, 2022), half of it hidden
    tcp=2.5e9,  # assumed: 20 Gbit/s
    cpu=1e-9,  # assumed: 1 GB/s
    interference=0.5,  # assumed
    contention=0.02,  # assumed
    host_bound=0.015,  # assumed
    hosts=0.01,  # assumed
    jitter_s=1.3e-3,  # rounded from a first fit to all rows, so not independent of them
)
"""Centers of the prior, known before the fit."""
FITTED = ("inside", "staged", "between", "tcp", "cpu", "interference", "contention", "host_bound", "hosts", "jitter_s")
STRENGTH = 0.001
"""Cost of a factor of e from the prior, relative to an error of 1."""
CLIP = 0.4
"""Larger errors count as this; most are of runs that waited for their data."""
ROUNDS = 12
LEVELS = {
    "measured": ((8, 0.81), (64, 0.81), (math.inf, 0.78)),
    "assumed": ((8, 0.85), (64, 0.81), (math.inf, 0.78)),
}
"""Most devices, and the share of the fitted sources' rows that an interval covers, if the speed of a device is measured
or assumed. It is chosen so that the interval covers about 80 % of the rows of a source outside the fit."""
PROFILED_LEVEL = 0.84
"""The same for a job that was profiled on fewer devices."""


class Columns:
    """The rows as columns. `predict` equals :meth:`Row.predict` of all rows, but takes milliseconds."""

    def __init__(self, rows: Sequence[Row]) -> None:
        def column(value: Callable[[Row], float]) -> Tensor:
            return torch.tensor([float(value(row)) for row in rows], dtype=torch.float64, device="cpu")

        self.efficiency = column(lambda row: row.efficiency)
        self.ranks = column(lambda row: row.devices)
        self.spread = column(lambda row: spread(row.devices))
        self.spread_in_crowd = column(lambda row: spread(min(row.devices, CROWD)))
        self.step_s = column(lambda row: row.job.workload.compute_s)
        self.spread_of_hosts = column(lambda row: spread(row.job.cluster.hosts(row.devices)))
        self.is_host_bound = column(lambda row: row.job.workload.is_host_bound)
        self.local = column(lambda row: row.job.cluster.devices_per_host)
        self.inside_s = column(lambda row: 1 / row.job.cluster.inside.bytes_per_s)
        self.inside_latency_s = column(lambda row: row.job.cluster.inside.latency_s)
        self.is_staged = column(lambda row: row.job.cluster.inside.kind == "staged")
        self.between_s = column(lambda row: 1 / row.job.cluster.between.bytes_per_s)
        self.between_latency_s = column(lambda row: row.job.cluster.between.latency_s)
        self.is_tcp = column(lambda row: row.job.cluster.between.kind == "tcp")
        self.on_cpu = column(lambda row: row.job.cluster.reduces_on_cpu)
        buckets = [_buckets(row) for row in rows]
        most = max(map(len, buckets))
        # Padded with buckets without bytes, at the end of backward.
        buckets = [row + [(0.0, 0.0)] * (most - len(row)) for row in buckets]
        padded = torch.tensor(buckets, dtype=torch.float64, device="cpu")
        self.nbytes, self.before_end_s = padded.unbind(2)
        weights = Counter(row.source for row in rows)
        self.weight = column(lambda row: 1 / weights[row.source])
        self.with_baseline = [place for place, row in enumerate(rows) if row.baseline > 1]
        baselines = [replace(rows[place], devices=rows[place].baseline, baseline=1) for place in self.with_baseline]
        self.baselines = Columns(baselines) if baselines else None

    def predict(self, c: Calibration) -> Tensor:
        """Return the predicted efficiencies."""
        baseline = self.step_s
        if self.baselines is not None:
            baseline = baseline.clone()
            baseline[self.with_baseline] = self.baselines._length_s(c)
        return baseline / self._length_s(c)

    def _length_s(self, c: Calibration) -> Tensor:
        reduce_s = self._reduce_s(c)
        # A queue ends at the maximum, over its entries, of the entry's arrival plus the time of all from there on.
        from_here = reduce_s.flip(1).cumsum(1).flip(1)
        exposed = (from_here - self.before_end_s).max(1).values.clamp(min=0)
        hidden = reduce_s.sum(1) - exposed
        relative = (c.contention + c.host_bound * self.is_host_bound) * self.spread_in_crowd
        relative = relative + c.hosts * self.spread_of_hosts
        return self.step_s * (1 + relative) + exposed + c.interference * hidden + c.jitter_s * self.spread

    def _reduce_s(self, c: Calibration) -> Tensor:
        local, hosts = torch.minimum(self.ranks, self.local), torch.ceil(self.ranks / self.local)
        inside_s = c.inside * self.inside_s * torch.where(self.is_staged > 0, c.staged * torch.sqrt(local / 2), 1)
        between_s = torch.maximum(c.between * self.between_s, self.is_tcp / c.tcp) + c.cpu * self.on_cpu
        names = (local, hosts, inside_s, between_s, self.inside_latency_s, self.between_latency_s)
        local, hosts, inside_s, between_s, inside_latency_s, latency_s = (column[:, None] for column in names)
        inside = 2 * (local - 1) * (inside_latency_s + self.nbytes / local * inside_s)
        ring = 2 * (hosts - 1) * (latency_s + self.nbytes / hosts * between_s)
        tree = 2 * torch.ceil(torch.log2(hosts)) * latency_s + 2 * self.nbytes * between_s
        return torch.where(self.nbytes > 0, inside + torch.minimum(ring, tree), 0)


def _buckets(row: Row) -> list[tuple[float, float]]:
    """Return the bytes of each bucket, and the seconds from when it is full to the end of backward."""
    sizes: list[float] = []

    def note(nbytes: float) -> float:
        sizes.append(nbytes)
        return 0.0

    full = backward_timeline(row.job.workload, note).full
    return [(size, full[-1] - at) for size, at in zip(sizes, full, strict=True)]


def fit(columns: Columns, keep: Tensor) -> Calibration:
    """Return the constants with the smallest mean absolute error on the rows `keep`; all sources weigh the same.

    A coordinate search in the logarithms, from the prior.
    """
    weight = columns.weight * keep
    weight = weight / weight.sum()
    center = [math.log(getattr(PRIOR, name)) for name in FITTED]

    def calibration(logs: Sequence[float]) -> Calibration:
        return replace(PRIOR, **{name: math.exp(value) for name, value in zip(FITTED, logs, strict=True)})

    def cost(logs: Sequence[float]) -> float:
        error = (columns.predict(calibration(logs)) - columns.efficiency).abs().clamp(max=CLIP)
        return float(weight @ error) + STRENGTH * sum((a - b) ** 2 for a, b in zip(logs, center, strict=True))

    best, least, widths = center, cost(center), [0.5] * len(center)
    for _ in range(ROUNDS):
        for place, width in enumerate(widths):
            widths[place] = width / 2
            for delta in (width, -width):
                logs = [value + delta * (place == other) for other, value in enumerate(best)]
                if (value := cost(logs)) < least - 1e-7:
                    best, least, widths[place] = logs, value, 1.3 * width
                    break
    return calibration(best)


class Fits:
    """Calibrations fitted to all of the `rows` but those of some sources, and intervals from held-out errors."""

    def __init__(self, rows: Sequence[Row]) -> None:
        assumed = [replace(row, job=row.from_flags) for row in rows]
        self._columns = {"measured": Columns(rows), "assumed": Columns(assumed)}
        self._sources = list(dict.fromkeys(row.source for row in rows))
        self._source = torch.tensor([self._sources.index(row.source) for row in rows], device="cpu")
        self._devices = torch.tensor([row.devices for row in rows], device="cpu")
        self._calibrations: dict[frozenset[str], Calibration] = {}

    def without(self, *sources: str) -> Calibration:
        """Return the constants fitted to all rows but those of `sources`."""
        key = frozenset(sources)
        if key not in self._calibrations:
            keep = torch.ones(len(self._source), dtype=torch.float64, device="cpu")
            for source in sources:
                keep[self._source == self._sources.index(source)] = 0
            self._calibrations[key] = fit(self._columns["measured"], keep)
        return self._calibrations[key]

    def intervals(self, speed: str, *sources: str) -> Intervals:
        """Return intervals that have not seen `sources`, if the speed of a device is ``measured`` or ``assumed``.

        They come from the errors of every other source under constants that have not seen that source either. All
        sources weigh the same.
        """
        columns, found = self._columns[speed], list[tuple[float, float, float]]()
        errors = torch.zeros_like(columns.efficiency)
        for at, source in enumerate(self._sources):
            predicted = columns.predict(self.without(*{*sources, source}))
            errors = torch.where(self._source == at, relative_errors(predicted, columns.efficiency), errors)
        least = lowest = 0.0
        for most, level in LEVELS[speed]:
            weight = torch.zeros_like(errors)
            for at, source in enumerate(self._sources):
                own = (self._source == at) & (self._devices > least) & (self._devices <= most)
                weight[own] = float(source not in sources) / max(1, int(own.sum()))
            low, high = middle(errors, weight, level)
            lowest = min(low, lowest)  # more devices are not more certain
            found.append((most, lowest, max(high, 0.0)))
            least = most
        return tuple(found)


class Growth(NamedTuple):
    """Two results of the same job, on fewer and on more devices."""

    source: str
    made: Prediction
    """For more devices, relative to fewer."""
    reported: float


def growths(rows: Sequence[Row], calibration: Calibration = PUBLISHED) -> list[Growth]:
    """Return all pairs of results of the same job, as if the smaller one had been profiled."""
    jobs: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.baseline == 1:
            jobs.setdefault((row.source, row.title.partition(",")[0], repr(row.job)), []).append(row)
    result = []
    for same in jobs.values():
        for few, many in combinations(sorted(same, key=lambda row: row.devices), 2):
            if few.devices < many.devices:
                job = replace(many.job, calibration=calibration, intervals=PROFILED)
                made = job.predict(many.devices, few.devices)
                result.append(Growth(many.source, made, many.efficiency / few.efficiency))
    return result


def profiled_intervals(pairs: Sequence[Growth]) -> Intervals:
    """Return the interval that covers :data:`PROFILED_LEVEL` of the pairs; all sources weigh the same."""
    counts = Counter(pair.source for pair in pairs)
    columns = [(pair.made.efficiency, pair.reported, 1 / counts[pair.source]) for pair in pairs]
    predicted, reported, weight = torch.tensor(columns, dtype=torch.float64, device="cpu").unbind(1)
    return ((math.inf, *middle(relative_errors(predicted, reported), weight, PROFILED_LEVEL)),)


def relative_errors(predicted: Tensor, reported: Tensor) -> Tensor:
    """Return errors in the unit of :data:`Intervals`."""
    return (reported - predicted) / (FLOOR + (1 - predicted).clamp(min=0))


def middle(values: Tensor, weight: Tensor, level: float) -> tuple[float, float]:
    """Return the ends of the middle part of `values`, whose share of the weight is `level`."""
    low, high = (round(quantile(values, weight, share), 3) for share in ((1 - level) / 2, (1 + level) / 2))
    return low, high


def quantile(values: Tensor, weight: Tensor, share: float) -> float:
    """Return a weighted quantile."""
    order = values.argsort()
    total = weight[order].cumsum(0)
    return float(values[order][int(torch.searchsorted(total, share * total[-1]).clamp(max=len(values) - 1))])
