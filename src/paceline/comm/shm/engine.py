"""The engine: operations among the ranks of one host, in the same order on every rank.

    post       write the header of operation k, ring every rank
    compute    once every rank has posted k and the headers agree: read the others' memory, write the result
    done       ring every rank; later, where each rank computes its own result: the others wait for memory alone
    finished   once every rank is done with k, no rank reads our memory for it any more

An operation is posted without waiting, so several can be under way. :meth:`Engine.progress` advances them without ever
blocking. :meth:`Engine.wait` looks for rings for as long as that has paid lately, then it sleeps on eventfds *and* on
the peers' pidfds, so that a dead peer is known at once and by its rank. A ring adds to an eventfd how many operations
were posted and done since the last ring. So a rank learns of another one's progress through the kernel, which orders
all writes before the ring ahead of all reads after it was heard. Plain memory is never polled.

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

import torch
from torch import Tensor

from paceline.comm.shm.arena import Arena, Segment
from paceline.comm.shm.doorbells import Signals
from paceline.comm.shm.header import SLOTS, Header, Shown, mismatch, read_header, read_shown, write
from paceline.comm.shm.introduction import Peer, world_rank
from paceline.core.telemetry.spans import waiting
from paceline.errors import CommunicationError, DesyncError

Compute = Callable[[list[Shown]], None]
"""Computes an operation on this rank from what each local rank shows, in the order of ranks."""
_FEWEST_SPINS, _MOST_SPINS = 8, 256
_UNTOLD = 16
"""Number of operations done of which peers may be told later, with the next ring."""
_NAP_S = 1.0
"""Longest sleep in one piece. Time in which this process itself stood still counts as no more than that."""


class Operation:
    """One operation under way on this rank. The engine alone changes it."""

    __slots__ = ("compute", "computed", "engine", "error", "finished", "header", "is_own", "number")

    def __init__(self, engine: Engine, number: int, header: Header, compute: Compute, *, is_own: bool) -> None:
        self.engine = engine
        self.number = number
        """Number of operations posted before it in the group; the same operation has one number on every rank."""
        self.header = header
        # Any thread may compute it, and an inference tensor can be written to in inference mode alone.
        self.compute = torch.inference_mode()(compute) if torch.is_inference_mode_enabled() else compute
        """Called once, when all ranks have posted; then dropped."""
        self.is_own = is_own
        """Whether the result is whole when this rank has done its part, because no other rank writes to it."""
        self.computed = False
        """Whether this rank has done its part, or has found that the headers differ."""
        self.finished = False
        """Whether every rank has done its part, so that none reads our memory for it any more."""
        self.error: Exception | None = None
        """Error of the operation if the headers differ, the same on every rank; set before `computed`."""

    def wait(self) -> None:
        """Wait until the result is whole on this rank; raise the errors of the engine's ``wait``."""
        self.engine.wait(self)

    def progress(self) -> None:
        """Advance it, and all before it, as far as they go now."""
        self.engine.progress()

    def is_completed(self) -> bool:
        """Return whether the result is whole on this rank."""
        return self.computed if self.is_own else self.finished

    def end_part(self) -> None:
        """Note that this rank has done its part."""
        self.computed = True
        self.compute = _nothing  # dropped, because it may hold the caller's tensors


def _nothing(_: list[Shown]) -> None:
    """Replace a function that has computed its operation."""


def is_computed(operation: Operation) -> bool:
    """Return whether this rank has done its part of `operation`."""
    return operation.computed


