"""How the ranks of one host find each other and exchange the descriptors of their memory and signals.

Each rank listens on an abstract Unix socket with a name that nobody can guess, for the time of the handshake only. A
peer counts if it runs as the same user (SO_PEERCRED) and knows the secret that the listening rank put into the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from paceline.comm.shared_memory import Arena, Segment
from paceline.errors import CommunicationError

SPLIT = "PACELINE_HOSTS"
"""Environment variable that makes one host count as several, for tests: ranks are dealt to so many in blocks."""
_STRAY_S = 1.0


class Refused(Exception):
    """Shared memory cannot be used here; the message says why."""


@dataclass
class Peer:
    """Another rank of this host."""

    rank: int
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
        for trial in (os.memfd_create("paceline", os.MFD_CLOEXEC), os.eventfd(0), os.pidfd_open(os.getpid())):
            os.close(trial)
        socket.socket(socket.AF_UNIX).close()
    except OSError as error:
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


def connect(store: Store, rank: int, peers: list[int], arena: Arena, timeout: timedelta) -> list[Peer]:
    """Exchange descriptors with `peers`, the other ranks of this host; all call this together.

    Raises:
        CommunicationError: if one does not come in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    address, secret = f"\0paceline/{secrets.token_hex(16)}", secrets.token_bytes(32)
    found: dict[int, Peer] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(address)
        listener.listen(len(peers) + 8)
        store.set(f"socket/{rank}", json.dumps([address, secret.hex()]))
        links: dict[int, tuple[socket.socket, int]] = {}
        for other in (peer for peer in peers if peer < rank):
            where, token = json.loads(_get(store, f"socket/{other}", rank, other, timeout))
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            link.settimeout(max(_STRAY_S, deadline - time.monotonic()))
            link.connect(where)
            links[other] = (link, _send(link, bytes.fromhex(token), rank, arena))
        missing = {peer for peer in peers if peer > rank}
        while missing:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                link, _ = listener.accept()
            except TimeoutError:
                raise _late(rank, missing, timeout) from None
            stack.enter_context(link)
            other, descriptors = _receive(link, secret)
            if other in missing:
                missing.discard(other)
                found[other] = _peer(link, other, descriptors, arena.size, _send(link, secret, rank, arena))
        for other, (link, ringing) in links.items():
            said, descriptors = _receive(link, bytes.fromhex(json.loads(store.get(f"socket/{other}"))[1]))
            if said != other:
                raise _late(rank, {other}, timeout)
            found[other] = _peer(link, other, descriptors, arena.size, ringing)
    return [found[peer] for peer in peers]


def _send(link: socket.socket, secret: bytes, rank: int, arena: Arena) -> int:
    """Send who we are, our memory, and an eventfd to ring us with; returns the latter."""
    ringing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    socket.send_fds(link, [secret + struct.pack("<q", rank)], [arena.descriptor, ringing])
    return ringing


def _receive(link: socket.socket, secret: bytes) -> tuple[int, list[int]]:
    """The rank on the other side and its descriptors; (-1, []) for anyone who does not belong here."""
    _, uid, _ = _credentials(link)
    descriptors: list[int] = []
    try:
        link.settimeout(max(_STRAY_S, link.gettimeout() or 0))
        text, descriptors, _, _ = socket.recv_fds(link, len(secret) + 8, 2)
        if uid == os.getuid() and len(descriptors) == 2 and secrets.compare_digest(text[: len(secret)], secret):
            return int(struct.unpack("<q", text[len(secret) :])[0]), descriptors
    except (OSError, struct.error):
        pass
    for descriptor in descriptors:
        os.close(descriptor)
    return -1, []


def _peer(link: socket.socket, rank: int, descriptors: list[int], size: int, ringing: int) -> Peer:
    memory, bell = descriptors
    pid = _credentials(link)[0]
    peer = Peer(rank, pid, os.pidfd_open(pid), Segment(memory, size), ringing, bell)
    os.close(memory)  # the mapping keeps it
    return peer


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
        f"rank {rank}: rank {who} did not come to make the process group within {timeout.total_seconds():g} s; "
        "look for its own error"
    )
