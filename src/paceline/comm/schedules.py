"""The schedule: the messages of each step, with source, destination and chunks, and whether the receiver adds them.

Each algorithm is a pure function that returns a :class:`Schedule`. The same value is executed
(``execute.py``), costed (``cost.py``), drawn (``paceline explain``) and tested.

A schedule follows these rules:

- A tensor of n elements is cut into ``chunks`` parts; part c is ``bounds(n, chunks, c)``. Parts differ by at most one
  element, and some are empty if n is smaller.
- Steps run one after another. Within a step every transfer reads the content that its source had *before* the step, so
  all transfers may run at once. A step is not a barrier: a rank without a transfer in it continues.
- ``reduce=True``: the receiver combines its own chunks with the message. ``reduce=False``: the message replaces them.
- In one step a rank sends at most one message and receives at most one, and it never receives a chunk that it also
  sends. So a message may be written as soon as it arrives, and the operands of a sum have a fixed order: held first,
  received second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

Result = Literal["all-reduce", "reduce", "broadcast", "reduce-scatter", "all-gather", "all-to-all"]


@dataclass(frozen=True)
class Transfer:
    """One message."""

    src: int
    dst: int
    chunks: range
    """Adjacent chunks that are sent as one message."""
    reduce: bool
    """Whether the receiver combines them with its own chunks; otherwise they replace its chunks."""


Step = tuple[Transfer, ...]
"""Messages that are sent at the same time."""


@dataclass(frozen=True)
class Schedule:
    """An algorithm for a given number of ranks."""

    name: str
    """Name of the public function, such as ``"ring_all_reduce"``."""
    result: Result
    """Collective that the algorithm implements."""
    size: int
    """Number of ranks, numbered from 0 as in the group."""
    chunks: int
    """Number of parts into which the tensor is cut."""
    steps: tuple[Step, ...]
    root: int | None = None
    """Source of a broadcast or destination of a reduction; None if all ranks have the same role."""

    def of(self, rank: int) -> Iterator[tuple[list[Transfer], list[Transfer]]]:
        """Yield the messages that `rank` sends and receives, for each step that has any."""
        for step in self.steps:
            sent = [transfer for transfer in step if transfer.src == rank]
            received = [transfer for transfer in step if transfer.dst == rank]
            if sent or received:
                yield sent, received


def bounds(count: int, chunks: int, first: int, last: int | None = None) -> slice:
    """Return the range of the `count` elements in chunk `first`, or in chunks `first` up to but excluding `last`."""
    last = first + 1 if last is None else last
    return slice(count * first // chunks, count * last // chunks)


def elements(schedule: Schedule, transfer: Transfer, count: int) -> int:
    """Return how many of a tensor's `count` elements a transfer carries."""
    part = bounds(count, schedule.chunks, transfer.chunks.start, transfer.chunks.stop)
    return int(part.stop - part.start)


Terms = tuple[int, ...]
"""Ranks whose contributions are combined in a chunk, in ascending order; a rank counted twice appears twice."""


def holdings(schedule: Schedule) -> list[list[list[Terms]]]:
    """Return the content of every chunk: ``holdings(s)[k][rank][chunk]`` after k steps, starting with each rank's own.

    After an all-reduce every entry is ``(0, 1, …, size - 1)``, after a broadcast ``(root,)``.
    """
    current: list[list[Terms]] = [[(rank,)] * schedule.chunks for rank in range(schedule.size)]
    history = [current]
    for step in schedule.steps:
        following = [list(chunks) for chunks in current]
        for transfer in step:
            for chunk in transfer.chunks:
                arriving = current[transfer.src][chunk]
                held = current[transfer.dst][chunk]
                following[transfer.dst][chunk] = tuple(sorted(held + arriving)) if transfer.reduce else arriving
        current = following
        history.append(current)
    return history


def together(*phases: Sequence[Step]) -> list[Step]:
    """Merge phases that run at the same time. A rank must not be in more than one of them."""
    return [sum(steps, ()) for steps in zip_longest(*phases, fillvalue=())]


def backwards(steps: Iterable[Step]) -> list[Step]:
    """Turn a reduction into a broadcast: run its messages in reverse order and direction, copying instead of adding."""
    return [
        tuple(Transfer(sent.dst, sent.src, sent.chunks, reduce=False) for sent in step)
        for step in reversed(list(steps))
    ]
