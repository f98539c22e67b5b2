"""The introduction of two ranks over a Unix socket: each proves its identity before it receives descriptors.

The steps, in order:

    connector                                          listener
    1. the kernel says that it is our user             1. the kernel says that it is our user
    2. hello: rank, proof                        →     3. is the proof right?
    5. is the proof right?                       ←     4. hello: rank, proof; descriptors
    6. descriptors                               →     7. done
"""

from __future__ import annotations

import errno
import hmac
import os
import socket
import struct
from collections.abc import Container
from dataclasses import dataclass

import torch.distributed as dist

from paceline.comm.shm.arena import Arena, Segment

_WHO = struct.Struct("<qq")
_PROOF_BYTES = 32  # of SHA-256


class Rejected(Exception):
    """The process at the other end does not belong to the group, or has ended; the message says which."""


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


class Introduction:
    """One end of a connection."""

    expected: int | None
    """The peer's rank. The connector knows it from the start, the listener after step 3."""
    ringing: int
    """The eventfd that we have sent to the peer, or -1."""

    def __init__(
        self, link: socket.socket, secret: bytes, rank: int, arena: Arena, expected: int | None = None
    ) -> None:
        self.link = link
        self.expected = expected
        self.ringing = -1
        self._secret, self._rank, self._arena = secret, rank, arena
        self._connected = expected is not None
        self._name = -1
        link.setblocking(False)
        if expected is not None:
            link.send(self._hello(expected))

    def advance(self, missing: Container[int]) -> Peer | None:
        """Read a message and take the next step; after the last step, return the peer."""
        received: list[int] = []
        try:
            text, received, flags, _ = socket.recv_fds(self.link, 256, 2, socket.MSG_CMSG_CLOEXEC)
            if self._connected or self.expected is None:
                peer_rank, self._name = self._read(text)
                if peer_rank not in missing or self.expected not in (None, peer_rank):
                    raise Rejected("it is another rank")
                if self.expected is None:
                    self.expected = peer_rank
                    self._send(self._hello(peer_rank))
                    return None
            if flags & socket.MSG_CTRUNC:  # the kernel dropped descriptors that exceed this process's limit
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if len(received) != 2:
                raise Rejected("it ended")
            if self._connected:
                self._send(b"descriptors")
            return self._peer(received)
        except (ConnectionError, BlockingIOError) as error:
            raise Rejected(f"it ended ({error.strerror})") from error
        finally:
            for descriptor in received:
                os.close(descriptor)

    def _peer(self, received: list[int]) -> Peer:
        assert self.expected is not None
        pid, _, _ = credentials(self.link)
        try:
            alive = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise Rejected("it ended") from error
        try:
            # The caller closes the first descriptor, because the mapping keeps the memory alive without it.
            memory, bell = Segment(received[0]), received.pop()
        except BaseException:
            os.close(alive)
            raise
        ringing, self.ringing = self.ringing, -1
        return Peer(self.expected, self._name, pid, alive, memory, ringing, bell)

    def _hello(self, peer_rank: int) -> bytes:
        who = _WHO.pack(self._rank, world_rank(self._rank))
        return self._proof(who, peer_rank) + who

    def _read(self, text: bytes) -> tuple[int, int]:
        """Return the sender's rank in the group and its global rank."""
        proof, who = text[:_PROOF_BYTES], text[_PROOF_BYTES:]
        if len(who) != _WHO.size or not hmac.compare_digest(proof, self._proof(who, self._rank)):
            raise Rejected("it does not know the group's secret" if text else "it ended")
        rank, name = _WHO.unpack(who)
        return rank, name

    def _proof(self, who: bytes, peer_rank: int) -> bytes:
        """Return the proof, meant for rank `peer_rank`, that the sender `who` knows the secret."""
        return hmac.digest(self._secret, who + _WHO.pack(peer_rank, 0), "sha256")

    def _send(self, text: bytes) -> None:
        """Send the descriptors of our memory and of an eventfd that the peer will ring."""
        self.ringing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        socket.send_fds(self.link, [text], [self._arena.descriptor, self.ringing])

    def close(self) -> None:
        """Close the connection, and the eventfd unless a peer has taken it over."""
        self.link.close()
        if self.ringing >= 0:
            os.close(self.ringing)
            self.ringing = -1


def world_rank(rank: int) -> int:
    """Return this process's number in error messages: its global rank, not its `rank` in a subgroup."""
    return dist.get_rank() if dist.is_initialized() else rank


def credentials(link: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group at the other end, according to the kernel."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid
