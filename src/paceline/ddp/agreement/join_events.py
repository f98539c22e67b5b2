"""Events inside ``join``: ranks with data announce the next collective to ranks that have run out.

One int64 vector, reduced to its maximum over the ranks in a separate collective:

    [ event, layer, code | the same negated | wrapper, negated | 1 for each rank that has data ]

The maximum of a negated number gives the minimum, which reveals any difference between ranks. A rank that has run out
of data contributes numbers that are smaller than any message's. The functions in this module do not communicate; they
work on plain values.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from torch import Tensor

from paceline.errors import DesyncError, UsageError

NOTHING = -(2**62)
"""Smaller than any number in a message, negated or not, so a message always determines the maximum."""
_HEAD = 8  # event, layer, code and their negations; the wrapper's number and its negation


class Stage(Enum):
    """A rank's stage inside ``join``.

    A rank with data goes from IDLE to ALL_HAVE_DATA or FOLLOWED and back to IDLE; a rank without data is SHADOWING.
    """

    IDLE = "between steps"
    ALL_HAVE_DATA = "in a step in which every rank has data"
    FOLLOWED = "in a step that ranks without data shadow"
    SHADOWING = "this rank has run out of data and shadows the others' steps"


class Event(IntEnum):
    """The next collective, or the end of a step."""

    FORWARD = 0
    """Start of a step; no collective follows immediately."""
    BUFFERS = 1
    """Broadcast of buffers."""
    LAYER = 2
    """Collective of a layer."""
    BACKWARD = 3
    """Synchronized backward pass: its buckets and its control block."""
    END = 4
    """End of the step after a synchronized backward pass: no more collectives, only the wait for the buckets."""
    LOCAL = 5
    """End of the step after a backward pass under ``no_sync``."""


class JoinEvents(Protocol):
    """Announces this rank's next event to ranks that have run out of data inside ``join``."""

    enabled: bool
    """Whether the wrapper is inside ``join``. Outside, all ranks have data and events are not sent."""

    @property
    def source(self) -> int:
        """The rank whose buffers all ranks copy: the first one with data; rank 0 outside ``join``."""

    def announce(self, event: Event) -> bool:
        """Announce the collective that comes next; returns whether ranks without data take part in it."""


@dataclass(frozen=True)
class Message:
    """An event; for a layer's collective, also the layer's number and a code for the collective's arguments."""

    event: Event
    layer: int = 0
    code: int = 0

    def __str__(self) -> str:
        return f"{self.event.name} of layer {self.layer}" if self.event is Event.LAYER else self.event.name


def event_number(name: str) -> int:
    """Return a number that identifies the wrapper whose channel is called `name`, the same on every rank."""
    return zlib.crc32(name.encode())  # not hash(), which differs between processes


def encode(message: Message | None, wrapper: int, rank: int, size: int) -> list[int]:
    """Return the numbers that rank `rank` of `size` contributes; `message` is None if it has run out of data."""
    if message is None:
        return [*[NOTHING] * 6, wrapper, -wrapper, *[0] * size]
    values = message.event, message.layer, message.code
    return [*values, *(-value for value in values), wrapper, -wrapper, *(int(index == rank) for index in range(size))]


def decode(vector: Tensor) -> tuple[Message | None, list[int]]:
    """Return the message of the ranks that have data (None if no rank has any), and the list of those ranks."""
    values: list[int] = vector.tolist()
    present = [rank for rank, has_data in enumerate(values[_HEAD:]) if has_data]
    # If the largest and the smallest wrapper number differ, ranks are in the steps of two different wrappers.
    if values[6] != -values[7]:
        raise UsageError(
            "inside join(), one wrapper's step began before another's had ended, and a rank without data cannot follow "
            "both; finish one wrapper's backward pass before another wrapper's forward pass"
        )
    if not present:
        return None, present
    largest, smallest = values[:3], [-value for value in values[3:6]]
    high, low = (Message(Event(event), layer, code) for event, layer, code in (largest, smallest))
    if largest != smallest:
        raise DesyncError(
            f"inside join(), ranks that have data are at different points of their step ({low} and {high}); run the "
            "same forward and backward passes in the same order on all of them"
        )
    return high, present
