"""Finds deadlocks: ranks that wait, through other ranks, for themselves.

A rank that has slept for a while in a wait writes a record to its memory in every group. It contains the operation that
it waits for, and the waits of all ranks that wait for it, directly or through others. Each rank decides from its own
count of posted operations which ranks wait for it, so a record that is late (the other process is stopped, or has no
core) does no harm. A rank posts nothing while it waits. Therefore what it has recorded remains true as long as its wait
lasts, and a rank that finds its own wait among those that wait for it will never be released (Chandy, Misra and Haas,
"Distributed deadlock detection", 1983).

A rank that computes, or that waits outside shared memory, has no record. Neither has a rank with operations of several
threads, because another thread may be about to post the operation that the others wait for.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import zlib
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from paceline.comm.shm.arena import HEADER_BYTES, Segment
from paceline.comm.shm.header import END_OF_SLOTS, Header
from paceline.core.processes.missing_ranks import ranks_by_value
from paceline.core.telemetry.users_code import users_line

_HEAD = struct.Struct("@IIq")  # checksum and length of the waits, and the operation
_WAITS_AT = END_OF_SLOTS + _HEAD.size
_MASK = 2**32 - 1
ELSEWHERE = -1
"""Operation in the records of a rank's other groups."""
_numbers = count()

Waits = dict[str, Sequence[Any]]
"""Rank and description of each wait. A key is a process and the number of its wait."""


class Wait:
    """A long wait of this rank."""

    def __init__(self, rank: int, header: Header) -> None:
        self._key = f"{os.getpid()}/{next(_numbers)}"
        self._description = rank, f"{header}{users_line(sys._getframe())}"
        self.places = ""
        """Descriptions of the waits in a deadlock, as of the latest look; empty if there was none."""

    def record(self, waits: Waits, memories: Iterable[tuple[Segment, int]]) -> str:
        """Record this wait and the `waits` for this rank; describe all if one of them is this one, a deadlock.

        Args:
            waits: the waits of all ranks that wait for this rank.
            memories: this rank's memory of each group, with the operation that it waits for or :data:`ELSEWHERE`.
        """
        text = json.dumps(waits | {self._key: self._description}).encode()
        if len(text) <= HEADER_BYTES - _WAITS_AT:
            for segment, operation in memories:
                head = _HEAD.pack(zlib.crc32(text, operation & _MASK), len(text), operation)
                segment.memory[END_OF_SLOTS : _WAITS_AT + len(text)] = head + text
        if self._key not in waits:
            return ""
        ranks = ranks_by_value(sorted({(rank, place) for rank, place in waits.values()}))
        return "; ".join(f"rank {', '.join(map(str, names))}: {place}" for place, names in ranks.items())


def clear(segment: Segment) -> None:
    """Remove the record from this rank's memory."""
    segment.memory[END_OF_SLOTS:_WAITS_AT] = bytes(_HEAD.size)


def waits_for(segment: Segment, posted: int) -> Waits:
    """Return the waits that another rank has recorded if it waits for an operation that this rank has not posted."""
    checksum, length, operation = _HEAD.unpack_from(segment.memory, END_OF_SLOTS)
    text = segment.memory[_WAITS_AT : _WAITS_AT + length]
    is_whole = length and zlib.crc32(text, operation & _MASK) == checksum  # not written to while it was read
    return json.loads(text) if is_whole and operation >= posted else {}
