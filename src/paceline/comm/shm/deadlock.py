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
from collections.abc import Sequence
from itertools import count
from typing import Any

from paceline.comm.shm.arena import HEADER_BYTES, Segment
from paceline.comm.shm.header import END_OF_SLOTS
from paceline.core.processes.missing_ranks import named_ranks, ranks_by_value
from paceline.core.telemetry.users_code import users_line

_HEAD = struct.Struct("@IIq")  # checksum and length of the waits, and the operation
_WAITS_AT = END_OF_SLOTS + _HEAD.size
_MASK = 2**32 - 1
ELSEWHERE, NEVER = -1, 2**62
"""Operations in the records of a rank's other groups, and of a rank that has found a deadlock and posts nothing more."""
_numbers = count()

Waits = dict[str, Sequence[Any]]
"""Rank and description of each wait. A key is a process and the number of its wait."""


class Wait:
    """A long wait of this rank for `operation`."""

    def __init__(self, rank: int, operation: str) -> None:
        self._key = f"{os.getpid()}/{next(_numbers)}"
        self._own: Waits = {self._key: (rank, f"{operation}{users_line(sys._getframe())}")}
        self._seen: Waits = {}
        """The waits in a deadlock at the latest look; empty if there was none."""

    def deadlock_in(self, waits: Waits, is_final: bool) -> str:
        """Describe the deadlock, if this wait is one of the `waits` for it, or `is_final`: another rank found it."""
        previous, self._seen = self._seen, waits if is_final or self._key in waits else {}
        # Look twice, so that every rank names the same places.
        if not self._seen or not (is_final or previous.keys() == waits.keys()):
            return ""
        ranks = ranks_by_value(sorted({(rank, place) for rank, place in (waits | self._own).values()}))
        return "; ".join(f"{named_ranks(numbers)}: {place}" for place, numbers in ranks.items())

    def record(self, segment: Segment, waits: Waits, operation: int) -> None:
        """Record this wait and the `waits` for it in this rank's memory of a group, if there is room."""
        text = json.dumps(waits | self._own).encode()
        if len(text) <= HEADER_BYTES - _WAITS_AT:
            head = _HEAD.pack(zlib.crc32(text, operation & _MASK), len(text), operation)
            segment.memory[END_OF_SLOTS : _WAITS_AT + len(text)] = head + text


def clear(segment: Segment) -> None:
    """Remove the record from this rank's memory."""
    segment.memory[END_OF_SLOTS:_WAITS_AT] = bytes(_HEAD.size)


def read(segment: Segment) -> tuple[int, Waits]:
    """Return another rank's record: the operation that it waits for, and all waits."""
    checksum, length, operation = _HEAD.unpack_from(segment.memory, END_OF_SLOTS)
    text = segment.memory[_WAITS_AT : _WAITS_AT + length]
    is_whole = length and zlib.crc32(text, operation & _MASK) == checksum  # not written to while it was read
    return (operation, json.loads(text)) if is_whole else (ELSEWHERE, {})
