"""The engine: runs operations among the ranks of one host, in the same order on every rank.

    post       write the header of operation k, ring every rank
    compute    once every rank has posted k and the headers agree: read the others' memory, write the result
    done       ring every rank; later if each rank computes its own result, because then it only frees memory
    finished   once every rank has done k, so that no rank reads this rank's memory for it any longer

Posting does not wait, so several operations can be under way. :meth:`Engine.progress` advances them without blocking.
:meth:`Engine.wait` first polls for rings, more often if polling succeeded recently. Then it sleeps on eventfds *and* on
the peers' pidfds, so that it immediately detects which peer has ended. A ring adds the numbers of operations posted and
done since the last ring to an eventfd. So ranks learn of progress through the kernel, which orders all writes before a
ring ahead of all reads after it. Plain memory is never polled.

A collective that consists of several operations posts the second one only after all ranks agree on the first
(:meth:`Engine.agree`). Otherwise, after a mismatch, some ranks would have posted one more operation than others.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.comm.doorbells import Signals
from paceline.comm.handshake import Peer
from paceline.comm.operation_header import END_OF_SLOTS, SLOTS, Header, Shown, mismatch, read_header, read_shown, write
from paceline.comm.shm_arena import HEADER_BYTES, Arena, Segment
from paceline.core.missing_ranks import named_ranks, ranks_by_value
from paceline.core.spans import waiting
from paceline.core.stacks import runs_users_code, users_line
from paceline.errors import CommunicationError, DesyncError

Compute = Callable[[list[Shown]], None]
"""Computes this rank's part of an operation from the memory that each rank shows, in rank order."""
_FEWEST_SPINS, _MOST_SPINS = 8, 256
_UNANNOUNCED = 16
"""Maximum number of done operations before the peers are notified."""
_NAP_S = 1.0
"""Longest single sleep. If this process is stopped, no more than this counts toward the timeout."""
_LEAST_NAP_S = 0.002
"""A shorter nap counts at most this much toward the timeout."""
_LONGEST_POLL_S = 0.02
"""Longest nap in a wait for reports, which do not ring."""
_REMEDY = "see the error of that rank, then restart from the last checkpoint"

Waits = dict[str, Sequence[Any]]
"""Rank and description of each wait. A key is a process and the number of its wait."""
_numbers = count()
_HEAD = struct.Struct("@II")  # checksum and length of a record of waits, which lies behind the slots
_RECORD_AT = END_OF_SLOTS + _HEAD.size
ELSEWHERE, NEVER = -1, 2**62
"""Operations in records: the rank waits in another group, or has found a deadlock and will not post any more. A number
below ``ELSEWHERE`` stands for a report."""


class Operation:
    """An operation under way on this rank. Only the engine changes it."""

    __slots__ = ("compute", "computed", "engine", "error", "finished", "header", "is_own", "number")

    def __init__(self, engine: Engine, number: int, header: Header, compute: Compute, *, is_own: bool) -> None:
        self.engine = engine
        self.number = number
        """Number of operations posted before this one in the group, the same on every rank."""
        self.header = header
        # Any thread may call it, and inference tensors can be written to only in inference mode.
        self.compute = torch.inference_mode()(compute) if torch.is_inference_mode_enabled() else compute
        """Called once, when all ranks have posted, and then dropped."""
        self.is_own = is_own
        """Whether no other rank writes to the result, which is complete once this rank has done its part."""
        self.computed = False
        """Whether this rank has done its part or has found that the headers differ."""
        self.finished = False
        """Whether every rank has done its part, so that none reads this rank's memory for it any longer."""
        self.error: Exception | None = None
        """Error of the operation if the headers differ. It is the same on every rank, and set before `computed`."""

    def __str__(self) -> str:
        return f"{self.header}, operation {self.number} of this group"

    def wait(self) -> None:
        """Wait until the result is complete on this rank; raise the errors of :meth:`Engine.wait`."""
        self.engine.wait(self)

    def progress(self) -> None:
        """Advance this and all earlier operations as far as possible without waiting."""
        self.engine.progress()

    def is_completed(self) -> bool:
        """Return whether the result is complete on this rank."""
        return self.computed if self.is_own else self.finished

    def end_part(self) -> None:
        """Note that this rank has done its part."""
        self.computed = True
        self.compute = _nothing  # dropped, because it may hold the caller's tensors


