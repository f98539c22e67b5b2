"""The cores of a host: who kept them busy while a rank was ready to run and had none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.output.wording import counted
from paceline.profiler.records.rank_file import RankRecord

DELAYED, OTHERS = 0.1, 0.2
"""Share of its time that a rank has no core, and cores that other programs keep busy, from which load is a cause."""


@dataclass(frozen=True)
class Neighbours:
    """Ranks that share cores."""

    records: Sequence[RankRecord]
    cores: float
    """Cores that they have together, or less where a control group has a quota."""

    @property
    def threads(self) -> int:
        """Threads with which they compute, all together."""
        return sum(record.threads for record in self.records)

    @property
    def is_crowded(self) -> bool:
        """Whether they have more threads than cores."""
        return self.threads > self.cores

    def description(self) -> str:
        """Return the numbers of ranks, threads and cores in words."""
        each = " and ".join(map(str, sorted({record.threads for record in self.records})))
        threads, cores = counted(each, "thread"), counted(f"{self.cores:g}", "core")
        if len(self.records) == 1:
            return f"a rank with {threads} has {cores}"
        return f"{len(self.records)} ranks with {threads} each share {cores}"


@dataclass(frozen=True)
class Load:
    """The load on the cores of the rank that was kept from them longest."""

    share: float
    """Share of its time that the rank was ready to run and had no core."""
    rank: int
    others: float
    """Cores that other programs than the ranks and their workers kept busy, of those that the rank may use."""
    rivals: float
    """Cores that the other threads of the ranks there kept busy, workers included."""
    neighbours: Neighbours

    @property
    def of_ranks(self) -> float:
        """Share of the time in which it had no core because the ranks have more threads than there are cores."""
        if not (self.neighbours.is_crowded and self.rivals):
            return 0.0
        return self.share * self.rivals / (self.rivals + self.others)

    @property
    def of_others(self) -> float:
        """Share of the time in which it had no core because of other programs."""
        return self.share - self.of_ranks

    @property
    def is_by_others(self) -> bool:
        """Whether other programs slow the run down."""
        return self.of_others >= DELAYED and self.others >= OTHERS

    @property
    def is_by_ranks(self) -> bool:
        """Whether the ranks slow each other down, because they have more threads than there are cores."""
        return self.of_ranks >= DELAYED


def neighbours(records: Sequence[RankRecord], rank: int) -> Neighbours:
    """Return the ranks with which `rank` shares cores, itself included, and these cores."""
    own = records[rank]
    sharing = [
        record
        for record in records
        if record.host == own.host
        # Where the system does not tell their cores, ranks of one host are taken to share all of them.
        and (not record.core_numbers or not own.core_numbers or set(record.core_numbers) & set(own.core_numbers))
    ]
    numbers = {number for record in sharing for number in record.core_numbers}
    cores = float(len(numbers) or own.cores)
    return Neighbours(sharing, cores if own.quota is None else min(cores, own.quota))


def load_of(records: Sequence[RankRecord], delays: Sequence[float]) -> Load | None:
    """Return the load on the cores of the rank with the largest of `delays`; None where it is not known.

    Args:
        records: of all ranks.
        delays: share of its time that each rank was ready to run and had no core.
    """
    rank = max(range(len(records)), key=lambda place: delays[place])
    record, there = records[rank], neighbours(records, rank)
    if record.busy_cores is None:
        return None
    own = math.fsum(one.own_cores for one in there.records)
    # The loop itself does not keep its thread from a core; threads of its operators do.
    rivals = max(0.0, own - record.loop_cores)
    return Load(delays[rank], rank, max(0.0, record.busy_cores - own), rivals, there)
