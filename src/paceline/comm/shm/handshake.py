"""The handshake: the ranks of one host find each other and exchange the descriptors of their memory and signals.

Each rank listens on an abstract Unix socket, only during the handshake. The sockets' names and the group's
secret are in a private store (:mod:`paceline.core.processes.private_store`), which other users cannot read or write.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import time
from datetime import timedelta

from torch.distributed import Store

from paceline.comm.shm.arena import Arena
from paceline.comm.shm.introduction import Introduction, Peer, Rejected, credentials
from paceline.core.processes.missing_ranks import late, read_from
from paceline.errors import CommunicationError

_SECRET_BYTES = 32


def connect(store: Store, rank: int, peers: list[int], arena: Arena, timeout: timedelta) -> list[Peer]:
    """Exchange descriptors with `peers`, the other ranks of this host. All of them call this."""
    connected: dict[int, Peer] = {}
    try:
        _connect(store, rank, peers, arena, timeout, connected)
    # Close the descriptors here, because no other object owns them yet.
    except BaseException as error:
        for descriptor in [held for peer in connected.values() for held in peer.descriptors()]:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise CommunicationError(
                f"rank {rank}: no shared memory with the {len(peers)} other ranks of this host ({error}); "
                "see the first error of another rank, and check that 'ulimit -n' is high enough"
            ) from error
        raise
    return [connected[peer] for peer in peers]


def _connect(
    store: Store, rank: int, peers: list[int], arena: Arena, timeout: timedelta, connected: dict[int, Peer]
) -> None:
    """Connect to lower ranks and accept higher ones. Unrelated processes can also connect, but never hold up a rank."""
    deadline = time.monotonic() + timeout.total_seconds()
    address, secret = f"\0paceline/{secrets.token_hex(16)}", secrets.token_bytes(_SECRET_BYTES)
    missing = set(peers)
    with contextlib.ExitStack() as stack:
        links: dict[int, Introduction] = {}
        stack.callback(_close, links)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
        store.set(f"socket/{rank}", json.dumps([address, secret.hex()]))
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        for other in sorted(peer for peer in peers if peer < rank):
            address_there, token = json.loads(read_from(store, f"socket/{other}", rank, other, timeout))
            if other == min(peers):  # all ranks use the lowest rank's secret
                secret = bytes.fromhex(token)
            # Connect in ascending order, and only after listening, so that no two ranks wait for each other.
            link = _reach(address_there, rank, other, deadline, timeout)
            links[link.fileno()] = Introduction(link, secret, rank, arena, other)
            poll.register(link, select.POLLIN)
        while missing:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready or time.monotonic() > deadline:
                raise late(rank, missing, timeout)
            for descriptor, _ in ready:
                if descriptor == listener.fileno():
                    if (visitor := _accept(listener)) is not None:
                        links[visitor.fileno()] = Introduction(visitor, secret, rank, arena)
                        poll.register(visitor, select.POLLIN)
                elif not _advance(links[descriptor], rank, missing, connected):
                    poll.unregister(descriptor)
                    links.pop(descriptor).close()


def _close(links: dict[int, Introduction]) -> None:
    for link in links.values():
        link.close()


def _advance(link: Introduction, rank: int, missing: set[int], connected: dict[int, Peer]) -> bool:
    """Take the next step of `link`; return whether there is another one."""
    try:
        peer = link.advance(missing)
    except Rejected as reason:
        if link.expected is not None:
            raise _peer_ended(rank, link.expected) from reason
        return False
    if peer is None:
        return True
    connected[peer.rank] = peer
    missing.discard(peer.rank)
    return False


def _reach(address: str, rank: int, peer: int, deadline: float, timeout: timedelta) -> socket.socket:
    """Connect to rank `peer`, which listens at `address`; waits if its queue is full of other processes."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        seconds = max(0.01, deadline - time.monotonic())
        # Not settimeout(), which would retry; a blocking call keeps its place in the queue.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
        link.connect(address)
        if (user := credentials(link)[1]) != os.geteuid():
            raise CommunicationError(
                f"rank {rank}: rank {peer} has ended, and user {user} listens in its place; see that rank's error"
            )
        return link
    except BaseException as error:
        link.close()
        if isinstance(error, BlockingIOError):
            raise late(rank, {peer}, timeout) from error
        if isinstance(error, ConnectionError):
            raise _peer_ended(rank, peer) from error
        raise


def _accept(listener: socket.socket) -> socket.socket | None:
    """Accept a connection, and return it if it comes from a process of this user."""
    try:
        link, _ = listener.accept()
    except (BlockingIOError, ConnectionError):
        return None
    if credentials(link)[1] != os.geteuid():
        link.close()
        return None
    return link


def _peer_ended(rank: int, peer: int) -> CommunicationError:
    return CommunicationError(
        f"rank {rank}: rank {peer} ended while the process group was created; see the error of rank {peer}"
    )
