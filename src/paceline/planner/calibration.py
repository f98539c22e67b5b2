"""Constants that published scaling results determine, and the width of the prediction's interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Factors between a link's nominal and its real speed, and the jitter of ranks.

    Fitted on 2026-11-27 to 819 published efficiencies of 22 sources (`paceline plan --validate` fits them again): the
    weighted mean absolute error is minimal, and every source has the same weight.
    """

    inside: float = 2.39
    """Time of an all-reduce inside a host, divided by the time at the link's nominal speed."""
    staged: float = 1.5
    """Further factor if copies between the devices of a host pass through its memory."""
    between: float = 0.871
    """The same as `inside`, between hosts."""
    tcp: float = 3.6e9
    """Bytes per second of a host over TCP, even if its network is faster."""
    cpu: float = 1.15e-9
    """Seconds per byte that the cores of a host reduce, if the devices do not."""
    interference: float = 0.705
    """Slowdown of backward per second of communication that overlaps with it."""
    jitter: float = 0.0164
    """Standard deviation of a rank's step time over the steps, relative to its mean."""
    jitter_s: float = 0.00117
    """Part of that standard deviation, in seconds, that does not depend on the step's length."""
    low: float = -1.0
    high: float = 0.6
    """Bounds of the 80 % interval, in units of (:data:`FLOOR` + the predicted loss of efficiency)."""


FLOOR = 0.03
"""Loss of efficiency, for the interval, of a step without communication."""
PUBLISHED = Calibration()
