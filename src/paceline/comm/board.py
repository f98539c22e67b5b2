"""The board: a short report of each step from every rank of a host, without a collective.

A rank's report is one aligned 64-bit word in its own shared memory, which the other ranks have mapped: the number of
the report modulo 2^16, and 48 bits of content. One store publishes it, so that no order between stores matters. There
are two places for a word, which reports use in turn: a rank reads report k of all ranks before it posts report k + 1,
so every rank has read report k - 1 before report k + 1 replaces it.

A weight is stored separately, as a float64. A third word, which depends on the weight and on the number of the report,
shows whether the weight that a rank reads belongs to the report.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from operator import itemgetter

from paceline.comm.handshake import Peer
from paceline.comm.operation_header import SLOTS_AT
from paceline.comm.shm_engine import Engine
from paceline.core.torch_internals import class_never_compiled

_NUMBER = 2**16 - 1
_MASK = 2**64 - 1
_MIX = 0x9E3779B97F4A7C15
_PLACES = (0, 3)
"""Index of the word of a report with an even number, and with an odd one; the weight and its check follow."""
_SPINS_S, _NAP_S = 0.0004, 0.001
"""Seconds of polling before the first sleep, if every rank has a core; and the first sleep of the engine."""


@class_never_compiled
class Board:
    """The reports of the ranks of one group; all ranks post and read them in the same order.

    Args:
        engine: knows the ranks' memory, notices the end of a process, and counts this rank's reports.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pages = [memoryview(memory.memory)[:SLOTS_AT].cast("Q") for memory in engine.memories]
        self._own = self._pages[engine.rank]
        self._word_of = tuple(itemgetter(place) for place in _PLACES)
        self._spins_s = _SPINS_S if engine.has_own_core else 0.0
        self._word = 0

    def post(self, content: int, weight: float | None = None) -> None:
        """Post this rank's next report: `content`, below 2^48, and a weight if ranks read weights."""
        self._engine.reports = number = self._engine.reports + 1
        place = _PLACES[number & 1]
        if weight is not None:
            bits: int = struct.unpack("Q", struct.pack("d", weight))[0]
            self._own[place + 1], self._own[place + 2] = bits, _check(bits, number)
        self._own[place] = self._word = content << 16 | number & _NUMBER

    def is_unanimous(self) -> bool:
        """Return whether all ranks have posted the same content; return False if a rank has not posted yet."""
        words = list(map(self._word_of[self._engine.reports & 1], self._pages))
        return words.count(self._word) == len(words)

    def contents(self) -> list[int]:
        """Wait until all ranks have posted the latest report; return the contents in rank order.

        Raises:
            CommunicationError: if a rank has ended, or has not posted within the timeout.
            DesyncError: if ranks wait for each other.
        """
        self._engine.check_usable()
        number, word_of = self._engine.reports & _NUMBER, self._word_of[self._engine.reports & 1]
        self._wait(lambda peer: word_of(self._pages[peer.rank]) & _NUMBER != number)
        return [word_of(page) >> 16 for page in self._pages]

    def weights(self) -> list[float]:
        """Return the ranks' weights; all ranks must have posted one with the latest report."""
        number = self._engine.reports
        place = _PLACES[number & 1]
        # The stores of another rank may become visible in another order on some processors.
        self._wait(lambda peer: _check((page := self._pages[peer.rank])[place + 1], number) != page[place + 2])
        return [struct.unpack("d", struct.pack("Q", page[place + 1]))[0] for page in self._pages]

    def _wait(self, is_missing: Callable[[Peer], bool]) -> None:
        """Wait until no peer is missing: poll, then sleep briefly, then let the engine wait, which notices failures."""
        engine, began = self._engine, time.perf_counter()

        def find_missing() -> list[Peer]:
            return [peer for peer in engine.peers if is_missing(peer)]

        while find_missing():
            waited = time.perf_counter() - began
            if waited >= 10 * _NAP_S:
                engine.await_reports(find_missing, _NAP_S)
            elif waited >= self._spins_s:
                time.sleep(max(waited / 10, 5e-5))


def _check(bits: int, number: int) -> int:
    """Return the number that shows that the weight with these `bits` belongs to report `number`."""
    return bits ^ (number * _MIX & _MASK)
