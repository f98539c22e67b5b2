"""Hierarchical all-reduce: within hosts, across hosts, within hosts, so each byte crosses the network once per host.

Cho, Finkler, Kung & Hunter, "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy",
SysML 2019. With h hosts of m ranks, a rank sends 2 (h−1)/h · n/m bytes over the network; a flat ring sends
2 (p−1)/p · n over each link between hosts ::

    host x: ranks 0 1     host y: ranks 2 3     chunks A B | C D:  place 0 of a host reduces A B, place 1 C D

    inside     step 1    0 ↔ 1, 2 ↔ 3     a ring's reduce-scatter: 0 and 2 have their host's A B, 1 and 3 its C D
    across     step 2    0 ↔ 2, 1 ↔ 3     a ring's reduce-scatter: 0 has A, 2 has B, 1 has C, 3 has D
               step 3    0 ↔ 2, 1 ↔ 3     a ring's all-gather: 0 and 2 have A B, 1 and 3 have C D
    inside     step 4    0 ↔ 1, 2 ↔ 3     a ring's all-gather: all have A B C D

If hosts have different numbers of ranks, m is the smallest. Each additional rank of a host first sends everything to
one of the m ranks, and receives the result from it at the end.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paceline.comm.algorithms.ring import all_gather_steps, reduce_scatter_steps
from paceline.comm.algorithms.schedule import Schedule, Step, Transfer, backwards, together
from paceline.core.processes.missing_ranks import ranks_by_value


def all_reduce(hosts: Sequence[Hashable]) -> Schedule:
    """Build the all-reduce: 2 (m−1) + 2 (h−1) steps, 2 (p−1)/p · n bytes sent by every rank, p = h · m."""
    rows = list(ranks_by_value(enumerate(hosts)).values())  # the ranks of each host
    places, size = min(map(len, rows)), len(hosts)
    parts = len(rows)
    chunks = places * parts
    shards = [range(place * parts, (place + 1) * parts) for place in range(places)]
    cores = [row[:places] for row in rows]

    folded = _fold(rows, places, chunks)
    inside = together(*(reduce_scatter_steps(row, shards) for row in cores))
    columns = [[row[place] for row in cores] for place in range(places)]
    pieces = [[range(chunk, chunk + 1) for chunk in shard] for shard in shards]
    across = together(*(reduce_scatter_steps(*pair) for pair in zip(columns, pieces, strict=True)))
    back = together(*(all_gather_steps(*pair) for pair in zip(columns, pieces, strict=True)))
    outside = together(*(all_gather_steps(row, shards) for row in cores))
    steps = [*folded, *inside, *across, *back, *outside, *backwards(folded)]
    return Schedule("hierarchical_all_reduce", "all-reduce", size, chunks, tuple(steps))


def _fold(rows: Sequence[Sequence[int]], places: int, chunks: int) -> list[Step]:
    """Build the rounds in which each host's other ranks send messages to its first `places` ranks."""
    rounds: list[Step] = []
    # A rank receives at most one message per step, so several rounds may be needed.
    for start in range(places, max(map(len, rows)), places):
        rounds.append(
            tuple(
                Transfer(rank, row[place], range(chunks), reduce=True)
                for row in rows
                for place, rank in enumerate(row[start : start + places])
            )
        )
    return rounds
