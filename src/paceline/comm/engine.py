"""The engine: operations among the ranks of one host, in the same order on every rank.

    post       write the header of operation k, ring everybody
    compute    once everybody has posted k and the headers agree: read the others' memory, write the result
    done       say so, ring everybody
    finished   once everybody is done with k, nobody reads our memory for it any more

An operation is posted without waiting, so several can be under way; :meth:`Engine.progress` takes them further
without ever blocking, :meth:`Engine.wait` blocks on eventfds *and* on the peers' pidfds, so that a dead peer is known
at once and by its rank. Ringing an eventfd orders all writes before it ahead of what the woken rank reads; what a rank
knows of another is what it read after a ring, so plain memory is never polled.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum

import torch

from paceline.comm.handshake import Peer
from paceline.comm.shared_memory import Arena, Segment
from paceline.errors import CommunicationError, DesyncError

SLOTS = 256
"""Operations that may be under way at once."""
_HEADER = struct.Struct("<qqqqqqqdd")
_COUNTERS = struct.Struct("<qq")
_SLOTS_AT = 64
_SLOT_BYTES = 128
_SPINS = 20
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


class Kind(IntEnum):
    """What an operation does; ranks that post different kinds under one number are out of step."""

    all_reduce = 1
    broadcast = 2
    all_gather = 3
    reduce_scatter = 4
    barrier = 5


@dataclass(frozen=True)
class Header:
    """What a rank says of an operation. All but `offset` and `note` must be equal on every rank."""

    kind: Kind
    dtype: torch.dtype = torch.uint8
    count: int = 0
    """Elements, of this rank's part where ranks have parts."""
    reduce: int = 0
    """Which reduction, by its place in c10d's list."""
    root: int = 0
    offset: int = -1
    """Where the operand lies in the rank's memory, in bytes."""
    note: tuple[float, float] = (0.0, 0.0)
    """Two numbers for the caller's own use, such as a weight."""

    def pack(self, number: int) -> bytes:
        """As it lies in memory."""
        code = DTYPES.index(self.dtype)
        return _HEADER.pack(number, self.kind, code, self.count, self.reduce, self.root, self.offset, *self.note)

    @classmethod
    def unpack(cls, segment: Segment, number: int) -> tuple[int, Header]:
        """Number and header in the slot of operation `number`."""
        found, kind, code, *rest, first, second = _HEADER.unpack_from(segment.memory, _slot(number))
        count, reduce, root, offset = rest
        return found, cls(Kind(kind), DTYPES[code], count, reduce, root, offset, (first, second))

    def same_as(self, other: Header) -> bool:
        """Whether both describe the same operation."""
        return (self.kind, self.dtype, self.count, self.reduce, self.root) == (
            other.kind,
            other.dtype,
            other.count,
            other.reduce,
            other.root,
        )

    def __str__(self) -> str:
        return f"{self.kind.name} of {self.count} × {str(self.dtype).removeprefix('torch.')}" + (
            f" from rank {self.root}" if self.kind is Kind.broadcast else ""
        )


@dataclass
class Operation:
    """One operation under way on this rank."""

    number: int
    header: Header
    compute: Callable[[list[Header]], None]
    """Called with every local rank's header, in the order of ranks, once all are there."""
    computed: bool = False
    finished: bool = False
    error: Exception | None = None


@dataclass
class _Progress:
    """How far a peer has come, as of its last ring."""

    posted: int = 0
    done: int = 0


