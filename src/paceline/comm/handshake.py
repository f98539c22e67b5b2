"""The handshake: the ranks of one host find each other and exchange the descriptors of their memory and signals.

Each rank listens on an abstract Unix socket, only during the handshake. The sockets' names and secrets are in a private
store (:mod:`paceline.core.stores`), which other users cannot read or write. The steps, in order::

    connector                                       listener
    1. the kernel says that it is our user          1. the kernel says that it is our user
    2. the listener's secret, rank, descriptors →   3. is the secret right?
    5. is the secret right?                     ←   4. the same secret, rank, descriptors
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store

from paceline.comm.shm_arena import Arena, Segment
from paceline.core.missing_ranks import late, read_from
from paceline.errors import CommunicationError

_SECRET_BYTES = 32
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sq")
"""A secret and the sender's rank. Two descriptors come with it: its memory, and the eventfd that rings it."""


@dataclass
class Peer:
    """Another rank of this host."""

    rank: int
    """Its rank in the group."""
    name: int
    """Its global rank, which error messages use."""
    pid: int
    alive: int
    """pidfd: readable once the process has ended."""
    memory: Segment
    ringing: int
    """eventfd that the peer writes to ring us."""
    bell: int
    """eventfd that we write to ring the peer."""

    def descriptors(self) -> tuple[int, ...]:
        """Return all descriptors held for this peer."""
        return self.alive, self.ringing, self.bell


class _Link(NamedTuple):
    """A connection that still waits for its message."""

    socket: socket.socket
    secret: bytes
    """Secret that the message must contain."""
    peer: int | None
    """Rank at the other end; None for a visitor, which may be any process of this user."""


def connect(store: Store, rank: int, arena: Arena, timeout: timedelta, names: Sequence[int]) -> list[Peer]:
    """Exchange descriptors with the other ranks, and return them in rank order. All ranks call this together.

    Error messages call rank r ``names[r]``.
    """
    try:
        with contextlib.ExitStack() as on_error:
            peers = _Handshake(rank, arena, timeout, names, on_error).meet(store)
            on_error.pop_all()
            return [peers[peer] for peer in sorted(peers)]
    except OSError as error:
        raise CommunicationError(
            f"rank {names[rank]}: no shared memory with the {len(names) - 1} other ranks of this host ({error}); "
            "see the first error of another rank, and check that 'ulimit -n' is high enough"
        ) from error


