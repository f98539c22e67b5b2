"""Stores of the ranks on one host, which other users cannot read or write, and rendezvous in them.

torch's TCPStore answers any process that connects to its port, so every user of the host can read and write it. The
private store is torch's FileStore on an anonymous memory file. It is opened through ``/proc/<pid>/fd`` of the process
that created it, which the kernel allows only to the same user, and it disappears with the last process that has it
open.

    1. ``paceline run``, or the first rank under another launcher, creates the file.
    2. The ranks receive its path in the environment (``PACELINE_STORE``) or through the public store.
    3. Each rank opens the path, and checks that the file belongs to its user and to this job.

If another user writes a different path into the public store, step 3 fails and names that user. See
``docs/decisions/0017-a-store-that-strangers-cannot-reach.md``.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from paceline.core.missing_ranks import GRACE_S, late, missing_from, named_ranks, open_store, read_from, reason_of
from paceline.errors import CommunicationError

STORE = "PACELINE_STORE"
"""Environment variable that our launcher sets for its ranks: the job's port, and the path of the private store."""
_OWN = "/proc/self/fd/"
_PUBLISHED = re.compile(r"(/proc/[1-9]\d{0,9}/fd/\d{1,9}) ([0-9a-f]{32})")
_EXIT_DELAY_S = 0.2
"""Seconds that rank 0 leaves the others to read which ranks are missing, before it exits and may end the store."""


def world_stores(
    address: str, port: str, rank: int, size: int, one_host: bool, timeout: timedelta, process: int
) -> tuple[Store, ...]:
    """Return the store of the launcher's job, followed by stores that must be kept alive with it.

    The store is private if all ranks are on one host; otherwise it is the TCPStore at `address` and `port`.
    """
    launchers, _, path = os.environ.get(STORE, "").partition(" ")
    if path and launchers == port:  # a different port means that the environment was inherited from an outer job
        try:
            return (_file_store(path, port, timeout),)
        except NotPrivate as reason:
            raise CommunicationError(
                f"rank {rank}: the launcher's store at {path} cannot be used, because {reason}; run the ranks "
                "as the user who started 'paceline run'"
            ) from reason
    public = open_store(address, int(port), rank, size, timeout)
    if not one_host or sys.platform != "linux" or size == 1:
        return (public,)
    unused = PrefixStore(f"private/{meet(public, rank, size, timeout)}/", public)
    return private_store(unused, rank, range(size), timeout, range(size)), public


def store_of_group(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> Store:
    """Return a part of `store` for one new group. All of its ranks call this.

    It is private if all ranks are on this host.
    """
    # If each rank creates only its own group, torch gives these groups the same name, and therefore the same store.
    group_store = PrefixStore("-".join(map(str, names)) + "/", store)
    unused = PrefixStore(f"{meet(group_store, rank, size, timeout, names)}/", group_store)
    base = _base(store)
    address = base.host if isinstance(base, TCPStore) else ""
    if sys.platform != "linux" or not is_one_host(os.environ, address):
        return unused
    return private_store(unused, rank, range(size), timeout, names)


def private_store(public: Store, rank: int, members: Sequence[int], timeout: timedelta, names: Sequence[int]) -> Store:
    """Return a store that other users cannot reach, for `members` on this host. All members call this.

    Args:
        public: a store that they already share, new for each call. It only transmits the path of the first member's
            memory file.
        rank: this process, one of `members`.
        members: ranks, numbered as in `public`.
        timeout: how long to wait for the first member, and the timeout of the store.
        names: messages call rank r ``names[r]``.
    """
    if len(members) == 1:
        return HashStore()
    if is_private(public):
        return public
    base, leader = _base(public), members[0]
    port = str(base.port) if isinstance(base, TCPStore) else ""
    if rank == leader:
        path, nonce = path_of(_own_file(port)), secrets.token_hex(16)
        public.set("private", f"{path} {nonce}")
    else:
        path, nonce = _published(public, names[rank], names[leader], timeout)
    try:
        store = _file_store(path, port, timeout)
    except NotPrivate as reason:
        raise CommunicationError(
            f"rank {names[rank]}: rank {names[leader]}'s private store is at {path} according to the "
            f"TCPStore, but {reason}; if the ranks run in separate containers, set LOCAL_WORLD_SIZE to the number in "
            "each, otherwise another user of this host has written into the TCPStore, which 'paceline run' avoids"
        ) from reason
    return PrefixStore("-".join(map(str, members)) + f"/{nonce}/", store)


def _published(public: Store, name: int, leader: int, timeout: timedelta) -> tuple[str, str]:
    """Return the path and prefix that rank `leader` has put into the public store."""
    text = read_from(public, "private", name, leader, timeout).decode(errors="replace")
    published = _PUBLISHED.fullmatch(text)
    if published is None:
        raise CommunicationError(
            f"rank {name}: rank {leader}'s private store is at {text[:80]!r} according to the TCPStore, "
            "which is not a valid path; another user of this host may have written into it, which 'paceline run' avoids"
        )
    return published[1], published[2]


def is_private(store: Store) -> bool:
    """Return whether no other user can reach `store`: it is private, or in this process's own memory."""
    base = _base(store)
    return isinstance(base, HashStore) or (isinstance(base, FileStore) and getattr(base, "path", "").startswith(_OWN))


def is_one_host(environment: Mapping[str, str], address: str) -> bool:
    """Return whether all ranks are on this host.

    Without ``LOCAL_WORLD_SIZE``, which torch does not require, return whether the store's `address` is a loopback
    address. Host names other than localhost do not count as loopback.
    """
    local, size = environment.get("LOCAL_WORLD_SIZE"), environment.get("WORLD_SIZE")
    if local is not None and size is not None:
        return local == size
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _base(store: Store) -> Store:
    base: Store = getattr(store, "_underlying_non_prefix_store", store)
    return base


class NotPrivate(Exception):
    """Raised if a path is not a memory file that this user created for this job; the message is the reason."""


def make_file(port: str) -> int:
    """Create the memory file of a private store and return its descriptor, which must stay open as long as the job.

    `port` is the port of the job's public store, which no other job on this host can use at the same time.
    """
    descriptor = os.memfd_create(f"paceline-store-{port}", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


def path_of(descriptor: int) -> str:
    """Return a path that lets other processes of this user open this process's `descriptor`."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@functools.cache
def open_file(path: str, port: str) -> int:
    """Open the memory file at `path`, made for the job with `port`. Its descriptor stays open until the process ends.

    A FileStore reopens its path for every operation and when it is freed. If the descriptor had been closed by then,
    its number could refer to another file.
    """
    try:
        _check_own(os.stat(path))  # check before opening the file, because opening a device or FIFO has side effects
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise NotPrivate(f"it cannot be opened: {error.strerror}") from error
    try:
        _check_own(os.fstat(descriptor))
        if os.readlink(f"{_OWN}{descriptor}") != f"/memfd:paceline-store-{port} (deleted)":
            raise NotPrivate("it was not made for this job")
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _check_own(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise NotPrivate(f"it belongs to user {status.st_uid}, not to user {os.geteuid()}")
    if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) != 0o600 or status.st_nlink != 0:
        raise NotPrivate("it is not a memory file of Paceline")


_own_file = functools.cache(make_file)
"""Returns this process's memory file for its job, which its private stores share under different prefixes."""


def _file_store(path: str, port: str, timeout: timedelta) -> FileStore:
    store = FileStore(f"{_OWN}{open_file(path, port)}")
    store.set_timeout(timeout)
    return store


def meet(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int] | None = None) -> int:
    """Wait for all `size` ranks, and return a number that is the same on all of them and new in `store`.

    All ranks call this together. Messages call rank r ``names[r]``, by default r.

    A store keeps its keys. A process group created again, in the same process or under the same name, would read the
    addresses of the first group and connect to closed sockets. Counters in each process are not enough, because they
    may differ between ranks::

        rank r                                          rank 0
        asked/r += 1                     ──►            wait until every rank has an unanswered question
        wait for the answer              ◄──            answer each rank's latest question with a new number

    A question that was not answered in time is harmless, because rank 0 answers the next one instead. If ranks are
    missing, rank 0 sends their numbers to the others.
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
        time.sleep(_EXIT_DELAY_S)
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
