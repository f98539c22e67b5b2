"""Published speeds of one device, and the speeds that a plan without a measurement assumes."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.planner.calibration import SPEEDS, Speed
from paceline.planner.hardware import Device, device, match
from published.fit import quantile

FILE = Path(__file__).with_name("single_device.csv")


class Pair(NamedTuple):
    """A model on a device."""

    source: str
    title: str
    family: str
    precision: str
    kind: Device
    flops: float
    """FLOP/s of training."""

    @property
    def ratio(self) -> float:
        """Peak of the precision, relative to float32."""
        return self.kind.peak(self.precision) / self.kind.peak("fp32")


def read_pairs(path: Path = FILE) -> list[Pair]:
    """Return the rows whose device is known and whose FLOPs are certain."""
    pairs = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            is_certain = not any(flag in row["notes"] for flag in ("flag=suspect", "flops=uncertain"))
            if is_certain and match("devices", row["device"].lower()):
                kind = device(row["device"])
                if row["precision"] in kind.peaks:
                    flops = 1e9 * float(row["gflop_per_sample"]) * float(row["samples_per_s"])
                    title = f"{row['model']}, {row['device']}, {row['precision']}"
                    pairs.append(Pair(row["source"], title, row["family"], row["precision"], kind, flops))
    return pairs


def of_family(pairs: Sequence[Pair], family: str | None) -> list[Pair]:
    """Return the pairs of a family; all pairs without one."""
    return [pair for pair in pairs if family in (None, pair.family)]


def _columns(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logarithms of the shares and of the ratios, and weights between those of a row and of a source."""
    counts = Counter(pair.source for pair in pairs)
    rows = [
        (math.log(pair.flops / pair.kind.peak("fp32")), math.log(pair.ratio), counts[pair.source] ** -0.5)
        for pair in pairs
    ]
    share, ratio, weight = torch.tensor(rows, dtype=torch.float64, device="cpu").unbind(1)
    return share, ratio, weight


def fit_speed(pairs: Sequence[Pair]) -> Speed:
    """Return the share and the exponent with the smallest mean absolute error of the logarithms, and the interval."""
    share, ratio, weight = _columns(pairs)

    def cost(exponent: float) -> tuple[float, float]:
        rest = share - exponent * ratio
        middle = quantile(rest, weight, 0.5)
        return float(weight @ (rest - middle).abs()), middle

    exponent = min((step / 100 for step in range(101)), key=lambda step: cost(step)[0])
    middle = cost(exponent)[1]
    low, high = (math.exp(quantile(share - middle - exponent * ratio, weight, at)) for at in (0.1, 0.9))
    return Speed(round(math.exp(middle), 3), exponent, round(low, 2), round(high, 2))


def fitted_speeds(pairs: Sequence[Pair]) -> dict[str | None, Speed]:
    """Return :data:`SPEEDS` as fitted to `pairs`."""
    return {family: fit_speed(of_family(pairs, family)) for family in SPEEDS}


def is_inside(pair: Pair, speed: Speed) -> bool:
    """Return whether the published speed of a pair is inside the interval of `speed`."""
    return speed.low <= pair.flops / pair.kind.flops(pair.precision, speed) <= speed.high


def shares_inside(pairs: Sequence[Pair], family: str | None) -> dict[str, float]:
    """Return the share of the pairs of a family inside the interval: the shipped one, and one without their source."""
    own = of_family(pairs, family)
    held_out = []
    for source in {pair.source for pair in own}:
        if others := [pair for pair in own if pair.source != source]:
            speed = fit_speed(others)
            held_out += [is_inside(pair, speed) for pair in own if pair.source == source]
    return {"shipped": fmean(is_inside(pair, SPEEDS[family]) for pair in own), "held_out": fmean(held_out)}
