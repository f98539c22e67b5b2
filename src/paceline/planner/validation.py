"""Cross-validation on published results, and the fit of the calibration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from paceline.planner.calibration import PUBLISHED, Calibration
from paceline.planner.published import Row
from paceline.planner.simulation import backward_timeline

FITTED = ("inside", "staged", "between", "tcp", "cpu", "interference", "jitter", "jitter_s")


class Columns:
    """The rows as tensors, for the fit: `predict` agrees with `Row.predict`, but takes a millisecond for all rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.efficiency = self._column(rows, lambda row: row.efficiency)
        self.step_s = self._column(rows, lambda row: row.job.workload.compute_s)
        self.inside_s = self._column(rows, lambda row: 1 / row.job.cluster.inside.bytes_per_s)
        self.between_s = self._column(rows, lambda row: 1 / row.job.cluster.between.bytes_per_s)
        self.is_staged = self._column(rows, lambda row: row.job.cluster.inside.kind == "staged")
        self.is_tcp = self._column(rows, lambda row: row.job.cluster.between.kind == "tcp")
        self.on_cpu = self._column(rows, lambda row: row.job.cluster.reduces_on_cpu)
        self.latency = [self._column(rows, lambda row: getattr(row.job.cluster, name).latency_s) for name in ("inside", "between")]
        self.per_host = self._column(rows, lambda row: row.job.cluster.devices_per_host)
        self.ranks = self._column(rows, lambda row: row.devices)
        self.baseline = self._column(rows, lambda row: row.baseline)
        buckets = [self._buckets(row) for row in rows]
        most = max(map(len, buckets))
        # Buckets of no bytes, which arrive at the end, do not change the result.
        self.nbytes, self.early_s = (
            torch.tensor([[bucket[k] for bucket in row] + [0.0] * (most - len(row)) for row in buckets], dtype=torch.float64)
            for k in (0, 1)
        )

    @staticmethod
    def _column(rows, value):
        return torch.tensor([float(value(row)) for row in rows], dtype=torch.float64)

    @staticmethod
    def _buckets(row: Row) -> list[tuple[float, float]]:
        """Return the bytes of each bucket, and the seconds from when it is full to the end of backward."""
        sizes: list[float] = []
        timeline = backward_timeline(row.job.workload, lambda nbytes: sizes.append(nbytes) or 0.0)
        return [(size, timeline.full[-1] - full) for size, full in zip(sizes, timeline.full, strict=True)]

    def _length(self, ranks: Tensor, c: Calibration) -> Tensor:
        local, hosts = torch.minimum(ranks, self.per_host), torch.ceil(ranks / self.per_host)
        inside = c.inside * self.inside_s * torch.where(self.is_staged > 0, c.staged * torch.sqrt(local / 2), 1.0)
        between = torch.maximum(c.between * self.between_s, self.is_tcp / c.tcp) + self.on_cpu * c.cpu
        local, hosts, inside, between = (x[:, None] for x in (local, hosts, inside, between))
        a, b = (x[:, None] for x in self.latency)
        seconds = 2 * (local - 1) * (a + self.nbytes / local * inside)
        ring = 2 * (hosts - 1) * (b + self.nbytes / hosts * between)
        tree = 2 * torch.ceil(torch.log2(hosts)) * b + 2 * self.nbytes * between
        seconds = torch.where(self.nbytes > 0, seconds + torch.where(hosts > 1, torch.minimum(ring, tree), 0), 0)
        # The queue of collectives ends at the maximum, over the buckets, of its arrival plus all that follows.
        rest = seconds.flip(1).cumsum(1).flip(1)
        exposed = (rest - self.early_s).max(1).values.clamp(min=0)
        hidden = seconds.sum(1) - exposed
        jitter = torch.sqrt(2 * torch.log(ranks))
        crowd = torch.sqrt(2 * torch.log(torch.clamp(ranks, max=8)))if CROWD else jitter
        length = self.step_s * (1 + c.jitter * crowd) + c.jitter_s * jitter + exposed + c.interference * hidden
        return torch.where(ranks > 1, length, self.step_s)

    def predict(self, c: Calibration) -> Tensor:
        return self._length(self.baseline, c) / self._length(self.ranks, c)
CROWD = False


def fit(columns, weight, prior, start=None, rounds=12, strength=0.001):
    names=list(prior); center = torch.tensor([math.log(prior[n]) for n in names])
    weight = weight / weight.sum()
    def cost(v):
        p = {n: math.exp(x) for n, x in zip(names, v)}
        error = (columns.predict(make(p)) - columns.efficiency).abs().clamp(max=0.4)
        return float(weight @ error) + strength * sum((a-math.log(prior[n]))**2 for a, n in zip(v, names))
    v = [math.log((start or prior)[n]) for n in names]
    width = [0.5 if start is None else 0.2] * len(v)
    best = cost(v)
    for _ in range(rounds):
        for k in range(len(v)):
            for delta in (width[k], -width[k]):
                t = v.copy(); t[k] += delta
                if (value := cost(t)) < best - 1e-7:
                    best, v = value, t; width[k] *= 1.3; break
            else: width[k] *= 0.5
    return {n: math.exp(x) for n, x in zip(names, v)}
class Any_:
    def __init__(s,**k): s.__dict__.update(k)
def make(p): return Any_(**p)
