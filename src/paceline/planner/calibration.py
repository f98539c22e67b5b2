"""Constants of predictions, fitted to published results, and how far such results were from them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Factors between a link's nominal and its real speed, and the jitter of ranks.

    Fitted on 2026-11-29 to the 813 published efficiencies of the 20 sources in ``tables/sources.csv`` that state their
    device (``benchmarks/published/fit.py``): the mean absolute error is minimal, and every source has the same weight.
    """

    inside: float = 2.4
    """Time of an all-reduce inside a host, divided by the time at the link's nominal speed."""
    staged: float = 1.52
    """Further factor if copies between the devices of a host pass through its memory."""
    between: float = 0.865
    """The same as `inside`, between hosts."""
    tcp: float = 3.57e09
    """Bytes per second of a host over TCP, even if its network is faster."""
    cpu: float = 1.1e-09
    """Seconds per byte that the cores of a host reduce, if the devices do not."""
    interference: float = 0.715
    """Slowdown of backward per second of communication that overlaps with it."""
    contention: float = 0.026
    """Slowdown by power, memory and input that the devices of a host share: the standard deviation of a step, relative
    to its mean. It grows up to :data:`CROWD` devices."""
    host_bound: float = 0.0282
    """Further part of `contention` if the hosts barely keep up with the devices."""
    hosts: float = 0.00869
    """Standard deviation of the step time between hosts, relative to its mean."""
    jitter_s: float = 0.00135
    """Standard deviation of a rank's step time over the steps, in seconds."""


CROWD = 8
"""Number of devices beyond which contention on a host no longer grows."""
FLOOR = 0.03
"""Loss of efficiency, for the interval, of a step without communication."""
PUBLISHED = Calibration()

Intervals = tuple[tuple[float, float, float], ...]
"""Most devices, and the bounds of the 80 % interval in units of (:data:`FLOOR` + the predicted loss of efficiency)."""
MEASURED: Intervals = ((8, -0.723, 0.418), (64, -0.887, 0.326), (math.inf, -0.887, 0.444))
"""Intervals if the speed of a device was measured."""
ASSUMED: Intervals = ((8, -1.242, 0.476), (64, -1.248, 0.321), (math.inf, -1.248, 0.444))
"""Intervals if it was not."""
PROFILED: Intervals = ((math.inf, -1.0, 0.43),)
"""The interval of the efficiency relative to the largest profiled number of devices."""


Interval = tuple[float, float]
"""Bounds relative to the predicted value. They contain the real value in four of five cases."""
CERTAIN: Interval = (1.0, 1.0)


def interval_of(intervals: Intervals, ranks: int, efficiency: float) -> Interval:
    """Return the interval of a predicted efficiency."""
    low, high = next(bounds for most, *bounds in intervals if ranks <= most)
    loss = FLOOR + max(0.0, 1 - efficiency)
    return max(0.0, efficiency + low * loss) / efficiency, (efficiency + high * loss) / efficiency


def inverse(interval: Interval) -> Interval:
    """Return the interval of the reciprocal. The lower bound must be positive."""
    low, high = interval
    return 1 / high, 1 / low


def product(one: Interval, other: Interval) -> Interval:
    """Return the interval of a product whose factors err independently."""
    (low, high), (other_low, other_high) = one, other
    lowest = math.exp(-math.hypot(math.log(low), math.log(other_low))) if low and other_low else 0.0
    return lowest, math.exp(math.hypot(math.log(high), math.log(other_high)))


@dataclass(frozen=True)
class Speed:
    """How fast a device trains models of a family, by published results."""

    share: float
    """FLOP/s in float32, relative to the peak."""
    exponent: float
    """A lower precision speeds up training by this power of the ratio of the peaks."""
    low: float
    high: float
    """The 80 % interval of published speeds, relative to this one."""


SPEEDS: dict[str | None, Speed] = {
    None: Speed(0.526, 0.52, 0.43, 1.81),
    "convnet": Speed(0.536, 0.32, 0.43, 2.08),
    "transformer": Speed(0.581, 0.63, 0.46, 1.47),
}
"""By family; None if the family is unknown. Fitted on 2026-11-29 to published speeds of one device
(``benchmarks/published/single_device.csv``)."""
