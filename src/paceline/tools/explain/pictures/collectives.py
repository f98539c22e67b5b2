"""The six collectives: the data of every rank before, during and after each, with its cost and the call in torch.

The states are found by running a schedule of each. Cells that the result does not depend on are left empty, so a
picture shows the data that a caller gives and gets, and no leftovers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.comm.algorithms import Schedule, Step, build, holdings, linear
from paceline.comm.algorithms.schedule import Terms
from paceline.core.output.wording import counted
from paceline.ddp.options.buckets import CAPACITY, MIB
from paceline.tools.explain.pictures.ring_exchange import chunk_name, traffic, used_later
from paceline.tools.explain.pictures.scene import ms
from paceline.tools.explain.pictures.timeline import LINK


@dataclass(frozen=True)
class Collective:
    """A collective, with the schedule that is drawn."""

    name: str
    schedule: Schedule
    algorithm: str
    call: str
    """Function of torch.distributed, with its arguments."""
    about: str
    after: str
    """The data that ranks have in the end."""
    hint: str

    @property
    def is_exchange(self) -> bool:
        """Return whether it is the all-to-all, in whose schedule chunk s·p + d is what rank s has for rank d."""
        return self.schedule.result == "all-to-all"

    @property
    def rows(self) -> int:
        """Return the number of parts of a rank's tensor."""
        return self.schedule.size if self.is_exchange else self.schedule.chunks

    @property
    def middle(self) -> int:
        """Return the step that stands for all of them in the finished picture."""
        return (len(self.schedule.steps) + 1) // 2

    def moved(self) -> tuple[float, float]:
        """Return the most bytes that a rank sends, and that one receives."""
        sent, received = traffic(self.schedule)
        return self._tensor * max(sent), self._tensor * max(received)

    def seconds(self) -> float:
        """Return the time by the cost model."""
        return LINK.seconds(self.schedule, self._tensor)

    @property
    def _tensor(self) -> int:
        """Return the bytes that all chunks of the schedule have together."""
        # An exchange's chunks are those of all ranks' tensors, see is_exchange.
        return CAPACITY * (self.schedule.size if self.is_exchange else 1)


class Part(NamedTuple):
    """The content of a cell."""

    chunk: int
    """Letter of the chunk."""
    terms: Terms
    came: bool = False


State = list[list[Part | None]]
"""Contents of all ranks, ``[rank][row]``; None where a cell is empty."""


def collectives(size: int) -> list[Collective]:
    """Return the six collectives among `size` ranks."""
    last = f"rank {size - 1}"
    return [
        Collective(
            "broadcast",
            build("tree_broadcast", size),
            "tree",
            "broadcast(tensor, src=0)",
            "Rank 0's tensor goes to every rank. Training starts all replicas with it.",
            "every rank holds rank 0's tensor",
            "how many ranks have the tensor: up to twice as many after each step, because each passes it on.",
        ),
        Collective(
            "reduce",
            build("tree_reduce", size),
            "tree",
            "reduce(tensor, dst=0)",
            "The sum of all ranks' tensors goes to rank 0 alone, which may log a loss.",
            "rank 0 holds the sum; the others have no result",
            "rank 0: a broadcast run backwards, with sums.",
        ),
        Collective(
            "all-reduce",
            build("ring_all_reduce", size),
            "ring",
            "all_reduce(tensor)",
            "Every rank gets the sum of all ranks' tensors. Data-parallel training averages gradients with it.",
            "every rank holds the sum of every row",
            "the state halfway: each rank has the sum of one row: a reduce-scatter. An all-gather follows.",
        ),
        Collective(
            "reduce-scatter",
            build("ring_reduce_scatter", size),
            "ring",
            "reduce_scatter_tensor(part, tensor)",
            "Every rank gets one part of the sum. A sharded optimizer needs no more: each rank updates its own part.",
            "every rank holds the sum of one row",
            f"row A: its sum grows by one rank's part a step, and ends on rank 0; the last row's on {last}.",
        ),
        Collective(
            "all-gather",
            build("ring_all_gather", size),
            "ring",
            "all_gather_into_tensor(tensor, part)",
            "Every rank gets all ranks' parts, one after the other. So a sharded optimizer shares its updated weights.",
            "every rank holds all ranks' parts",
            "row A: copies of rank 0's part go from rank to rank, while all other parts do the same.",
        ),
        Collective(
            "all-to-all",
            linear.all_to_all(size),
            "pairwise exchange",
            "all_to_all_single(output, input)",
            "Every rank has another part for each rank. So layers with experts send tokens to the experts' ranks.",
            "every rank holds the parts that were for it",
            "the letters: A is for rank 0, B for rank 1, and so on. In the end a rank has one letter, from every rank.",
        ),
    ]


def states(collective: Collective) -> list[State]:
    """Return the contents of all ranks at the start and after every step, without those that are not needed."""
    schedule = collective.schedule
    steps: tuple[Step, ...] = ((), *schedule.steps)
    return [
        [
            [_part(collective, rank, row, held[rank], needed[rank], step) for row in range(collective.rows)]
            for rank in range(schedule.size)
        ]
        for held, needed, step in zip(holdings(schedule), used_later(schedule), steps, strict=True)
    ]


def _part(
    collective: Collective, rank: int, row: int, held: Sequence[Terms], needed: Sequence[bool], step: Step
) -> Part | None:
    size = collective.schedule.size
    # A rank's row j of an all-to-all holds its part for rank j, and from their exchange on the one from rank j.
    chunks = (row * size + rank, rank * size + row) if collective.is_exchange else (row,)
    for chunk in chunks:
        if needed[chunk] and (not collective.is_exchange or held[chunk] == (chunk // size,)):
            came = any(one.dst == rank and chunk in one.chunks for one in step)
            return Part(chunk % size if collective.is_exchange else row, held[chunk], came)
    return None


def words(collective: Collective, part: Part | None, spelled_out: bool = True) -> str:
    """Return the content of a cell as text: ``A013`` is the sum of chunk A over ranks 0, 1 and 3."""
    if part is None:
        return "–"
    letter = chunk_name(part.chunk) if collective.rows > 1 else ""
    return letter + ("".join(map(str, part.terms)) if spelled_out else f"({len(part.terms)})")


def outcome(collective: Collective) -> str:
    """Return the call, the steps, the bytes and the time as a sentence."""
    call = f"torch.distributed.{collective.call}"
    if collective.schedule.size == 1:
        return f"{call}. One rank has nothing to send."
    sent, received = (f"{nbytes / MIB:.4g}" for nbytes in collective.moved())
    moved = (
        f"sends and receives up to {sent}" if sent == received else f"sends up to {sent} and receives up to {received}"
    )
    steps = counted(len(collective.schedule.steps), "step")
    return f"{call}. As a {collective.algorithm}: {steps}, {ms(collective.seconds())}; a rank {moved} MiB."