def is_finished(operation: Operation) -> bool:
    """Return whether every rank has done its part of `operation`."""
    return operation.finished


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
        shows: dict[int, tuple[int, Segment]] = {peer.rank: (peer.name, peer.memory) for peer in peers}
        shows[rank] = self._name, arena
        self.names = [shows[member][0] for member in self.members]
        """The members' ranks in the world, which messages use."""
        self.memories = [shows[member][1] for member in self.members]
        self._posted = 0
        """Operations that this rank has posted: the number of the next one."""
        self._done = 0
        """Operations whose part this rank has done. They are done in the order of their numbers."""
        self._ready = 0
        """Operations that all peers had posted at the last look: no further ring tells of those not posted here."""
        self._under_way: deque[Operation] = deque()
        """Operations posted and not finished, in the order of their numbers, at most ``SLOTS - 1``."""
        self._broken = ""
        """Reason why the group cannot be used any more; set once, and nothing is computed after that."""
        self._blamed: list[int] = []
        """World ranks that `_broken` names."""
        self._lock = threading.RLock()
        """Held by the thread that changes anything above."""
        self._most_spins = _MOST_SPINS if len(self.members) <= len(os.sched_getaffinity(0)) else 1
        """Largest number of looks for rings before a wait sleeps; one where ranks share cores: a peer needs ours."""
        self._spins = self._most_spins
        """Number of looks in the next wait. It doubles where they were enough, and is halved where they were not."""
        self._close_descriptors = weakref.finalize(self, self.signals.close)
        self._close_descriptors.atexit = False
        _register(self)

    # -- posting and progress -----------------------------------------------------------------------------------

    def post(self, header: Header, shown: Shown, compute: Compute, *, is_own: bool = False) -> Operation:
        """Begin an operation, without waiting for another rank (unless too many are under way).

        Args:
            header: what must be equal on every rank.
            shown: what this rank shows the others.
            compute: computes this rank's part from what all ranks show.
            is_own: whether no other rank writes to this one's result.
        """
        with self._lock:
            self._check_usable()
            while len(self._under_way) >= SLOTS - 1:
                self._wait_until(self._under_way[0], is_finished)
            operation = Operation(self, self._posted, header, compute, is_own=is_own)
            write(self.arena, operation.number, header, shown)  # before the ring, after which peers read it
            with _BreaksOnError(self):
                self._posted += 1
                self._under_way.append(operation)
                self.signals.announce(posted=1)
                self.signals.ring()
                if self._ready > operation.number:
                    self._advance()
            return operation

    def post_at_once(self, post: Callable[[], Operation]) -> Operation | None:
        """Call `post`, which posts an operation; return None if it would have to wait for another thread or rank."""
        if self._lock.acquire(blocking=False):
            try:
                if len(self._under_way) < SLOTS - 1:
                    return post()
            finally:
                self._lock.release()
        return None

    def progress(self) -> None:
        """Advance operations as far as they go now."""
        # A thread that holds the lock does it already.
        if self._under_way and self._lock.acquire(blocking=False):
            try:
                with _BreaksOnError(self):
                    self._look()
            finally:
                self._lock.release()

    def wait(self, operation: Operation) -> None:
        """Wait until the result of `operation` is whole on this rank, or it is known why it will not be."""
        if not operation.is_completed():
            with self._lock:
                self._wait_until(operation, is_computed if operation.is_own else is_finished)
        if operation.error is not None:
            raise operation.error

    def agree(self, operation: Operation) -> None:
        """Wait until every rank has posted `operation`, and the same one. Raises the errors of :meth:`wait`."""
        if not operation.computed:
            with self._lock:
                self._wait_until(operation, is_computed)
        if operation.error is not None:
            self.wait(operation)

    def operands(self, shown: Sequence[Shown], dtype: torch.dtype, part: slice | None = None) -> list[Tensor]:
        """Return what every member shows, or a `part` of it, in place in their memory."""
        pairs = zip(self.memories, shown, strict=True)
        if part is None:
            return [memory.operand(one.offset, one.length, dtype) for memory, one in pairs]
        start, count = part.start * dtype.itemsize, part.stop - part.start
        return [memory.operand(one.offset + start, count, dtype) for memory, one in pairs]

    def _wait_until(self, operation: Operation, is_over: Callable[[Operation], bool]) -> None:
        left = self.timeout.total_seconds()
        with _BreaksOnError(self):
            self._look()
            if is_over(operation) or self._spin(operation, is_over):
                return
            with waiting():
                while not is_over(operation):
                    self._check_usable()
                    left = self._block(operation, is_over, left)
                    self._advance()

    def _spin(self, operation: Operation, is_over: Callable[[Operation], bool]) -> bool:
        """Look for rings without sleeping, for as long as that has paid lately; return whether `operation` is over."""
        spins = self._spins
        for _ in range(spins):
            if self._look() and is_over(operation):
                self._spins = min(2 * spins, self._most_spins)
                return True
        self._spins = max(spins // 2, min(_FEWEST_SPINS, self._most_spins))
        return False

    def _look(self) -> bool:
        """Advance operations if a peer has rung; return whether one has. Without peers there is nothing to wait for."""
        if self.signals.listen() or not self.peers:
            self._advance()
            return True
        return False

    def _advance(self) -> None:
        """Compute the operations that every rank has posted, finish those that every rank is done with, in order."""
        self._ready = ready = self.signals.posted(self._posted)
        is_waited_for = False
        for operation in self._under_way:
            if operation.number >= ready:
                break
            if not operation.computed:
                self._compute(operation)
                is_waited_for |= not operation.is_own
        # Once for all that were computed, because each ring is a system call for each peer. That peers may write again
        # to what they showed can wait for the next ring, unless they begin to lack memory.
        if is_waited_for or self.signals.untold_done >= _UNTOLD:
            self.signals.ring()
        done = self.signals.done(self._done)
        while self._under_way and self._under_way[0].computed and self._under_way[0].number < done:
            self._under_way.popleft().finished = True

    def _compute(self, operation: Operation) -> None:
        if self._broken:
            return
        shown = read_shown(self.memories, operation.number)
        if shown is None:
            operation.error = self._mismatch(operation)
        else:
            try:
                operation.compute(shown)
            except BaseException as error:
                # The others are never told that it is done, because they would take a half-written result for whole.
                self._broken = f"rank {self._name} could not compute {operation.header} ({error})"
                raise
        operation.end_part()
        self._done = operation.number + 1
        self.signals.announce(done=1)

    def _mismatch(self, operation: Operation) -> DesyncError:
        headers = [read_header(memory, operation.number) for memory in self.memories]
        if None in headers:
            self._fail(f"rank {self.names[headers.index(None)]} shows another operation", operation)
        return mismatch(operation.number, list(filter(None, headers)), self.names, self._name)

    # -- waiting ------------------------------------------------------------------------------------------------

    def _block(self, operation: Operation, is_over: Callable[[Operation], bool], left: float) -> float:
        """Sleep until a peer rings or ends, for a second at most; return how many of the seconds `left` remain."""
        self.signals.ring()  # nothing that peers may wait for is left untold
        counts = self.signals.progress
        reached = {rank: one.posted if is_over is is_computed else one.done for rank, one in counts.items()}
        missing = [peer for peer in self.peers if reached[peer.rank] <= operation.number]
        for peer in missing:
            if peer.rank in self.signals.ended:
                self._fail(f"rank {peer.name} (pid {peer.pid}) has ended", operation, [peer])
        nap, began = min(left, _NAP_S), time.monotonic()
        # A peer may wait for our part in another group, while we wait for its part in this one.
        others = [engine for engine in _engines() if engine is not self and engine._under_way]
        woken = self.signals.sleep(nap, [engine.signals for engine in others])
        left -= min(time.monotonic() - began, nap)
        self.signals.listen()
        for engine in others:
            with suppress(Exception):  # raised by the wait for that engine
                engine.progress()
        if not woken and left <= 0:
            late = [peer for peer in missing if counts[peer.rank].posted <= operation.number] or missing
            begun = [f"has begun {counts[peer.rank].posted} operations of this group" for peer in late]
            who = [f"rank {peer.name} (pid {peer.pid}, which {what})" for peer, what in zip(late, begun, strict=True)]
            self._fail(f"{', '.join(who)} did not take part within {self.timeout.total_seconds():g} s", operation, late)
        return left

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
        engine = self._engine
        if error is not None and not isinstance(error, CommunicationError):  # also a KeyboardInterrupt
            engine._broken = engine._broken or f"rank {engine._name} was interrupted by {type(error).__name__}"


_REMEDY = "look for that rank's own error, and start again from the last checkpoint"


# -- the engines of this process: a wait in one advances the others, and a forked child leaves all to the rank -------

_registry: tuple[weakref.ref[Engine], ...] = ()
"""Replaced as a whole, because threads read it while others make groups."""


def _engines() -> list[Engine]:
    """Return the engines that are alive."""
    return [engine for reference in _registry if (engine := reference()) is not None]


def _register(engine: Engine) -> None:
    """Add `engine`, for as long as it is alive."""
    global _registry
    _release_after_fork()
    _registry = (*(reference for reference in _registry if reference() is not None), weakref.ref(engine))


@cache
def _release_after_fork() -> None:
    """Make forked children (DataLoader workers) release the rank's engines."""

    def leave() -> None:
        global _registry
        left, _registry = _engines(), ()
        for engine in left:
            engine.leave_to_parent()

    os.register_at_fork(after_in_child=leave)
