"""Predicted time of steps if each host is an island, which averages with other hosts only every H steps.

The prediction is for ``LocalSGD``, and for ``DiLoCo`` with one fragment, no delay and float32 messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import UsageError
from paceline.planner.hardware import GBIT
from paceline.planner.predictions import Job, StepTime

CHEAP = 0.05
"""Averaging in every step is cheap if outer steps would save less than this share of the time."""
SPEEDS = [GBIT * 10 ** (power / 20) for power in range(-60, 101)]
"""Candidate speeds between hosts, in bytes per second: 1 Mbit/s to 100 Tbit/s."""


@dataclass(frozen=True)
class OuterRow:
    """Times of a step on several hosts, with and without outer steps."""

    devices: int
    averaged_step_s: float
    """Seconds of a step that averages over all devices."""
    step_s: float
    """Mean seconds of a step with averaging inside hosts, including its share of an outer step."""
    saving: float
    """Share of the time that outer steps save; negative if they cost time."""


@dataclass(frozen=True)
class OuterSteps:
    """Comparison of steps with and without outer steps, for several numbers of devices."""

    sync_every: int
    rows: Sequence[OuterRow]
    cheap_from: float | None
    """Speed between hosts, in bytes per second, that makes averaging in every step cheap on the last row's devices; the
    lowest of :data:`SPEEDS`, with the same latency. None if all are slower than needed."""


def outer_steps(job: Job, counts: Sequence[int], sync_every: int) -> OuterSteps:
    """Compare steps for the `counts` of devices that fill several hosts, with an outer step every `sync_every` steps.

    Other counts are left out.
    """
    local = job.cluster.devices_per_host
    rows = [_row(job, count, sync_every) for count in counts if count > local and count % local == 0]
    if not rows:
        raise UsageError(
            f"--sync-every needs at least two full hosts of {local} devices; give a larger --devices, or a smaller "
            "--hosts-of with --links"
        )

    def is_cheap(speed: float) -> bool:
        between = replace(job.cluster.between, bytes_per_s=speed)
        faster = replace(job, cluster=replace(job.cluster, between=between), profiled={})
        return _row(faster, rows[-1].devices, sync_every).saving < CHEAP

    place = bisect_left(SPEEDS, True, key=is_cheap)
    return OuterSteps(sync_every, rows, SPEEDS[place] if place < len(SPEEDS) else None)


def _row(job: Job, ranks: int, sync_every: int) -> OuterRow:
    averaged, step = job.step(ranks), island_step(job, ranks, sync_every)
    return OuterRow(ranks, averaged.length_s, step.length_s, 1 - step.length_s / averaged.length_s)


def island_step(job: Job, ranks: int, sync_every: int) -> StepTime:
    """Predict a step of an island, with its share of the exchange between hosts as exposed communication."""
    work, local, seconds = job.workload, job.cluster.devices_per_host, job.cluster.all_reduce_seconds
    message = (work.nbytes, job.calibration, work.busy_cores)
    # Leaders average over the links between hosts; then each broadcasts the mean on its host: half of an all-reduce.
    outer_s = seconds(ranks, *message) - seconds(local, *message) / 2
    step = job.step(local)
    # Islands wait for each other less often, but a slow host stays slow, so keep the jitter of all ranks.
    return replace(step, exposed_s=step.exposed_s + outer_s / sync_every, jitter_s=job.step(ranks).jitter_s)
