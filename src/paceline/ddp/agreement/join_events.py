"""Events inside ``join``: ranks with data announce the next collective to ranks that ran out.

One int64 vector, the maximum over the ranks in a separate collective:

    [ event, layer, code | the same negated | wrapper, negated | 1 for each rank that has data ]

The negated numbers give the minimum, so that a difference between ranks shows. A rank that ran out puts in numbers
below all of these. Everything here is a function of plain values.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from torch import Tensor

from paceline.errors import DesyncError, UsageError

NOTHING = -(2**62)
"""A number below all numbers in messages, negated ones included, so that the maximum never picks it over a message."""
_HEAD = 8  # event, layer and code, the same negated, and the wrapper: one maximum also shows the smallest of each


class Stage(Enum):
    """A rank's stage inside ``join``: idle → all have data, or followed → idle; shadowing once it has run out."""

    IDLE = "between steps"
    ALL_HAVE_DATA = "in a step in which every rank has data"
    FOLLOWED = "in a step that ranks without data shadow"
    SHADOWING = "this rank has run out of data and shadows the others' steps"


class Event(IntEnum):
    """The collective that comes next."""

    FORWARD = 0
    """Beginning of a step, with no collective to take part in yet."""
    BUFFERS = 1
    """Broadcast of buffers."""
    LAYER = 2
    """Collective of a layer."""
    BACKWARD = 3
    """Synchronized backward: its buckets and its control block."""
    END = 4
    """End of that backward's collectives and of the step; only the buckets are still waited for."""
    LOCAL = 5
    """End of a backward under ``no_sync``, and of the step."""


class JoinEvents(Protocol):
    """Tells the ranks that ran out of data, inside ``join``, this rank's next event."""

    enabled: bool
    """Whether the wrapper is inside ``join``. Outside, all ranks have data and events are not sent."""

    @property
    def source(self) -> int:
        """The rank whose buffers all ranks copy: the first that has data; rank 0 outside ``join``."""

    def announce(self, event: Event) -> bool:
        """Announce the collective that comes next; returns whether ranks without data take part in it."""


@dataclass(frozen=True)
class Message:
    """An event; for that of a layer, the layer's number and the arguments of its collective."""

    event: Event
    layer: int = 0
    code: int = 0

    def __str__(self) -> str:
        return f"{self.event.name} of layer {self.layer}" if self.event is Event.LAYER else self.event.name


def event_number(name: str) -> int:
    """Return a number for the wrapper whose channel is called `name`, the same on every rank."""
    return zlib.crc32(name.encode())  # not hash(), which differs between processes


def encode(message: Message | None, wrapper: int, rank: int, size: int) -> list[int]:
    """Return the numbers that rank `rank` of `size` contributes; `message` is None if it has run out of data."""
    if message is None:
        return [*[NOTHING] * 6, wrapper, -wrapper, *[0] * size]
    values = message.event, message.layer, message.code
    return [*values, *(-value for value in values), wrapper, -wrapper, *(int(other == rank) for other in range(size))]


def decode(vector: Tensor) -> tuple[Message | None, list[int]]:
    """Return the message of the ranks that have data, None if no rank has any; and these ranks."""
    values: list[int] = vector.tolist()
    present = [rank for rank, has_data in enumerate(values[_HEAD:]) if has_data]
    # The largest and the smallest number of a wrapper differ: ranks are in the steps of two of them.
    if values[6] != -values[7]:
        raise UsageError(
            "inside join(), one wrapper's step began before another's had ended, which a rank without data cannot "
            "follow; run forward and backward of one wrapper after the other"
        )
    if not present:
        return None, present
    largest, smallest = values[:3], [-value for value in values[3:6]]
    high, low = (Message(Event(event), layer, code) for event, layer, code in (largest, smallest))
    if largest != smallest:
        raise DesyncError(
            f"inside join(), ranks that have data are at different points of their step ({low} and {high}); run the "
            "same forwards and backwards in the same order on all of them"
        )
    return high, present
