"""The meeting of ranks in a store: each time they come together they get a number that was never used there before.

A store keeps what was written. A process group that is made again, in the same process or under the same name, would
find the addresses of the first one there and knock at closed doors. Names from a counter in each process do not help,
as ranks need not have counted the same.

    rank r                                          rank 0
    asked/r += 1, say so             ──►            wait until every rank has asked more often than was answered
    wait for the answer to that      ◄──            answer each rank's latest question with a new number

So a question that nobody answered in time does no harm: the next one is answered instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from paceline.errors import CommunicationError


def meet(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int] | None = None) -> int:
    """Wait for all `size` ranks, and return a number that is the same on all of them and new in `store`.

    Called by all of them together. Messages call rank r ``names[r]``, by default r.

    Raises:
        CommunicationError: if a rank does not come in time; names those that are missing.
    """
    asked = PrefixStore("meeting/", store)
    turn = asked.add(f"asked/{rank}", 1)
    asked.set(f"asked/{rank}/{turn}", "")
    try:
        if rank == 0:
            _answer(asked, size, timeout)
        asked.wait([f"answer/{rank}/{turn}"], timeout)
    except RuntimeError as error:
        called = names or range(size)
        missing = [called[other] for other in range(size) if not _is_waiting(asked, other)]
        who = f"rank {', '.join(map(str, missing))} did not come" if missing else "not every rank came"
        raise CommunicationError(
            f"rank {called[rank]}: {who} to make the process group within {timeout.total_seconds():g} s; "
            "look for its own error, and make the group, or the wrapper on it, on every rank"
        ) from error
    return int(asked.get(f"answer/{rank}/{turn}"))


def _answer(asked: Store, size: int, timeout: timedelta) -> None:
    """Rank 0's part: wait until everybody has asked, then tell all the same new number."""
    deadline = time.monotonic() + timeout.total_seconds()
    answered = [asked.add(f"answered/{other}", 0) for other in range(size)]
    for other, turn in enumerate(answered):
        left = max(0.001, deadline - time.monotonic())
        asked.wait([f"asked/{other}/{turn + 1}"], timedelta(seconds=left))
    number = asked.add("meetings", 1)
    for other, before in enumerate(answered):
        latest = asked.add(f"asked/{other}", 0)
        asked.add(f"answered/{other}", latest - before)
        asked.set(f"answer/{other}/{latest}", str(number))


def _is_waiting(asked: Store, rank: int) -> bool:
    return asked.add(f"asked/{rank}", 0) > asked.add(f"answered/{rank}", 0)