@dataclass
class Engine:
    """Runs operations with the other ranks of this host.

    ``members`` are the group ranks on this host in ascending order, this rank's own included; ``rank`` is ours.
    """

    arena: Arena
    peers: list[Peer]
    rank: int
    timeout: timedelta
    _posted: int = 0
    _done: int = 0
    _under_way: deque[Operation] = field(default_factory=deque)
    _progress: dict[int, _Progress] = field(default_factory=dict)
    _broken: str = ""

    def __post_init__(self) -> None:
        self._progress = {peer.rank: _Progress() for peer in self.peers}
        self.members = sorted([self.rank, *self._progress])
        self._segments: dict[int, Segment] = {peer.rank: peer.memory for peer in self.peers} | {self.rank: self.arena}
        self.memories = [self._segments[rank] for rank in self.members]
        self._poll = select.poll()
        for peer in self.peers:
            self._poll.register(peer.ringing, select.POLLIN)
            self._poll.register(peer.alive, select.POLLIN)
        self._spins = _SPINS if len(self.members) <= len(os.sched_getaffinity(0)) else 1

    # -- posting and progress -----------------------------------------------------------------------------------

    def post(self, header: Header, compute: Callable[[list[Header]], None]) -> Operation:
        """Begin an operation, without waiting for anyone (unless too many are under way).

        Raises:
            CommunicationError: if a peer is gone.
        """
        self._expect_whole()
        while len(self._under_way) >= SLOTS - 1:
            self.wait(self._under_way[0])
        operation = Operation(self._posted, header, compute)
        self.arena.memory[_slot(self._posted) : _slot(self._posted) + _HEADER.size] = header.pack(self._posted)
        self._posted += 1
        self._under_way.append(operation)
        self._ring()
        return operation

    def progress(self) -> None:
        """Take operations as far as they go now."""
        if self._under_way:
            self._listen()
            self._advance()

    def wait(self, operation: Operation) -> None:
        """Wait until `operation` is finished.

        Raises:
            DesyncError: on every rank, if ranks posted different operations under its number; the group stays usable.
            CommunicationError: if a peer ended, or did not come before the timeout; names it.
        """
        self.progress()
        spins = self._spins
        deadline = None
        while not operation.finished:
            self._expect_whole()
            if spins:
                spins -= 1
                self._listen()
            else:
                deadline = deadline or time.monotonic() + self.timeout.total_seconds()
                self._block(operation, deadline)
            self._advance()
        if operation.error is not None:
            raise operation.error

    def run(self, header: Header, compute: Callable[[list[Header]], None]) -> None:
        """Post an operation and wait for it."""
        self.wait(self.post(header, compute))

    def _advance(self) -> None:
        """Compute what everybody has posted, finish what everybody is done with, in order."""
        posted = min((peer.posted for peer in self._progress.values()), default=self._posted)
        rang = False
        for operation in self._under_way:
            if operation.number >= posted:
                break
            if not operation.computed:
                self._compute(operation)
                rang = True
        if rang:
            self._ring()
        done = min((peer.done for peer in self._progress.values()), default=self._done)
        while self._under_way and self._under_way[0].computed and self._under_way[0].number < done:
            self._under_way.popleft().finished = True

    def _compute(self, operation: Operation) -> None:
        headers = [self._header(rank, operation.number) for rank in self.members]
        operation.error = self._mismatch(operation.number, headers)
        if operation.error is None:
            operation.compute(headers)
        operation.computed = True
        self._done = operation.number + 1

    def _header(self, rank: int, number: int) -> Header:
        found, header = Header.unpack(self._segments[rank], number)
        if found != number:
            self._broken = f"rank {rank} shows operation {found} in the place of {number}"
            self._expect_whole()
        return header

    def _mismatch(self, number: int, headers: Sequence[Header]) -> DesyncError | None:
        """The same verdict on every rank, before any byte of anyone's data is used."""
        if all(header.same_as(headers[0]) for header in headers):
            return None
        said: dict[str, list[str]] = {}
        for rank, header in zip(self.members, headers, strict=True):
            text = str(header) + (f", reduction {header.reduce}" if header.kind is Kind.all_reduce else "")
            said.setdefault(text, []).append(str(rank))
        parts = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in said.items())
        return DesyncError(
            f"rank {self.rank}: ranks are out of step in operation {number} of this group ({parts}); "
            "call the same collectives in the same order, with equal shapes and dtypes, on every rank"
        )

    # -- signals ------------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        """Show how far we are, then wake everybody; the eventfd's write orders the two."""
        _COUNTERS.pack_into(self.arena.memory, 0, self._posted, self._done)
        for peer in self.peers:
            os.eventfd_write(peer.bell, 1)

    def _listen(self) -> None:
        """Note how far those peers are that rang."""
        for peer in self.peers:
            try:
                os.eventfd_read(peer.ringing)
            except BlockingIOError:
                continue
            self._note(peer)

    def _note(self, peer: Peer) -> None:
        progress = self._progress[peer.rank]
        progress.posted, progress.done = _COUNTERS.unpack_from(peer.memory.memory, 0)

    def _block(self, operation: Operation, deadline: float) -> None:
        """Sleep until somebody rings, ends, or the time is over."""
        ready = {descriptor for descriptor, _ in self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        if not ready:
            late = [peer for peer in self.peers if not self._has_done(peer, operation)]
            who = ", ".join(f"rank {peer.rank} (pid {peer.pid}, {self._where(peer)})" for peer in late)
            self._broken = f"{who} did not take part within {self.timeout.total_seconds():g} s"
            self._expect_whole(operation)
        self._listen()
        for peer in self.peers:
            if peer.alive in ready:
                self._note(peer)  # what it finished before it ended counts
                self._poll.unregister(peer.alive)
                if not self._has_done(peer, operation):
                    self._broken = f"rank {peer.rank} (pid {peer.pid}) has ended"
                    self._expect_whole(operation)

    def _has_done(self, peer: Peer, operation: Operation) -> bool:
        return self._progress[peer.rank].done > operation.number

    def _where(self, peer: Peer) -> str:
        return f"which has begun {self._progress[peer.rank].posted} operations of this group"

    def _expect_whole(self, operation: Operation | None = None) -> None:
        if self._broken:
            during = f" in {operation.header}, operation {operation.number} of this group" if operation else ""
            raise CommunicationError(
                f"rank {self.rank}: {self._broken}{during}; look for that rank's own error, and start again from the "
                "last checkpoint"
            )

    def close(self) -> None:
        """Give descriptors and memory back."""
        for peer in self.peers:
            for descriptor in peer.descriptors():
                os.close(descriptor)
        os.close(self.arena.descriptor)
        self.peers = []


def _slot(number: int) -> int:
    return _SLOTS_AT + number % SLOTS * _SLOT_BYTES