def _nothing(_: list[Shown]) -> None:
    """A no-op that replaces the function of a computed operation."""


def is_computed(operation: Operation) -> bool:
    """Return whether this rank has done its part of `operation`."""
    return operation.computed


def is_finished(operation: Operation) -> bool:
    """Return whether every rank has done its part of `operation`."""
    return operation.finished


class Engine:
    """Runs operations with the other ranks of the group, all on this host. Threads may share an engine in turn."""

    def __init__(
        self, arena: Arena, peers: Sequence[Peer], rank: int, timeout: timedelta, names: Sequence[int]
    ) -> None:
        self.arena, self.rank = arena, rank
        self.peers = list(peers)
        """The other ranks of this host; empty once the engine is closed."""
        self.timeout = timeout
        """Longest wait for a peer."""
        self.signals = Signals(peers)
        self.names, self._name = names, names[rank]
        """The global ranks, which error messages use."""
        self.memories: list[Segment] = [peer.memory for peer in peers]
        """The ranks' memories, in rank order."""
        self.memories.insert(rank, arena)
        self._posted = 0
        """Number of operations that this rank has posted, and the number of the next one."""
        self._done = 0
        """Number of operations whose local part is done; a rank works through operations in order."""
        self._ready = 0
        """Number of operations that all peers had posted at the last poll. They do not ring again for these."""
        self._under_way: deque[Operation] = deque()
        """Operations posted but not finished, in the order of their numbers; at most ``SLOTS - 1``."""
        self._broken = ""
        """Reason why the group can no longer be used; set once. After that no operation is computed."""
        self._blamed: list[int] = []
        """Global ranks that `_broken` names."""
        self._lock = threading.RLock()
        """Held while changing anything above."""
        self._poster: int | None = None
        """Thread that has posted the latest operation."""
        self.reports = 0
        """Number of reports that this rank has posted; see :mod:`.board`."""
        self.is_idle: Callable[[], bool] = lambda: True
        """Returns whether the group has no thread that is about to post an operation."""
        self._checks_at = 0.0
        """Seconds of the present wait after which it looks for a deadlock again."""
        self._wait: Waits = {}
        """The present wait, once this rank has slept through a nap; see :meth:`_check_deadlock`."""
        self.has_own_core = len(self.names) <= len(os.sched_getaffinity(0))
        """Whether the host has a core for each rank."""
        self._most_spins = _MOST_SPINS if self.has_own_core else 1
        """Maximum number of polls before a wait sleeps; 1 if ranks share cores, so that a peer gets this core."""
        self._spins = self._most_spins
        """Number of polls before the next wait sleeps; doubled if the last wait did not sleep, halved otherwise."""
        self._close_descriptors = weakref.finalize(self, self.signals.close)
        self._close_descriptors.atexit = False
        _register(self)

    # -- posting and progress -----------------------------------------------------------------------------------

    def post(self, header: Header, shown: Shown, compute: Compute, *, is_own: bool = False) -> Operation:
        """Begin an operation. Waits for other ranks only if too many operations are in progress.

        Args:
            header: description of the operation, equal on every rank.
            shown: the memory that this rank shows the others.
            compute: computes this rank's part from the memory of all ranks.
            is_own: whether no other rank writes to this rank's result.
        """
        with self._lock:
            self.check_usable()
            while len(self._under_way) >= SLOTS - 1:
                self._wait_until(self._under_way[0], is_finished)
            operation = Operation(self, self._posted, header, compute, is_own=is_own)
            write(self.arena, operation.number, header, shown)  # peers read it after the ring
            self._poster = threading.get_ident()
            with _BreaksOnError(self):
                self._posted += 1
                self._under_way.append(operation)
                self.signals.announce(posted=1)
                self.signals.ring()
                if self._ready > operation.number:
                    self._advance()
            return operation

    def post_at_once(self, post: Callable[[], Operation]) -> Operation | None:
        """Call `post`, which posts an operation; return None if that would require waiting for a thread or rank."""
        if self._lock.acquire(blocking=False):
            try:
                if len(self._under_way) < SLOTS - 1:
                    return post()
            finally:
                self._lock.release()
        return None

    def progress(self) -> None:
        """Advance operations as far as possible without waiting."""
        # If another thread holds the lock, it is already advancing them.
        if self._under_way and self._lock.acquire(blocking=False):
            try:
                with _BreaksOnError(self):
                    self._look()
            finally:
                self._lock.release()

    def wait(self, operation: Operation) -> None:
        """Wait until `operation` has its result on this rank; raise its error, or one about a missing rank."""
        if not operation.is_completed():
            with self._lock:
                self._wait_until(operation, is_computed if operation.is_own else is_finished)
        if operation.error is not None:
            raise operation.error

    def agree(self, operation: Operation) -> None:
        """Wait until every rank has posted `operation`, with the same header. Raises the errors of :meth:`wait`."""
        if not operation.computed:
            with self._lock:
                self._wait_until(operation, is_computed)
        if operation.error is not None:
            self.wait(operation)

    def shown(self, operand: Tensor) -> Shown:
        """Describe an operand that lies in this rank's shared memory."""
        count = operand.numel()
        return Shown(count, operand.data_ptr() - self.arena.address if count else 0)

    def operands(self, shown: Sequence[Shown], dtype: torch.dtype, part: slice | None = None) -> list[Tensor]:
        """Return the tensors that the ranks show, or a `part` of each, without copying them."""
        pairs = zip(self.memories, shown, strict=True)
        if part is None:
            return [memory.operand(view.offset, view.length, dtype) for memory, view in pairs]
        start, count = part.start * dtype.itemsize, part.stop - part.start
        return [memory.operand(view.offset + start, count, dtype) for memory, view in pairs]

    def _wait_until(self, operation: Operation, is_over: Callable[[Operation], bool]) -> None:
        remaining = self.timeout.total_seconds()
        with _BreaksOnError(self):
            self._look()
            if is_over(operation) or self._spin(operation, is_over):
                return
            self._wait = {}
            with waiting():
                while not is_over(operation):
                    self.check_usable()
                    reached = self._reached(is_over)
                    missing = [peer for peer in self.peers if reached[peer.rank] <= operation.number]
                    remaining = self._block(str(operation), operation.number, missing, remaining, _NAP_S)
                    self._advance()

    def _reached(self, is_over: Callable[[Operation], bool]) -> dict[int, int]:
        self.signals.ring()  # announce everything that peers may be waiting for
        counts = self.signals.progress.items()
        return {rank: peer.posted if is_over is is_computed else peer.done for rank, peer in counts}

    def await_reports(self, find_missing: Callable[[], list[Peer]], nap: float) -> None:
        """Sleep, at first `nap` seconds at a time, until no peer is missing. A report does not ring.

        Raises the errors of :meth:`wait`.
        """
        remaining, report = self.timeout.total_seconds(), f"the report of a step, report {self.reports} of this group"
        with self._lock, _BreaksOnError(self), waiting():
            self._wait = {}
            while missing := find_missing():
                self.check_usable()
                self.signals.ring()
                longer = min((self.timeout.total_seconds() - remaining) / 50, _LONGEST_POLL_S)
                remaining = self._block(report, ELSEWHERE - self.reports, missing, remaining, max(nap, longer))
                self._advance()

    def _spin(self, operation: Operation, is_over: Callable[[Operation], bool]) -> bool:
        """Poll for rings without sleeping; return whether `operation` is over."""
        spins = self._spins
        for _ in range(spins):
            if self._look() and is_over(operation):
                self._spins = min(2 * spins, self._most_spins)
                return True
        self._spins = max(spins // 2, min(_FEWEST_SPINS, self._most_spins))
        return False

    def _look(self) -> bool:
        """Advance operations if a peer has rung, or always without peers; return whether operations were advanced."""
        if self.signals.listen() or not self.peers:
            self._advance()
            return True
        return False

    def _advance(self) -> None:
        """In order, compute operations posted by every rank and finish operations done by every rank."""
        self._ready = ready = self.signals.posted(self._posted)
        is_waited_for = False
        for operation in self._under_way:
            if operation.number >= ready:
                break
            if not operation.computed:
                self._compute(operation)
                is_waited_for |= not operation.is_own
        # One ring for all computed operations, because each ring is a system call per peer. Peers learn that they may
        # reuse memory only with the next ring, unless they are about to run out of it.
        if is_waited_for or self.signals.unannounced_done >= _UNANNOUNCED:
            self.signals.ring()
        finished = self.signals.done(self._done)
        while self._under_way and self._under_way[0].computed and self._under_way[0].number < finished:
            self._under_way.popleft().finished = True

    def _compute(self, operation: Operation) -> None:
        if self._broken:
            return
        shown = read_shown(self.memories, operation.number)
        if shown is None:
            headers = [read_header(memory, operation.number) for memory in self.memories]
            operation.error = mismatch(operation.number, headers, self.names, self._name)
        else:
            try:
                operation.compute(shown)
            except BaseException as error:
                # Not announced as done, because the other ranks would use a half-written result.
                self._broken = f"rank {self._name} could not compute {operation.header} ({error})"
                raise
        operation.end_part()
        self._done = operation.number + 1
        self.signals.announce(done=1)

    # -- waiting ------------------------------------------------------------------------------------------------

    def _block(self, awaited: str, place: int, missing: Sequence[Peer], remaining: float, nap: float) -> float:
        """Sleep for at most `nap` seconds until a peer rings or ends; return the `remaining` seconds of the timeout.

        `awaited` describes what the `missing` peers have not done, and `place` stands for it in records of waits.
        """
        has_ended = any(peer.rank in self.signals.ended for peer in missing)
        waited = self.timeout.total_seconds() - remaining
        if self._wait and (has_ended or waited >= self._checks_at):  # a deadlock may be why a rank has ended
            self._checks_at = waited + _NAP_S
            self._check_deadlock(place, missing)
        for peer in missing:
            if peer.rank in self.signals.ended:
                self._fail(f"rank {peer.name} (pid {peer.pid}) has ended", awaited, [peer])
        nap, began = min(remaining, nap), time.monotonic()
        # A peer may be waiting for this rank in another group while this rank waits for it here.
        others = [engine for engine in _engines() if engine is not self and engine._under_way]
        woken = self.signals.sleep(nap, [engine.signals for engine in others])
        remaining -= min(time.monotonic() - began, max(nap, _LEAST_NAP_S))
        self.signals.listen()
        for engine in others:
            with suppress(Exception):  # that engine's own wait raises the error
                engine.progress()
        if not woken and not self._wait and waited + nap >= _NAP_S:
            self._wait = new_wait(self._name, f"{awaited.partition(', ')[0]} of {named_ranks(self.names)}")
            self._checks_at = 0.0
        if not woken and remaining <= 0:
            counts = self.signals.progress
            idle = [peer for peer in missing if counts[peer.rank].posted <= place] or missing
            begun = [f"has begun {counts[peer.rank].posted} operations of this group" for peer in idle]
            who = [f"rank {peer.name} (pid {peer.pid}, which {text})" for peer, text in zip(idle, begun, strict=True)]
            self._fail(f"{', '.join(who)} did not take part within {self.timeout.total_seconds():g} s", awaited, idle)
        return remaining

    def _check_deadlock(self, place: int, missing: Sequence[Peer]) -> None:
        """Record the present wait for other ranks; raise if it waits for itself, or for a rank that raises this.

        A rank that has slept for a while in a wait records in its memory of every group which operation it waits for,
        and the waits of all ranks that wait for it, directly or through others. Each rank decides from its own count of
        posted operations whether a recorded wait is for it, so a record that is out of date (the wait is over, or the
        process is stopped or has no core) does no harm. A rank posts nothing while it waits, so what it has recorded
        remains true as long as its wait lasts. A rank whose own wait is in the records of the ranks that wait for it
        will never be released (Chandy, Misra and Haas, "Distributed deadlock detection", 1983).

        A rank that computes, or that waits outside shared memory, records nothing. Neither does a rank with another
        thread that runs the user's code or has posted, because it may be about to post the operation that the others
        wait for.
        """
        engines, event = _engines(), "ranks wait for each other in different operations"
        me, frames = threading.get_ident(), sys._current_frames().items()
        # A runner's thread that is in this function does nothing at present; is_idle() tells whether it is about to.
        threads = {thread: at for thread, at in frames if thread != me and at.f_code.co_name != "_serve"}
        may_post = any(engine._poster in threads or not engine.is_idle() for engine in engines)
        if may_post or any(map(runs_users_code, threads.values())):
            return
        waits: Waits = {}
        for engine in engines:
            for at, peers_waits in (read_waits(peer.memory) for peer in engine.peers):
                is_for_us = at >= engine._posted or ELSEWHERE - at > engine.reports
                waits |= peers_waits if is_for_us else {}
        is_deadlock = self._wait.keys() <= waits.keys() or any(read_waits(peer.memory)[0] == NEVER for peer in missing)
        waits |= self._wait
        for engine in engines:
            at = NEVER if is_deadlock else place if engine is self else ELSEWHERE
            record_waits(engine.arena, at, waits)
            if is_deadlock:
                engine._broken = engine._broken or f"{event} ({describe_waits(waits)})"
        if is_deadlock:
            remedy = "call the same collectives in the same order on every rank"
            raise DesyncError(f"rank {self._name}: {self._broken}; {remedy}")

    # -- failure and the end ------------------------------------------------------------------------------------

    def _fail(self, event: str, awaited: str, blamed: Sequence[Peer] = ()) -> NoReturn:
        self._broken = f"{event} in {awaited}"
        self._blamed = [peer.name for peer in blamed]
        raise CommunicationError(f"rank {self._name}: {self._broken}; {_REMEDY}").because_of(self._blamed)

    def check_usable(self) -> None:
        """Raise an error if the group cannot be used any longer."""
        if self._broken:
            raise CommunicationError(
                f"rank {self._name}: this process group cannot be used any longer, because {self._broken}; {_REMEDY}"
            ).because_of(self._blamed)

    def close(self) -> None:
        """Release descriptors and memory. Waiting threads get an error."""
        if not self._close_descriptors.alive:
            return
        self._broken = self._broken or "it was destroyed"
        self.signals.interrupt()  # before taking the lock, because a sleeping thread holds it
        with self._lock:
            self._drop()

    def leave_to_parent(self) -> None:
        """In a forked child, release everything that belongs to the rank."""
        self._lock = threading.RLock()  # at the fork, a thread of the rank may have held the old lock
        self._broken = "this process was forked from a rank, and only the rank belongs to the group"
        self.arena.leave_to_parent()
        self._drop()

    def _drop(self) -> None:
        self._close_descriptors()
        self.arena.close()
        self.peers = []
        self._under_way.clear()


class _BreaksOnError:
    """Marks the group as broken if the block is interrupted, because other ranks wait for this one."""

    # A class, because each operation enters three of these, and a generator would take three times as long.

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        engine = self._engine
        if error is not None and not isinstance(error, CommunicationError):  # including KeyboardInterrupt
            engine._broken = engine._broken or f"rank {engine._name} was interrupted by {type(error).__name__}"


def new_wait(rank: int, operation: str) -> Waits:
    """Return a wait of this rank, at the user's line that led here."""
    return {f"{os.getpid()}/{next(_numbers)}": (rank, operation + users_line(sys._getframe()))}


def describe_waits(waits: Waits) -> str:
    """Return the ranks of `waits` and what they wait for."""
    ranks = ranks_by_value(sorted({(rank, place) for rank, place in waits.values()}))
    return "; ".join(f"{named_ranks(numbers)}: {place}" for place, numbers in ranks.items())


def record_waits(segment: Segment, operation: int, waits: Waits) -> None:
    """Record in this rank's memory, if there is room, that it waits for `operation`, and all `waits`."""
    text = json.dumps((operation, waits)).encode()
    if len(text) <= HEADER_BYTES - _RECORD_AT:
        segment.memory[END_OF_SLOTS : _RECORD_AT + len(text)] = _HEAD.pack(zlib.crc32(text), len(text)) + text


def read_waits(segment: Segment) -> tuple[int, Waits]:
    """Return a rank's record; an empty one if it is just being written."""
    checksum, length = _HEAD.unpack_from(segment.memory, END_OF_SLOTS)
    text = segment.memory[_RECORD_AT : _RECORD_AT + length]
    return json.loads(text) if length and zlib.crc32(text) == checksum else (ELSEWHERE, {})


_registry: tuple[weakref.ref[Engine], ...] = ()
"""Replaced as a whole, because threads read it while others create groups."""


def _engines() -> list[Engine]:
    """Return all engines of this process. A wait in one also advances the others."""
    return [engine for reference in _registry if (engine := reference()) is not None]


def _register(engine: Engine) -> None:
    """Add `engine` for as long as it exists."""
    global _registry
    _release_after_fork()
    _registry = (*(reference for reference in _registry if reference() is not None), weakref.ref(engine))


@cache
def _release_after_fork() -> None:
    """Make forked children, such as DataLoader workers, release the rank's engines."""

    def leave() -> None:
        global _registry
        engines, _registry = _engines(), ()
        for engine in engines:
            engine.leave_to_parent()

    os.register_at_fork(after_in_child=leave)
