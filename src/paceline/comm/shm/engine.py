"""The engine: operations among the ranks of one host, in the same order on every rank.

    post       write the header of operation k, ring every rank
    compute    once every rank has posted k and the headers agree: read the others' memory, write the result
    done       ring every rank
    finished   once every rank is done with k, no rank reads our memory for it any more

An operation is posted without waiting, so several can be under way. :meth:`Engine.progress` advances them without ever
blocking. :meth:`Engine.wait` blocks on eventfds *and* on the peers' pidfds, so that a dead peer is known at once and by
its rank. A ring adds to an eventfd how many operations were posted and done since the last ring. So a rank learns of
another one's progress through the kernel, which orders all writes before the ring ahead of all reads of the woken rank.
Plain memory is never polled.

After a mismatch the ranks would be out of step if some had posted a further operation and others never would. So a
collective of several operations posts the second one when all ranks agree on the first (:meth:`Engine.agree`).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import NoReturn

from torch import Tensor

from paceline.comm.shm.arena import Arena, Segment
from paceline.comm.shm.doorbells import Signals
from paceline.comm.shm.header import SLOTS, Header
from paceline.comm.shm.introduction import Peer, world_rank
from paceline.comm.shm.operation import Operation, is_computed, is_finished, mismatch
from paceline.core.telemetry.spans import waiting
from paceline.errors import CommunicationError

_SPINS = 20
_NAP_S = 1.0
"""Longest sleep in one piece. Time in which this process itself stood still counts as no more than that."""


class Engine:
    """Runs operations with the other ranks of this host. Threads may share it; they take turns.

    ``members`` are the group ranks on this host in ascending order, including this rank, ``rank``.
    """

    def __init__(self, arena: Arena, peers: Sequence[Peer], rank: int, timeout: timedelta) -> None:
        self.arena, self.rank = arena, rank
        self.peers = list(peers)
        """The other ranks of this host; empty once the engine is closed."""
        self.timeout = timeout
        """Longest wait for peers before they count as absent."""
        self.signals = Signals(peers)
        self.members = sorted([rank, *(peer.rank for peer in peers)])
        self.place = self.members.index(rank)
        """This rank's index in `members`, `names` and `memories`."""
        self._name = world_rank(rank)
        self._names = {peer.rank: peer.name for peer in peers} | {rank: self._name}
        self.names = [self._names[member] for member in self.members]
        """The members' ranks in the world, which messages use."""
        self._segments: dict[int, Segment] = {peer.rank: peer.memory for peer in peers} | {rank: arena}
        self.memories = [self._segments[member] for member in self.members]
        self._posted = 0
        """Operations that this rank has posted: the number of the next one."""
        self._done = 0
        """Operations whose part this rank has done. They are done in the order of their numbers."""
        self._under_way: deque[Operation] = deque()
        """Operations posted and not finished, in the order of their numbers, at most ``SLOTS - 1``."""
        self._broken = ""
        """Reason why the group cannot be used any more; set once, and nothing is computed after that."""
        self._blamed: list[int] = []
        """World ranks that `_broken` names."""
        self._lock = threading.RLock()
        """Held by the thread that changes anything above."""
        self._spins = _SPINS if len(self.members) <= len(os.sched_getaffinity(0)) else 1
        """Number of looks for rings before a wait sleeps; one where ranks share cores, because a peer needs ours."""
        self._close_descriptors = weakref.finalize(self, self.signals.close)
        self._close_descriptors.atexit = False
        _register(self)

    # -- posting and progress -----------------------------------------------------------------------------------

    def post(self, header: Header, compute: Callable[[list[Header]], None]) -> Operation:
        """Begin an operation, without waiting for another rank (unless too many are under way).

        Raises:
            CommunicationError: if the group has failed before, or fails now.
        """
        with self._lock:
            self._check_usable()
            while len(self._under_way) >= SLOTS - 1:
                self._wait_until(self._under_way[0], is_finished)
            operation = Operation(self._posted, header, compute)
            header.write(self.arena, operation.number)  # before the ring, after which peers read it
            self._posted += 1
            self._under_way.append(operation)
            with _BreaksOnError(self):
                self.signals.announce(posted=1)
                self.signals.ring()
            return operation

    def progress(self) -> None:
        """Advance operations as far as they go now."""
        # A thread that holds the lock does it already.
        if self._under_way and self._lock.acquire(blocking=False):
            try:
                with _BreaksOnError(self):
                    self.signals.listen()
                    self._advance()
            finally:
                self._lock.release()

    def wait(self, operation: Operation) -> None:
        """Wait until `operation` is finished.

        Raises:
            DesyncError: on every rank, if ranks posted different operations under its number; the group stays usable.
            CommunicationError: if a peer ended, or did not come before the timeout; names it.
        """
        if not operation.finished:
            with self._lock:
                self._wait_until(operation, is_finished)
        if operation.error is not None:
            raise operation.error

    def agree(self, operation: Operation) -> None:
        """Wait until every rank has posted `operation`, and the same one. Raises the errors of :meth:`wait`."""
        if not operation.computed:
            with self._lock:
                self._wait_until(operation, is_computed)
        if operation.error is not None:
            self.wait(operation)

    def run(self, header: Header, compute: Callable[[list[Header]], None]) -> None:
        """Post an operation and wait for it."""
        self.wait(self.post(header, compute))

    def operands(self, headers: Sequence[Header], part: slice | None = None) -> list[Tensor]:
        """Return every member's operand as its header describes it, or a `part` of it, in place in their memory."""
        pairs = zip(self.memories, headers, strict=True)
        if part is None:
            return [memory.tensor(header.offset, header.ready, header.dtype) for memory, header in pairs]
        start, count = part.start * headers[0].dtype.itemsize, part.stop - part.start
        return [memory.tensor(header.offset + start, count, header.dtype) for memory, header in pairs]

    def _wait_until(self, operation: Operation, is_over: Callable[[Operation], bool]) -> None:
        spins, left = self._spins, self.timeout.total_seconds()
        with _BreaksOnError(self):
            self.signals.listen()
            self._advance()
            while spins and not is_over(operation):
                self._check_usable()
                spins -= 1
                self.signals.listen()
                self._advance()
            if is_over(operation):
                return
            with waiting():
                while not is_over(operation):
                    self._check_usable()
                    left = self._block(operation, left)
                    self._advance()

    def interrupted(self, error: BaseException) -> None:
        """Mark the group as broken by `error`, if nothing else has broken it before."""
        self._broken = self._broken or f"rank {self._name} was interrupted by {type(error).__name__}"

    def _advance(self) -> None:
        """Compute the operations that every rank has posted, finish those that every rank is done with, in order."""
        posted = self.signals.posted(self._posted)
        for operation in self._under_way:
            if operation.number >= posted:
                break
            if not operation.computed:
                self._compute(operation)
        self.signals.ring()  # once for all that were computed, because each ring is a system call for each peer
        done = self.signals.done(self._done)
        while self._under_way and self._under_way[0].computed and self._under_way[0].number < done:
            self._under_way.popleft().finished = True

    def _compute(self, operation: Operation) -> None:
        if self._broken:
            return
        headers = [self._header(rank, operation) for rank in self.members]
        operation.error = mismatch(operation.number, headers, self.names, self._name)
        if operation.error is None:
            try:
                operation.compute(headers)
            except BaseException as error:
                # The others are never told that it is done, because they would take a half-written result for whole.
                self._broken = f"rank {self._name} could not compute {operation.header} ({error})"
                raise
        operation.computed = True
        operation.compute = _nothing  # dropped, because it may hold the caller's tensors
        self._done = operation.number + 1
        self.signals.announce(done=1)

    def _header(self, rank: int, operation: Operation) -> Header:
        if rank == self.rank:
            return operation.header
        header = Header.read(self._segments[rank], operation.number)
        if header is None:
            self._fail(f"rank {self._names[rank]} shows another operation", operation)
        return header

    # -- waiting ------------------------------------------------------------------------------------------------

    def _block(self, operation: Operation, left: float) -> float:
        """Sleep until a peer rings or ends, for a second at most; return how many of the seconds `left` remain."""
        missing = [peer for peer in self.peers if self.signals.progress[peer.rank].done <= operation.number]
        for peer in missing:
            if peer.rank in self.signals.ended:
                self._fail(f"rank {peer.name} (pid {peer.pid}) has ended", operation, [peer])
        nap = min(left, _NAP_S)
        began = time.monotonic()
        # A peer may wait for our part in another group, while we wait for its part in this one.
        others = [engine for engine in _registered() if engine is not self and engine._under_way]
        woken = self.signals.sleep(nap, [engine.signals for engine in others])
        left -= min(time.monotonic() - began, nap)
        self.signals.listen()
        for engine in others:
            with suppress(Exception):  # raised by the wait for that engine
                engine.progress()
        if not woken and left <= 0:
            late = [peer for peer in missing if self.signals.progress[peer.rank].posted <= operation.number] or missing
            who = ", ".join(f"rank {peer.name} (pid {peer.pid}, {self._where(peer)})" for peer in late)
            self._fail(f"{who} did not take part within {self.timeout.total_seconds():g} s", operation, late)
        return left

    def _where(self, peer: Peer) -> str:
        return f"which has begun {self.signals.progress[peer.rank].posted} operations of this group"

    # -- failure and the end ------------------------------------------------------------------------------------

    def _fail(self, event: str, operation: Operation, blamed: Sequence[Peer] = ()) -> NoReturn:
        self._broken = f"{event} in {operation.header}, operation {operation.number} of this group"
        self._blamed = [peer.name for peer in blamed]
        raise CommunicationError(f"rank {self._name}: {self._broken}; {_REMEDY}").because_of(self._blamed)

    def _check_usable(self) -> None:
        if self._broken:
            raise CommunicationError(
                f"rank {self._name}: this process group cannot be used any more, since {self._broken}; {_REMEDY}"
            ).because_of(self._blamed)

    def close(self) -> None:
        """Release descriptors and memory; a thread that waits gets an error."""
        if not self._close_descriptors.alive:
            return
        self._broken = self._broken or "it was destroyed"
        self.signals.interrupt()  # before the lock is taken, which a sleeping thread holds
        with self._lock:
            self._drop()

    def leave_to_parent(self) -> None:
        """In a process forked from the rank: release everything that belongs to the rank."""
        self._lock = threading.RLock()  # a new one, because a thread of the rank may have held it at the fork
        self._broken = "this process was forked from a rank, and only the rank itself belongs to the group"
        self.arena.leave_to_parent()
        self._drop()

    def _drop(self) -> None:
        self._close_descriptors()
        self.arena.close()
        self.peers = []
        self._under_way.clear()


class _BreaksOnError:
    """Marks the group as broken if the block is interrupted: other ranks wait for its ring, or for its part."""

    # A class, because it costs a third of a generator, and every operation enters three.

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and not isinstance(error, CommunicationError):  # also a KeyboardInterrupt
            self._engine.interrupted(error)


_REMEDY = "look for that rank's own error, and start again from the last checkpoint"


def _nothing(_: list[Header]) -> None:
    """Replace a function that has computed its operation."""


_registry: tuple[weakref.ref[Engine], ...] = ()
"""The engines of this process. Replaced as a whole, because threads read it while others make groups."""


def _registered() -> list[Engine]:
    return [engine for reference in _registry if (engine := reference()) is not None]


def _register(engine: Engine) -> None:
    global _registry
    _release_after_fork()
    _registry = (*(reference for reference in _registry if reference() is not None), weakref.ref(engine))


@cache
def _release_after_fork() -> None:
    """Make forked children (DataLoader workers) release the rank's engines."""

    def leave() -> None:
        global _registry
        engines, _registry = _registered(), ()
        for engine in engines:
            engine.leave_to_parent()

    os.register_at_fork(after_in_child=leave)
