"""The private store, where the ranks of one host meet, out of reach of the host's other users.

torch's TCPStore answers whoever connects to its port, so every user of the host can read and write its contents. The
private store is torch's FileStore on a memory file. The file has no name. It is opened through ``/proc/<pid>/fd`` of
the process that made it, which the kernel allows only to the same user, and it disappears with the last process that
holds it.

    1. ``paceline run``, or the first rank under another launcher, makes the file.
    2. Its path reaches the ranks in the environment (``PACELINE_STORE``), or through the public store.
    3. Each rank opens the path, and checks that the file is its user's and was made for this job.

A stranger who writes another path into the public store gains nothing: step 3 fails and names his user's number.
``docs/decisions/0017-a-store-that-strangers-cannot-reach.md`` tells why it is done like this.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import secrets
import stat
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta

from paceline.core.processes.missing_ranks import REMEDY, missing_from, open_store
from paceline.core.processes.store_epochs import meet
from paceline.core.torch_internals.distributed.c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from paceline.errors import CommunicationError

STORE = "PACELINE_STORE"
"""Environment variable by which our launcher tells its ranks of the private store: the job's port, and the path."""
_OWN = "/proc/self/fd/"
_PUBLISHED = re.compile(r"(/proc/[1-9]\d{0,9}/fd/\d{1,9}) ([0-9a-f]{32})")


class NotPrivate(Exception):
    """A path does not lead to a memory file that this user made for this job; the message gives the reason."""


def make_file(port: str) -> int:
    """Create the memory file of a private store and return its descriptor, which must stay open as long as the job.

    `port` is the port of the job's public store, which no other job of this host can have at the same time.
    """
    descriptor = os.memfd_create(f"paceline-store-{port}", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


def path_of(descriptor: int) -> str:
    """Return the path by which other processes of this user can open this process's `descriptor`."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@functools.cache
def open_file(path: str, port: str) -> int:
    """Open the memory file at `path` of the job with `port`; the descriptor stays open until the process ends.

    A FileStore opens its path again for every operation, and once more when it is freed. If its descriptor were closed,
    the number could by then stand for any other file.
    """
    try:
        _check_own(os.stat(path))  # before it is opened, because opening a device or a FIFO has effects
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
        raise NotPrivate("it is no memory file of ours")


def is_private(store: Store) -> bool:
    """Return whether no other user can reach `store`: it is a private store, or in this process's own memory."""
    base = _base(store)
    return isinstance(base, HashStore) or (isinstance(base, FileStore) and getattr(base, "path", "").startswith(_OWN))


def on_one_host(store: Store) -> bool:
    """Return whether all users of `store` are on this host, by the launcher's environment or a loopback address."""
    if sys.platform != "linux":
        return False
    local, size = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if local is not None and size is not None:
        return local == size
    base = _base(store)
    return isinstance(base, TCPStore) and is_loopback(base.host)


def is_one_host(place: Mapping[str, int], environment: Mapping[str, str]) -> bool:
    """Return whether all ranks are on this host; `place` has torchrun's numbers, or what is assumed instead of them.

    Without ``LOCAL_WORLD_SIZE``, which torch does not need, they are if they meet on loopback.
    """
    is_told = "LOCAL_WORLD_SIZE" in environment or is_loopback(environment.get("MASTER_ADDR", "localhost"))
    return place["WORLD_SIZE"] == 1 or (is_told and place["LOCAL_WORLD_SIZE"] == place["WORLD_SIZE"])


def is_loopback(address: str) -> bool:
    """Return whether only processes of this host can connect to `address`; names other than localhost do not count."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def private_store(public: Store, rank: int, members: Sequence[int], timeout: timedelta, names: Sequence[int]) -> Store:
    """Return a store that `members`, which are all on this host, share with no other user. All of them call this.

    Args:
        public: a store that they share already, in which no member has called this before. It only passes on the place
            of the first member's memory file.
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
            f"rank {names[rank]}: rank {names[leader]}'s private store was said to be at {path}, but {reason}; either "
            "another user of this host has written into the job's TCPStore, which 'paceline run' does not need, or "
            "these ranks run in separate containers, and LOCAL_WORLD_SIZE must be the number in each"
        ) from reason
    return PrefixStore("-".join(map(str, members)) + f"/{nonce}/", store)


def store_of_group(store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> Store:
    """Return a part of `store` for one new group. All of its ranks call this.

    It is private if all ranks are on this host.
    """
    # Where each rank makes a group with only itself, torch gives all these groups one name, and so one store.
    own = PrefixStore("-".join(map(str, names)) + "/", store)
    unused = PrefixStore(f"{meet(own, rank, size, timeout, names)}/", own)
    return private_store(unused, rank, range(size), timeout, names) if on_one_host(store) else unused


def world_stores(
    address: str, port: str, rank: int, size: int, one_host: bool, timeout: timedelta, process: int
) -> tuple[Store, ...]:
    """Return the store in which the ranks of the launcher's job meet, and the stores that must be kept alive with it.

    On one host it is a private one, else the TCPStore at `address` and `port`.
    """
    launchers, _, path = os.environ.get(STORE, "").partition(" ")
    if path and launchers == port:  # another port is that of an outer job, whose environment this one has inherited
        try:
            return (_file_store(path, port, timeout),)
        except NotPrivate as reason:
            raise CommunicationError(
                f"rank {rank}: the launcher's store at {path} cannot be used: {reason}; a rank must run as the user "
                "who started 'paceline run'"
            ) from reason
    public = open_store(address, int(port), rank, size, timeout)
    if not one_host or sys.platform != "linux" or size == 1:
        return (public,)
    unused = PrefixStore(f"private/{meet(public, rank, size, timeout)}/", public)
    return private_store(unused, rank, range(size), timeout, range(size)), public


def _file_store(path: str, port: str, timeout: timedelta) -> FileStore:
    store = FileStore(f"{_OWN}{open_file(path, port)}")
    store.set_timeout(timeout)
    return store


@functools.cache
def _own_file(port: str) -> int:
    """Return the memory file that this process makes for its job, once; private stores on it differ by their prefix."""
    return make_file(port)


def _published(public: Store, name: int, leader: int, timeout: timedelta) -> tuple[str, str]:
    """Return the path and prefix that rank `leader` has put into the public store."""
    if missing_from(public, ["private"], timeout.total_seconds()):
        raise CommunicationError(
            f"rank {name}: rank {leader} did not come to make the process group within "
            f"{timeout.total_seconds():g} s; {REMEDY}"
        )
    text = public.get("private").decode(errors="replace")
    found = _PUBLISHED.fullmatch(text)
    if found is None:
        raise CommunicationError(
            f"rank {name}: rank {leader}'s private store was said to be at {text[:80]!r}, which is no place for one; "
            "another user of this host may have written into the job's TCPStore, which 'paceline run' does not need"
        )
    return found[1], found[2]


def _base(store: Store) -> Store:
    base: Store = getattr(store, "_underlying_non_prefix_store", store)
    return base
