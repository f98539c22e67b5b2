"""A meeting of ranks in a store: each meeting gives all of them the same number, which was never used there before.

A store never forgets. A process group that is made a second time, in the same process or under the same name, would
find the addresses of the first group there and connect to sockets that are closed. A counter in each process does not
help, because the counts of ranks may differ.

    rank r                                          rank 0
    asked/r += 1, say so             ──►            wait until every rank has asked more often than was answered
    wait for the answer to that      ◄──            answer each rank's latest question with a new number

A question that was not answered in time does no harm: the next one is answered instead. If ranks do not come, rank 0
answers the others with their names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from paceline.core.processes.missing_ranks import GRACE_S, REMEDY, late, missing_from, named_ranks, reason_of
from paceline.core.torch_internals.distributed.c10d import PrefixStore, Store
from paceline.errors import CommunicationError

_FAREWELL_S = 0.2
"""Seconds for the others to read who is missing, before rank 0 ends, and with it the store if rank 0 serves it."""


def meet(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int] | None = None) -> int:
    """Wait for all `size` ranks, and return a number that is the same on all of them and new in `store`.

    Called by all of them together. Messages call rank r ``names[r]``, by default r.
    """
    called = names or range(size)
    try:
        answer, missing = _take_part(PrefixStore("meeting/", store), rank, size, timeout)
        number = int(answer or 0)
    except (RuntimeError, ValueError) as error:  # a ValueError means that someone has written into the store
        raise CommunicationError(
            f"rank {called[rank]}: the store through which ranks meet was lost ({reason_of(error)}); it goes with the "
            f"launcher, or with rank {called[0]} where that serves it, so look for the first error there; if there is "
            "none, a stranger has written into the store"
        ) from error
    if missing or not answer:
        who = f"{named_ranks([called[other] for other in missing])} did not come" if missing else "not every rank came"
        raise CommunicationError(
            f"rank {called[rank]}: {who} to make the process group within {timeout.total_seconds():g} s; {REMEDY}"
        ).because_of(called[other] for other in missing)
    return number


@contextmanager
def connecting(
    store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int] | None = None
) -> Iterator[None]:
    """Connect this rank with the others in the block, then wait until all ranks have done so.

    Gloo connects every pair of ranks. If one ends, or closes its group, while two others are still connecting, the end
    of its connections fails theirs, or leaves them waiting past their timeout.

    Args:
        store: a store, or a part of it, that this was not called with before.
        rank: this process.
        size: the number of ranks.
        timeout: how long to wait for the others.
        names: messages call rank r ``names[r]``, by default r.
    """
    if size == 1:
        yield
        return
    called, place = names or range(size), PrefixStore("connecting/", store)
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # the store is gone
            place.set(f"done/{rank}", "failed")
        raise
    place.set(f"done/{rank}", "")
    done = [f"done/{other}" for other in range(size)]
    if missing := missing_from(place, done, timeout.total_seconds()):
        raise late(called[rank], [called[other] for other in missing], timeout)
    if failed := [called[other] for other, key in enumerate(done) if place.get(key)]:
        raise CommunicationError(
            f"rank {called[rank]}: {named_ranks(failed)} could not connect with the others; look for the error there"
        ).because_of(failed)
    place.set(f"seen/{rank}", "")
    if rank == 0:  # it may serve the store, so it leaves last
        missing_from(place, [f"seen/{other}" for other in range(size)], timeout.total_seconds())


def _take_part(asked: Store, rank: int, size: int, timeout: timedelta) -> tuple[str, list[int]]:
    """Do this rank's part: return the number, and the ranks that did not come in time."""
    turn = asked.add(f"asked/{rank}", 1)
    asked.set(f"asked/{rank}/{turn}", "")
    if rank == 0:
        _answer(asked, size, timeout)
    key = f"answer/{rank}/{turn}"
    if missing_from(asked, [key], timeout.total_seconds()):  # rank 0 itself is late
        absent = [other for other in range(size) if not _is_waiting(asked, other)]
        # Its time may be over just now, too: then some questions were already counted as answered.
        if missing_from(asked, [key], GRACE_S):
            return "", absent
    number, _, missing = asked.get(key).decode().partition(" missing ")
    if missing and rank == 0:
        time.sleep(_FAREWELL_S)
    return number, [int(other) for other in missing.split()]


def _answer(asked: Store, size: int, timeout: timedelta) -> None:
    """Do rank 0's part: wait until every rank has asked, then tell all the same new number, or who is missing."""
    answered = [asked.add(f"answered/{other}", 0) for other in range(size)]
    questions = [f"asked/{other}/{turn + 1}" for other, turn in enumerate(answered)]
    missing = missing_from(asked, questions, timeout.total_seconds())
    number = str(asked.add("meetings", 1))
    if missing:
        number += " missing " + " ".join(map(str, missing))
    for other, before in enumerate(answered):
        if other not in missing:
            latest = asked.add(f"asked/{other}", 0)
            asked.add(f"answered/{other}", latest - before)
            asked.set(f"answer/{other}/{latest}", number)


def _is_waiting(asked: Store, rank: int) -> bool:
    return asked.add(f"asked/{rank}", 0) > asked.add(f"answered/{rank}", 0)
