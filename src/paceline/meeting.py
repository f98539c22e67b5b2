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

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from paceline.errors import CommunicationError
from paceline.rollcall import REMEDY, missing_from, named_ranks, reason_of


def meet(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int] | None = None) -> int:
    """Wait for all `size` ranks, and return a number that is the same on all of them and new in `store`.

    Called by all of them together. Messages call rank r ``names[r]``, by default r.

    Raises:
        CommunicationError: if a rank does not come in time; names those that are missing. Also if the store is lost.
    """
    called = names or range(size)
    try:
        return _meet(PrefixStore("meeting/", store), rank, size, timeout, called)
    except CommunicationError:
        raise
    except (RuntimeError, ValueError) as error:  # a ValueError is a key in which there is no number
        raise CommunicationError(
            f"rank {called[rank]}: the store in which ranks meet was lost ({reason_of(error)}); look for the first "
            "error of another rank, or of the launcher; if there is none, a stranger has written into the store"
        ) from error


def _meet(asked: Store, rank: int, size: int, timeout: timedelta, called: Sequence[int]) -> int:
    turn = asked.add(f"asked/{rank}", 1)
    asked.set(f"asked/{rank}/{turn}", "")
    answer = f"answer/{rank}/{turn}"
    if (rank == 0 and not _answer(asked, size, timeout)) or missing_from(asked, [answer], timeout.total_seconds()):
        missing = [called[other] for other in range(size) if not _is_waiting(asked, other)]
        who = f"{named_ranks(missing)} did not come" if missing else "not every rank came"
        raise CommunicationError(
            f"rank {called[rank]}: {who} to make the process group within {timeout.total_seconds():g} s; {REMEDY}"
        ).because_of(missing)
    return int(asked.get(answer))


def _answer(asked: Store, size: int, timeout: timedelta) -> bool:
    """Rank 0's part: wait until everybody has asked, then tell all the same new number; whether all came."""
    answered = [asked.add(f"answered/{other}", 0) for other in range(size)]
    questions = [f"asked/{other}/{turn + 1}" for other, turn in enumerate(answered)]
    if missing_from(asked, questions, timeout.total_seconds()):
        return False
    number = asked.add("meetings", 1)
    for other, before in enumerate(answered):
        latest = asked.add(f"asked/{other}", 0)
        asked.add(f"answered/{other}", latest - before)
        asked.set(f"answer/{other}/{latest}", str(number))
    return True


def _is_waiting(asked: Store, rank: int) -> bool:
    return asked.add(f"asked/{rank}", 0) > asked.add(f"answered/{rank}", 0)
