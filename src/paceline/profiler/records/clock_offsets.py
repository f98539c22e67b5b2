"""Offsets of the ranks' clocks from rank 0's clock, because different hosts have different clocks.

No rank leaves an all-gather before all ranks have entered it. So rank 0 enters before this rank leaves, and vice versa:
every exchange bounds the offset from both sides, and the tightest bounds of several exchanges are combined (after Duda,
Harrus, Haddad and Bernard, "Estimating global time in distributed systems", ICDCS 1987).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from paceline.comm.topology import SPLIT

EXCHANGES = 12


def are_apart() -> bool:
    """Return whether ranks may run on several hosts with different clocks. All ranks get the same answer."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    local = os.environ.get("LOCAL_WORLD_SIZE")
    # In tests, SPLIT makes one host count as several.
    return SPLIT in os.environ or local is None or int(local) < dist.get_world_size()


def measure_offset(clock: Callable[[], float] = time.perf_counter) -> tuple[float, float, float]:
    """Compare this rank's clock with rank 0's. Collective.

    Returns:
        The time of the measurement on this rank's clock, how many seconds the clock is ahead, and the maximum error.
    """
    local_times: list[tuple[float, float]] = []
    for _ in range(EXCHANGES):
        begin = clock()
        dist.all_gather_object([None] * dist.get_world_size(), begin)
        local_times.append((begin, clock()))
    all_times: list[list[tuple[float, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(all_times, local_times)
    offset, error = bound_offset(local_times, all_times[0])
    return local_times[-1][1], offset, error


def bound_offset(local: Sequence[tuple[float, float]], reference: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return this clock's offset from another and the maximum error, given the starts and ends of exchanges."""
    low = max(begin - end for (begin, _), (_, end) in zip(local, reference, strict=True))
    high = min(end - begin for (_, end), (begin, _) in zip(local, reference, strict=True))
    # If clocks drift during the exchanges, the bounds may cross.
    return (low + high) / 2, abs(high - low) / 2


def offset_at(when: float, measured: Sequence[tuple[float, float, float]]) -> float:
    """Return the offset at `when`, on the line through the first and last measurements; 0 if there are none."""
    if not measured:
        return 0.0
    (first, begin, _), (last, end, _) = measured[0], measured[-1]
    if last <= first:
        return begin
    return begin + (end - begin) * (when - first) / (last - first)
