"""Finds deadlocks: ranks that wait, through other ranks, for themselves.

A rank that has slept for a while in a wait records in its memory of every group which operation it waits for, and the
waits of all ranks that wait for it, directly or through others. Each rank decides from its own count of posted
operations whether a recorded wait is for it, so a record that is out of date (the wait is over, or the process is
stopped or has no core) does no harm. A rank posts nothing while it waits, so what it has recorded remains true as long
as its wait lasts. A rank whose own wait is in the records of the ranks that wait for it will never be released
(Chandy, Misra and Haas, "Distributed deadlock detection", 1983).

A rank that computes, or that waits outside shared memory, records nothing. Neither does a rank with another thread that
runs the user's code or has posted, because it may be about to post the operation that the others wait for.
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

ELSEWHERE, NEVER = -1, 2**62
"""Operations in records: the rank waits in another group, or has found a deadlock and will not post any more."""
_HEAD = struct.Struct("@II")  # checksum and length
_RECORD_AT = END_OF_SLOTS + _HEAD.size
_numbers = count()

Waits = dict[str, Sequence[Any]]
"""Rank and description of each wait. A key is a process and the number of its wait."""


def new_wait(rank: int, operation: str) -> Waits:
    """Return a wait of this rank, at the user's line that led here."""
    return {f"{os.getpid()}/{next(_numbers)}": (rank, operation + users_line(sys._getframe()))}


def describe(waits: Waits) -> str:
    """Return the ranks of `waits` and what they wait for."""
    ranks = ranks_by_value(sorted({(rank, place) for rank, place in waits.values()}))
    return "; ".join(f"{named_ranks(numbers)}: {place}" for place, numbers in ranks.items())


def record(segment: Segment, operation: int, waits: Waits) -> None:
    """Record in this rank's memory, if there is room, that it waits for `operation`, and all `waits`."""
    text = json.dumps((operation, waits)).encode()
    if len(text) <= HEADER_BYTES - _RECORD_AT:
        segment.memory[END_OF_SLOTS : _RECORD_AT + len(text)] = _HEAD.pack(zlib.crc32(text), len(text)) + text


def read(segment: Segment) -> tuple[int, Waits]:
    """Return a rank's record; an empty one if it is just being written."""
    checksum, length = _HEAD.unpack_from(segment.memory, END_OF_SLOTS)
    text = segment.memory[_RECORD_AT : _RECORD_AT + length]
    return json.loads(text) if length and zlib.crc32(text) == checksum else (ELSEWHERE, {})
