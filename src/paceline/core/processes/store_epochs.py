"""Rendezvous of ranks in a store. Each rendezvous gives all ranks the same new number.

A store keeps its keys. A process group created again, in the same process or under the same name, would read the
addresses of the first group and connect to closed sockets. Counters in each process are not enough, because they may
differ between ranks.

    rank r                                          rank 0
    asked/r += 1                     ──►            wait until every rank has an unanswered question
    wait for the answer              ◄──            answer each rank's latest question with a new number

A question that was not answered in time is harmless, because rank 0 answers the next one instead. If ranks are missing,
rank 0 sends their numbers to the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from paceline.core.processes.missing_ranks import GRACE_S, late, missing_from, named_ranks, reason_of
from paceline.errors import CommunicationError

_FAREWELL_S = 0.2
"""Seconds that rank 0 leaves the others to read which ranks are missing, before it exits and may end the store."""


def meet(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int] | None = None) -> int:
    """Wait for all `size` ranks, and return a number that is the same on all of them and new in `store`.

    All ranks call this together. Messages call rank r ``names[r]``, by default r.
    """
    called = names or range(size)
    try:
        answer, missing = _take_part(PrefixStore("meeting/", store), rank, size, timeout)
        number = int(answer or 0)
    except (RuntimeError, ValueError) as error:  # ValueError: another user has written into the store
        raise CommunicationError(
            f"rank {called[rank]}: the store through which ranks meet was lost ({reason_of(error)}); see the first "
            f"error of the launcher, or of rank {called[0]} if that serves the store; without one, another user has "
            "written into the store"
        ) from error
    if missing or not answer:
        absent = [called[other] for other in missing]
        raise late(called[rank], absent, timeout).because_of(absent)
    return number


@contextmanager
def connecting(
    store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int] | None = None
) -> Iterator[None]:
    """Let the block connect this rank with the others, then wait until all ranks have done so.

    Gloo connects every pair of ranks. If a rank ends or closes its group while others are still connecting, their
    connections fail, or wait beyond their timeout.

    Args:
        store: a store, or a part of it, new for each call.
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
    keys = [f"done/{peer}" for peer in range(size)]
    if missing := missing_from(place, keys, timeout.total_seconds()):
        raise late(called[rank], [called[peer] for peer in missing], timeout)
    if failed := [called[peer] for peer, key in enumerate(keys) if place.get(key)]:
        raise CommunicationError(
            f"rank {called[rank]}: {named_ranks(failed)} could not connect with the others; see the error there"
        ).because_of(failed)
    place.set(f"seen/{rank}", "")
    if rank == 0:  # rank 0 leaves last, because it may serve the store
        missing_from(place, [f"seen/{peer}" for peer in range(size)], timeout.total_seconds())


def _take_part(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[str, list[int]]:
    """Ask for a number; return it and the missing ranks."""
    turn = store.add(f"asked/{rank}", 1)
    store.set(f"asked/{rank}/{turn}", "")
    if rank == 0:
        _answer(store, size, timeout)
    key = f"answer/{rank}/{turn}"
    if missing_from(store, [key], timeout.total_seconds()):  # rank 0 itself is late
        absent = [peer for peer in range(size) if not _is_waiting(store, peer)]
        # Rank 0 may be timing out as well, after it has counted some questions as answered.
        if missing_from(store, [key], GRACE_S):
            return "", absent
    number, _, missing = store.get(key).decode().partition(" missing ")
    if missing and rank == 0:
        time.sleep(_FAREWELL_S)
    return number, [int(peer) for peer in missing.split()]


def _answer(store: Store, size: int, timeout: timedelta) -> None:
    """On rank 0, wait until every rank has asked, then answer with a new number and the missing ranks."""
    answered = [store.add(f"answered/{peer}", 0) for peer in range(size)]
    questions = [f"asked/{peer}/{turn + 1}" for peer, turn in enumerate(answered)]
    missing = missing_from(store, questions, timeout.total_seconds())
    number = str(store.add("meetings", 1))
    if missing:
        number += " missing " + " ".join(map(str, missing))
    for peer, count in enumerate(answered):
        if peer not in missing:
            latest = store.add(f"asked/{peer}", 0)
            store.add(f"answered/{peer}", latest - count)
            store.set(f"answer/{peer}/{latest}", number)


def _is_waiting(store: Store, rank: int) -> bool:
    return store.add(f"asked/{rank}", 0) > store.add(f"answered/{rank}", 0)
