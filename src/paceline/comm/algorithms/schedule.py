"""The schedule: which rank sends which chunks to which in each step, and whether the receiver adds or replaces.

An algorithm is written once, as a pure function that returns a :class:`Schedule`; that one value is executed
(``execute.py``), costed (``cost.py``), drawn (``paceline explain``) and tested.

The rules that give a schedule its meaning:

- A tensor of n elements is cut into ``chunks`` parts; part c is ``bounds(n, chunks, c)``. Parts differ by one element
  at most, and some are empty where n is smaller.
- Steps follow each other. Within a step every transfer reads what its source held *before* the step, so all of them may
  travel at once. A step is no barrier: a rank without a transfer in it goes on.
- ``reduce=True``: the receiver combines what it holds with what comes. ``reduce=False``: what comes replaces it.
- In one step a rank sends one message at most and receives one at most, and never a chunk that it also sends. So what
  comes may be written at once, and a sum's order of operands is fixed: held first, received second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

Result = Literal["all-reduce", "reduce", "broadcast", "reduce-scatter", "all-gather"]


@dataclass(frozen=True)
class Transfer:
    """One message."""

    src: int
    dst: int
    chunks: range
    """Neighbouring chunks, which travel as one message."""
    reduce: bool
    """Whether the receiver combines them with its own, or replaces its own."""


Step = tuple[Transfer, ...]
"""Messages that travel at the same time."""


@dataclass(frozen=True)
class Schedule:
    """An algorithm for a given number of ranks."""

    name: str
    """That of the public function: ``"ring_all_reduce"``."""
    result: Result
    """The collective that it carries out."""
    size: int
    """Ranks, numbered from 0 as in the group."""
    chunks: int
    """Parts into which the tensor is cut."""
    steps: tuple[Step, ...]
    root: int | None = None
    """The rank that a broadcast starts from, or that a reduction ends at; None where all ranks are alike."""

    def of(self, rank: int) -> Iterator[tuple[list[Transfer], list[Transfer]]]:
        """Yield the messages that `rank` sends and those that it receives, in each step that it takes part in."""
        for step in self.steps:
            sent = [transfer for transfer in step if transfer.src == rank]
            received = [transfer for transfer in step if transfer.dst == rank]
            if sent or received:
                yield sent, received


def bounds(count: int, chunks: int, first: int, last: int | None = None) -> slice:
    """Return the elements of `count` in chunk `first`, or in chunks `first` up to and without `last`."""
    last = first + 1 if last is None else last
    return slice(count * first // chunks, count * last // chunks)


def elements(schedule: Schedule, transfer: Transfer, count: int) -> int:
    """Return how many of a tensor's `count` elements a transfer carries."""
    part = bounds(count, schedule.chunks, transfer.chunks.start, transfer.chunks.stop)
    return int(part.stop - part.start)


Terms = tuple[int, ...]
"""The ranks whose contributions a chunk is the reduction of, ascending; one that is counted twice appears twice."""


def holdings(schedule: Schedule) -> list[list[list[Terms]]]:
    """Follow who holds what: ``holdings(s)[k][rank][chunk]`` after k steps; at first all hold their own.

    After an all-reduce every entry is ``(0, 1, …, size - 1)``, after a broadcast ``(root,)``.
    """
    now: list[list[Terms]] = [[(rank,)] * schedule.chunks for rank in range(schedule.size)]
    history = [now]
    for step in schedule.steps:
        after = [list(chunks) for chunks in now]
        for transfer in step:
            for chunk in transfer.chunks:
                arriving = now[transfer.src][chunk]
                held = now[transfer.dst][chunk]
                after[transfer.dst][chunk] = tuple(sorted(held + arriving)) if transfer.reduce else arriving
        now = after
        history.append(now)
    return history


def together(*phases: Sequence[Step]) -> list[Step]:
    """Merge phases that run at the same time; no rank is in two of them."""
    return [sum(steps, ()) for steps in zip_longest(*phases, fillvalue=())]


def backwards(steps: Iterable[Step]) -> list[Step]:
    """Run a reduction backwards, which is a broadcast: the last message first, every receiver the sender, copied."""
    return [
        tuple(Transfer(sent.dst, sent.src, sent.chunks, reduce=False) for sent in step)
        for step in reversed(list(steps))
    ]