class _Handshake:
    def __init__(
        self, rank: int, arena: Arena, timeout: timedelta, names: Sequence[int], on_error: contextlib.ExitStack
    ) -> None:
        self._rank, self._arena, self._timeout, self._names = rank, arena, timeout, names
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._ringing: dict[int, int] = {}
        """Eventfds sent to peers, by rank."""
        self._on_error = on_error
        """Closes the descriptors of peers, which no other object owns before the handshake is complete."""

    def meet(self, store: Store) -> dict[int, Peer]:
        """Connect to lower ranks and accept higher ones. Unrelated processes can also connect, but never hold us up."""
        address, secret = f"\0paceline/{secrets.token_hex(16)}", secrets.token_bytes(_SECRET_BYTES)
        peers: dict[int, Peer] = {}
        links: dict[int, _Link] = {}
        poll = select.poll()
        with contextlib.ExitStack() as sockets:

            def await_message(link: _Link) -> None:
                sockets.enter_context(link.socket).setblocking(False)
                links[link.socket.fileno()] = link
                poll.register(link.socket, select.POLLIN)

            listener = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(address)
            listener.listen(1024)
            listener.setblocking(False)
            poll.register(listener, select.POLLIN)
            store.set(f"socket/{self._rank}", json.dumps([address, secret.hex()]))
            # Connect only after listening, so that no two ranks wait for each other.
            for peer in range(self._rank):
                text = read_from(store, f"socket/{peer}", self._names[self._rank], self._names[peer], self._timeout)
                address_there, secret_there = json.loads(text)
                await_message(self._reach(address_there, bytes.fromhex(secret_there), peer))
            while len(peers) < len(self._names) - 1:
                ready = poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000)
                if not ready or time.monotonic() > self._deadline:
                    raise self._late({*range(len(self._names))} - {self._rank, *peers})
                for descriptor, _ in ready:
                    if descriptor == listener.fileno():
                        if (visitor := _accept(listener)) is not None:
                            await_message(_Link(visitor, secret, None))
                        continue
                    poll.unregister(descriptor)
                    with links[descriptor].socket:
                        arrived = self._receive(links.pop(descriptor))
                    if arrived is not None:
                        peers[arrived.rank] = arrived
        return peers

    def _send(self, link: _Link, peer: int) -> None:
        """Send the descriptors of our memory and of an eventfd that `peer` will ring."""
        self._ringing[peer] = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._on_error.callback(os.close, self._ringing[peer])
        descriptors = [self._arena.descriptor, self._ringing[peer]]
        socket.send_fds(link.socket, [_HELLO.pack(link.secret, self._rank)], descriptors)

    def _receive(self, link: _Link) -> Peer | None:
        """Read the message on `link`, answer a visitor's, and return the sender; None for another process."""
        text, received, flags = b"", list[int](), 0
        try:
            with contextlib.suppress(ConnectionError, BlockingIOError):
                text, received, flags, _ = socket.recv_fds(link.socket, _HELLO.size, 2, socket.MSG_CMSG_CLOEXEC)
            if not text.startswith(link.secret) or len(text) != _HELLO.size:
                if link.peer is not None:
                    raise self._ended(link.peer)
                return None
            if flags & socket.MSG_CTRUNC:  # the kernel dropped descriptors that exceed this process's limit
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            _, peer = _HELLO.unpack(text)
            pid = _credentials(link.socket)[0]
            try:
                if link.peer is None:
                    self._send(link, peer)
                alive = os.pidfd_open(pid)
            except (ConnectionError, ProcessLookupError) as error:
                raise self._ended(peer) from error
            self._on_error.callback(os.close, alive)
            # The first descriptor is closed, because the mapping keeps the memory alive without it.
            memory, bell = Segment(received[0]), received.pop()
            self._on_error.callback(os.close, bell)
            return Peer(peer, self._names[peer], pid, alive, memory, self._ringing[peer], bell)
        finally:
            for descriptor in received:
                os.close(descriptor)

    def _reach(self, address: str, secret: bytes, peer: int) -> _Link:
        """Connect to rank `peer`, and send our message; waits if `peer`'s queue is full of other processes."""
        link = _Link(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), secret, peer)
        try:
            seconds = max(0.01, self._deadline - time.monotonic())
            # Not settimeout(), which would retry; a blocking call keeps its place in the queue.
            limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            link.socket.connect(address)
            if (user := _credentials(link.socket)[1]) != os.geteuid():
                raise CommunicationError(
                    f"rank {self._names[self._rank]}: rank {self._names[peer]} has ended, and user {user} listens in "
                    "its place; see that rank's error"
                )
            self._send(link, peer)
            return link
        except BaseException as error:
            link.socket.close()
            if isinstance(error, BlockingIOError):
                raise self._late({peer}) from error
            if isinstance(error, ConnectionError):
                raise self._ended(peer) from error
            raise

    def _late(self, missing: set[int]) -> CommunicationError:
        return late(self._names[self._rank], [self._names[peer] for peer in missing], self._timeout)

    def _ended(self, peer: int) -> CommunicationError:
        who = self._names[peer]
        return CommunicationError(
            f"rank {self._names[self._rank]}: rank {who} ended while the process group was created; see the error of "
            f"rank {who}"
        )


def _accept(listener: socket.socket) -> socket.socket | None:
    """Accept a connection, and return it if it comes from a process of this user."""
    try:
        link, _ = listener.accept()
    except (BlockingIOError, ConnectionError):
        return None
    if _credentials(link)[1] != os.geteuid():
        link.close()
        return None
    return link


def _credentials(link: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, according to the kernel."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid
