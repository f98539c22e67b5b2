"""How the ranks of one host find each other and exchange the descriptors of their memory and signals.

Each rank listens on an abstract Unix socket with a name that nobody can guess, for the time of the handshake only. A
peer counts if it runs as the same user (SO_PEERCRED) and knows the secret that the listening rank put into the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline.comm.shared_memory import Arena, Segment
from paceline.errors import CommunicationError
from paceline.rollcall import REMEDY

SPLIT = "PACELINE_HOSTS"
"""Environment variable that makes one host count as several, for tests: ranks are dealt to so many in blocks."""
_SECRET_BYTES = 32
_WHO = struct.Struct("<qq")


class Refused(Exception):
    """Shared memory cannot be used here; the message says why."""


@dataclass
class Peer:
    """Another rank of this host."""

    rank: int
    """In the group."""
    name: int
    """In the world: what messages call it."""
    pid: int
    alive: int
    """pidfd: readable once the process has ended."""
    memory: Segment
    ringing: int
    """eventfd that the peer rings for us."""
    bell: int
    """eventfd that we ring for the peer."""

    def descriptors(self) -> tuple[int, ...]:
        """All descriptors held for this peer."""
        return self.alive, self.ringing, self.bell


def host_identity(rank: int, size: int) -> str:
    """What ranks have in common exactly if they can share memory: kernel, network and process namespaces, and user.

    Raises:
        Refused: where the system lacks what is needed.
    """
    if sys.platform != "linux":
        raise Refused(f"shared memory between ranks needs Linux, this is {sys.platform}")
    for name in ("memfd_create", "eventfd", "pidfd_open"):
        if not hasattr(os, name):
            raise Refused(f"this Python has no os.{name}")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = "/".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))
        for trial in (os.eventfd(0), os.pidfd_open(os.getpid())):
            os.close(trial)
        Arena().close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.bind(f"\0paceline/{secrets.token_hex(16)}")
    except (OSError, ValueError) as error:
        raise Refused(f"the system refuses it: {error}") from error
    parts = int(os.environ.get(SPLIT, "1"))
    return f"{boot}/{spaces}/{os.getuid()}/{rank * parts // size}"


def agree_on_hosts(store: Store, rank: int, size: int, timeout: timedelta) -> list[str]:
    """Every rank's host identity, in the order of ranks.

    Raises:
        Refused: on every rank, if one of them cannot share memory; names it and the reason.
        CommunicationError: if a rank does not come in time.
    """
    try:
        mine = {"host": host_identity(rank, size)}
    except Refused as refused:
        mine = {"refused": str(refused)}
    store.set(f"host/{rank}", json.dumps(mine))
    everyone: list[dict[str, str]] = []
    for other in range(size):
        everyone.append(json.loads(_get(store, f"host/{other}", rank, other, timeout)))
    for other, said in enumerate(everyone):
        if "refused" in said:
            raise Refused(f"rank {other}: {said['refused']}")
    return [said["host"] for said in everyone]


def world_rank(rank: int) -> int:
    """What messages call this process: its rank in the world, which in a sub-group is not its `rank` there."""
    return dist.get_rank() if dist.is_initialized() else rank


def connect(store: Store, rank: int, peers: list[int], arena: Arena, timeout: timedelta) -> list[Peer]:
    """Exchange descriptors with `peers`, the other ranks of this host; all call this together.

    Raises:
        CommunicationError: if one does not come in time, or ends.
    """
    found: dict[int, Peer] = {}
    try:
        _connect(store, rank, peers, arena, timeout, found)
    except BaseException as error:
        for descriptor in [one for peer in found.values() for one in peer.descriptors()]:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise CommunicationError(
                f"rank {rank}: it could not exchange shared memory with the {len(peers)} other ranks of this host "
                f"({error}); look for the first error of another rank, and whether 'ulimit -n' is too low"
            ) from error
        raise
    return [found[peer] for peer in peers]


def _connect(
    store: Store, rank: int, peers: list[int], arena: Arena, timeout: timedelta, found: dict[int, Peer]
) -> None:
    """Connect to lower ranks, accept higher ones. Strangers may connect as well; nobody waits for them."""
    deadline = time.monotonic() + timeout.total_seconds()
    address, secret = f"\0paceline/{secrets.token_hex(16)}", secrets.token_bytes(_SECRET_BYTES)
    missing = set(peers)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
        store.set(f"socket/{rank}", json.dumps([address, secret.hex()]))
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        links: dict[int, tuple[socket.socket, int | None, bytes, int]] = {}
        """By descriptor: link, the rank it must be or None, what it must know, and our eventfd if we have sent it."""
        stack.callback(_drop, links)
        for other in (peer for peer in peers if peer < rank):
            where, token = json.loads(_get(store, f"socket/{other}", rank, other, timeout))
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            links[link.fileno()] = link, other, bytes.fromhex(token), -1
            link.settimeout(max(0.01, deadline - time.monotonic()))
            link.connect(where)
            links[link.fileno()] = link, other, bytes.fromhex(token), _send(link, bytes.fromhex(token), rank, arena)
            poll.register(link, select.POLLIN)
        while missing:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                raise _late(rank, missing, timeout)
            for descriptor, _ in ready:
                if descriptor == listener.fileno():
                    if (stranger := _accept(listener)) is not None:
                        links[stranger.fileno()] = stranger, None, secret, -1
                        poll.register(stranger, select.POLLIN)
                    continue
                link, expected, token, bell = links.pop(descriptor)
                poll.unregister(descriptor)
                with link:
                    other, name, received = _receive(link, token)
                    if other not in missing or expected not in (None, other):
                        _close(received)
                        if expected is not None:
                            _close([bell])
                            raise _gone(rank, expected)
                        continue
                    found[other] = _peer(link, rank, other, name, received, bell, token, arena)
                    missing.discard(other)


def _accept(listener: socket.socket) -> socket.socket | None:
    """Whoever connects, if it is a process of this user."""
    try:
        link, _ = listener.accept()
    except OSError:
        return None
    if _credentials(link)[1] != os.getuid():
        link.close()
        return None
    return link


def _send(link: socket.socket, secret: bytes, rank: int, arena: Arena) -> int:
    """Send who we are, our memory, and an eventfd to ring us with; returns the latter."""
    ringing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        socket.send_fds(link, [secret + _WHO.pack(rank, world_rank(rank))], [arena.descriptor, ringing])
    except BaseException:
        os.close(ringing)
        raise
    return ringing


def _receive(link: socket.socket, secret: bytes) -> tuple[int, int, list[int]]:
    """The rank on the other side, its rank in the world, its descriptors; (-1, -1, …) for one who does not belong here.

    Never waits, never reads more than a hello has.
    """
    descriptors: list[int] = []
    try:
        link.setblocking(False)
        flags = socket.MSG_CMSG_CLOEXEC
        text, descriptors, _, _ = socket.recv_fds(link, _SECRET_BYTES + _WHO.size, 2, flags)
        if len(descriptors) == 2 and secrets.compare_digest(text[:_SECRET_BYTES], secret):
            rank, name = _WHO.unpack(text[_SECRET_BYTES:])
            return rank, name, descriptors
    except (OSError, struct.error):
        pass
    return -1, -1, descriptors


def _peer(
    link: socket.socket,
    rank: int,
    other: int,
    name: int,
    received: list[int],
    ringing: int,
    secret: bytes,
    arena: Arena,
) -> Peer:
    """The peer on the other side of `link`, which gets our hello if it has not had it yet."""
    memory, bell = received
    pid = _credentials(link)[0]
    try:
        if ringing < 0:
            ringing = _send(link, secret, rank, arena)
        alive = os.pidfd_open(pid)
        try:
            return Peer(other, name, pid, alive, Segment(memory), ringing, bell)
        except BaseException:
            os.close(alive)
            raise
    except BaseException as error:
        _close([bell, ringing])
        if isinstance(error, (ProcessLookupError, ConnectionError)):
            raise _gone(rank, other) from error
        raise
    finally:
        os.close(memory)  # the mapping keeps it


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _drop(links: dict[int, tuple[socket.socket, int | None, bytes, int]]) -> None:
    for link, _, _, bell in links.values():
        link.close()
        _close([bell])


def _credentials(link: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other side, as the kernel knows them."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


def _get(store: Store, key: str, rank: int, other: int, timeout: timedelta) -> Any:
    try:
        store.wait([key], timeout)
        return store.get(key)
    except RuntimeError as error:
        raise _late(rank, {other}, timeout) from error


def _late(rank: int, missing: set[int], timeout: timedelta) -> CommunicationError:
    who = ", ".join(map(str, sorted(missing)))
    return CommunicationError(
        f"rank {rank}: rank {who} did not come to make the process group within {timeout.total_seconds():g} s; {REMEDY}"
    )


def _gone(rank: int, other: int) -> CommunicationError:
    return CommunicationError(
        f"rank {rank}: rank {other} ended while the process group was made; look for its own error"
    )
