"""The share of time in which a job makes progress although hosts fail, and the best interval between saves.

What Paceline does decides what a failure costs. On several hosts or GPUs, a job continues from its newest checkpoint on
disk. On one host with parameters on the CPU, a dead rank loses no completed step (docs/failures.md), and only a dead
host counts as a failure here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.checkpoint.due_saves import DAY_S, FAILURES_PER_HOST_DAY, young_interval

RESTART_S = 600.0
"""Seconds from a failure until training continues: detection, a replacement host, start and restore. Detection and
diagnosis take less than ten minutes on average in Jiang et al., "MegaScale", NSDI 2024, section 6.3."""
STATE_BYTES = 12
"""Bytes per parameter in a checkpoint: float32 parameters and AdamW's two moments."""
SAVE_BYTES_PER_S = 0.43e9
"""Speed of a save that training waits for: 1.2 GB in 2.8 s on 2026-11-22 (benchmarks/async_save.py, local disk)."""


@dataclass(frozen=True)
class Goodput:
    """How a job spends its time. The four shares add up to 1."""

    hosts: int
    mtbf_s: float
    """Mean seconds between failures of any of the hosts."""
    interval_s: float
    """Seconds of training between two saves."""
    useful: float
    """Share of time in steps that count."""
    saving: float
    """Share in which saves stop the job."""
    redone: float
    """Share in steps and saves that a failure undid."""
    restarting: float


def save_seconds(parameters: float) -> float:
    """Return the seconds that a save of `parameters` and AdamW's state stops training, without ``async_save``."""
    return STATE_BYTES * parameters / SAVE_BYTES_PER_S


def best_interval(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between saves that lose the least time.

    Young's interval with the higher-order terms of J. T. Daly, "A higher order estimate of the optimum checkpoint
    interval for restart dumps", FGCS 22 (2006).
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(save_s / (2 * mtbf_s))
    return young_interval(save_s, mtbf_s) * (1 + ratio / 3 + ratio**2 / 9) - save_s


def goodput(
    hosts: int,
    save_s: float,
    restart_s: float = RESTART_S,
    failures_per_host_day: float = FAILURES_PER_HOST_DAY,
    interval_s: float | None = None,
) -> Goodput:
    """Return how a job spends its time if failures are independent of each other (Daly 2006).

    A failure can also hit a save or a restart, which then starts again.

    Args:
        hosts: number of hosts; a failure of any of them stops the job.
        save_s: seconds that a save stops training.
        restart_s: seconds from a failure until training continues.
        failures_per_host_day: failures of one host per day.
        interval_s: seconds of training between saves; by default the best interval.
    """
    mtbf = DAY_S / (hosts * failures_per_host_day)
    interval = best_interval(save_s, mtbf) if interval_s is None else interval_s
    running = math.exp(-restart_s / mtbf)  # share of time in which the job is not down
    # Seconds of running until an interval and its save are complete; the limit avoids an overflow.
    length = mtbf * math.expm1(min(700.0, (interval + save_s) / mtbf))
    useful, saving = running * interval / length, running * save_s / length
    return Goodput(hosts, mtbf, interval, useful, saving, running - useful - saving, 1 - running)
