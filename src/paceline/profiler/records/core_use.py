"""The cores of a host, and the load on them when a rank was ready to run but had no core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.output.wording import counted
from paceline.profiler.records.rank_file import RankRecord

DELAYED, OTHERS = 0.1, 0.2
"""Load is named as a cause if a rank had no core for at least this share of its time, and at least this many cores were
busy with other programs."""


@dataclass(frozen=True)
class Neighbours:
    """Ranks that share cores."""

    records: Sequence[RankRecord]
    cores: float
    """Number of cores that they share, limited by the quota of a control group."""

    @property
    def threads(self) -> int:
        """Total number of their threads."""
        return sum(record.threads for record in self.records)

    @property
    def is_crowded(self) -> bool:
        """Whether they have more threads than cores."""
        return self.threads > self.cores

    def description(self) -> str:
        """Return the numbers of ranks, threads and cores in words."""
        counts = " and ".join(map(str, sorted({record.threads for record in self.records})))
        threads, cores = counted(counts, "thread"), counted(f"{self.cores:g}", "core")
        if len(self.records) == 1:
            return f"a rank with {threads} has {cores}"
        return f"{len(self.records)} ranks with {threads} each share {cores}"


@dataclass(frozen=True)
class Load:
    """The load on the cores of the most delayed rank."""

    share: float
    """Share of its time during which the rank was ready to run but had no core."""
    rank: int
    others: float
    """How many of the rank's cores were busy with programs other than the ranks and their workers."""
    rivals: float
    """How many of the rank's cores were busy with other threads of the ranks and their workers."""
    neighbours: Neighbours

    @property
    def of_ranks(self) -> float:
        """Share of its time without a core because the ranks have more threads than cores."""
        if not (self.neighbours.is_crowded and self.rivals):
            return 0.0
        return self.share * self.rivals / (self.rivals + self.others)

    @property
    def of_others(self) -> float:
        """Share of its time without a core because of other programs."""
        return self.share - self.of_ranks

    @property
    def is_by_others(self) -> bool:
        """Whether other programs slow down the run."""
        return self.of_others >= DELAYED and self.others >= OTHERS

    @property
    def is_by_ranks(self) -> bool:
        """Whether the ranks slow each other down because they have more threads than cores."""
        return self.of_ranks >= DELAYED


def neighbours(records: Sequence[RankRecord], rank: int) -> Neighbours:
    """Return the ranks that share cores with `rank`, including `rank` itself, and those cores."""
    this = records[rank]
    sharing = [
        record
        for record in records
        if record.host == this.host
        # If their cores are unknown, assume that all ranks on a host share all of its cores.
        and (not record.core_numbers or not this.core_numbers or set(record.core_numbers) & set(this.core_numbers))
    ]
    numbers = {number for record in sharing for number in record.core_numbers}
    cores = float(len(numbers) or this.cores)
    return Neighbours(sharing, cores if this.quota is None else min(cores, this.quota))


def load_of(records: Sequence[RankRecord], delays: Sequence[float]) -> Load | None:
    """Return the load on the cores of the rank with the largest delay; None if unknown.

    Args:
        records: records of all ranks.
        delays: for each rank, the share of its time during which it was ready to run but had no core.
    """
    rank = max(range(len(records)), key=lambda place: delays[place])
    record, group = records[rank], neighbours(records, rank)
    if record.busy_cores is None:
        return None
    own_cores = math.fsum(member.own_cores for member in group.records)
    # The loop's thread does not compete with itself, but the threads of its operators compete with it.
    rivals = max(0.0, own_cores - record.loop_cores)
    return Load(delays[rank], rank, max(0.0, record.busy_cores - own_cores), rivals, group)
