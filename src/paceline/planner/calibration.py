"""Constants that published scaling results determine, and the width of the prediction's interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Factors between a link's nominal and its real speed, and the jitter of ranks.

    Fitted on 2026-11-27 to the 819 published efficiencies of the 22 sources in ``tables/sources.csv``
    (``benchmarks/published/fit.py``): the mean absolute error is minimal, and every source has the same weight.
    """

    inside: float = 2.08
    """Time of an all-reduce inside a host, divided by the time at the link's nominal speed."""
    staged: float = 1.66
    """Further factor if copies between the devices of a host pass through its memory."""
    between: float = 0.819
    """The same as `inside`, between hosts."""
    tcp: float = 3.81e9
    """Bytes per second of a host over TCP, even if its network is faster."""
    cpu: float = 1.07e-9
    """Seconds per byte that the cores of a host reduce, if the devices do not."""
    interference: float = 0.830
    """Slowdown of backward per second of communication that overlaps with it."""
    contention: float = 0.0258
    """Slowdown of the devices of a host by what they share (power, memory, input), as the standard deviation of a step
    relative to its mean. It grows up to :data:`CROWD` devices."""
    host_bound: float = 0.0254
    """Further part of `contention` if the hosts barely keep up with the devices."""
    jitter_s: float = 0.00145
    """Standard deviation of a rank's step time over the steps, in seconds."""
    low: float = -1.065
    high: float = 0.405
    """Bounds of the 80 % interval, in units of (:data:`FLOOR` + the predicted loss of efficiency)."""


CROWD = 8
"""Devices of a host that share what they contend for."""
FLOOR = 0.03
"""Loss of efficiency, for the interval, of a step without communication."""
PUBLISHED = Calibration()
