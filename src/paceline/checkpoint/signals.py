"""Signals that ask the training to stop, and Ctrl-C in a single process.

On a signal, all ranks agree on a last step, save it and exit. They exchange their requests at the barrier before every
optimizer step. Without a barrier, they exchange them with a small collective about once a second.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, reduce
from multiprocessing import Pipe
from multiprocessing.connection import wait
from operator import or_
from types import FrameType
from typing import Any, NoReturn

from paceline.checkpoint.step_boundary import Boundary
from paceline.core import consensus
from paceline.core.host import handles
from paceline.core.missing_ranks import named_ranks
from paceline.core.step_progress import ECHO_S, STOP_SIGNALS, StepRecord, Stopping
from paceline.errors import CommunicationError, Preempted

ASK_S = 1.0
"""Approximate time between two exchanges without a barrier."""


class StopRequests:
    """Receives stop requests on this rank, and makes all ranks agree on them.

    Args:
        boundary: the step boundary, which exchanges the requests.
        record: this rank's record for the launcher; None without a launcher.
        saves: whether checkpoints outlive the job.
    """

    def __init__(self, boundary: Boundary, record: StepRecord | None, saves: bool) -> None:
        self._boundary, self._record, self._saves = boundary, record, saves
        self._process = os.getpid()
        self._is_watching = self._is_closed = False
        self._installed: list[signal.Signals] = []
        """Signals that this object handles."""
        self._noted = 0.0
        """Time of the latest request."""
        self._asked: tuple[int, float] = (0, 0.0)
        """Step and time of the last exchange without a barrier."""
        self._ask = 0
        """Step of the next exchange without a barrier."""
        self._pipes: dict[Any, signal.Signals] = {}
        """Signals that are handled outside the main thread, by the read end of a pipe."""

    def watch(self) -> None:
        """Handle signals from now on, unless the script handles them.

        Called at the end of the first step, so that signals still end a script that never calls ``step()``.
        """
        if self._is_watching:
            return
        self._is_watching = True
        if not self._saves:
            self._publish(Stopping.IN_VAIN)
        else:
            self._installed = list(filter(_is_unhandled, STOP_SIGNALS))
            is_main = threading.current_thread() is threading.main_thread()
            for number in self._installed:
                signal.signal(number, self.note) if is_main else self._handle_in_thread(number)
            if signal.SIGTERM in self._installed:  # the launcher sends SIGTERM to ranks that are READY
                self._publish(Stopping.READY)

    def agreed(self) -> signal.Signals | None:
        """Return the signal that ends all ranks after this step, or None. Can be a collective if no barrier exists."""
        if not self._saves:
            return None
        for reader in wait(list(self._pipes), 0) if self._pipes else ():
            number = self._pipes.pop(reader)
            faulthandler.unregister(number)  # a second signal ends the process
            self.note(number, None)
        requests = self._boundary.all_requests if self._boundary.barrier is not None else self._exchanged()
        return next((number for bit, number in enumerate(STOP_SIGNALS) if requests & 1 << bit), None)

    def end(self, number: signal.Signals) -> NoReturn:
        """Report to the launcher that all ranks have saved the last step because of signal `number`, and exit."""
        self._publish(Stopping.SAVED, number)
        # In a thread, SystemExit is ignored, but the traceback of a subclass would be printed.
        show = threading.excepthook
        threading.excepthook = lambda args: None if args.exc_type is Preempted else show(args)
        raise Preempted(128 + number)

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        for number in self._installed:
            # Only in the main thread, and only if the script has not replaced the handler.
            if signal.getsignal(number) == self.note and threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._installed, self._is_closed = [], True
        for number in self._pipes.values():
            faulthandler.unregister(number)
        self._pipes.clear()
        self._publish(Stopping.NOT)

    def _handle_in_thread(self, number: signal.Signals) -> None:
        """Handle a signal although this is not the main thread, in which alone Python's handlers can be installed.

        faulthandler's handler can be installed in every thread. It writes to a pipe, which :meth:`agreed` reads.
        """
        reader, writer = Pipe(duplex=False)
        os.set_blocking(writer.fileno(), False)
        _reset_in_children()
        _in_pipes.add(number)
        faulthandler.register(number, writer, all_threads=False)  # keeps a reference to the writer
        self._pipes[reader] = number

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle signal `number`: record the first request, and end the process on the second."""
        now, bit = time.monotonic(), 1 << STOP_SIGNALS.index(signal.Signals(number))
        is_second = bool(self._boundary.requests) and now - self._noted > ECHO_S
        # In a forked child, and after a close() outside the main thread, the signal has its default effect.
        if os.getpid() != self._process or is_second or self._is_closed:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        barrier = self._boundary.barrier
        # The launcher also signals ranks that are waiting for a lost rank.
        if barrier is not None and (gone := barrier.lost_ranks()):
            raise CommunicationError(
                f"rank {barrier.rank}: {named_ranks(gone)} ended; look for the error of that rank"
            ).because_of(gone)
        # Only the first request sets the time, so that echoes do not postpone the second request.
        if not self._boundary.requests:
            self._noted = now
        self._boundary.requests |= bit
        self._publish(Stopping.ASKED)

    def _exchanged(self) -> int:
        """Return the requests of all ranks if it is time to exchange them, otherwise 0."""
        world, step = consensus.here(), self._boundary.step
        if world.size == 1:
            return self._boundary.requests
        # Between outer steps, a collective of all ranks would make islands wait for each other.
        if step < self._ask or self._boundary.joins or self._boundary.is_apart:
            return 0
        now, (asked_step, at) = time.monotonic(), self._asked
        # Number of steps until the next exchange; all ranks use rank 0's number.
        steps = int((step - asked_step) * ASK_S / max(now - at, 1e-9)) if at else 1
        answers = consensus.gather(world, [self._boundary.requests, max(1, min(steps, 2 * (step - asked_step)))])
        self._asked, self._ask = (step, now), step + int(answers[0][1])
        return reduce(or_, (int(requests) for requests, _ in answers))

    def _publish(self, state: Stopping, number: int = 0) -> None:
        if self._record is not None and self._record.stopping is not Stopping.SAVED:  # SAVED is final
            self._record.stop(state, number, self._boundary.step)


_in_pipes: set[signal.Signals] = set()
"""Signals that faulthandler has handled for a Checkpointer."""


@cache  # because callbacks cannot be removed
def _reset_in_children() -> None:
    """Give these signals their default action in forked children, which must not write to this process's pipes."""
    masks = threading.local()

    def block() -> None:
        masks.earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _in_pipes)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.earlier)

    def reset() -> None:
        for number in _in_pipes:
            faulthandler.unregister(number)
        unblock()

    os.register_at_fork(before=block, after_in_child=reset, after_in_parent=unblock)


def _is_unhandled(number: signal.Signals) -> bool:
    """Return whether a signal would end the process.

    In a single process without a launcher, Ctrl-C still raises ``KeyboardInterrupt``.
    """
    handler = signal.getsignal(number)
    if number == signal.SIGINT:
        return handler is signal.default_int_handler and not consensus.is_alone()
    # getsignal() does not see handlers in C, such as faulthandler's.
    return handler == signal.SIG_DFL and not handles(os.getpid(), number)


class Interrupts:
    """Context manager that delays Ctrl-C until :meth:`check` or the end of the block.

    A second Ctrl-C raises immediately. The context manager has no effect if it is nested or if other code handles
    SIGINT. It also has no effect in a thread, or in the ranks of a job, which the launcher ends together.
    """

    def __init__(self) -> None:
        self._pending = False  # whether Ctrl-C was pressed
        self._installed = False  # whether this object handles SIGINT

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if Ctrl-C was pressed. Call this only at points that allow a resume."""
        if self._pending:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            signal.default_int_handler(number, frame)
        self._pending = True

    def __enter__(self) -> Interrupts:
        in_main_thread = threading.current_thread() is threading.main_thread()
        is_unhandled = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_unhandled and consensus.is_alone():
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False
        if self._pending and not isinstance(error, KeyboardInterrupt):
            # Ctrl-C may also have caused this error, because the terminal interrupts the DataLoader's workers as well.
            raise KeyboardInterrupt from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block or the decorated function has ended; see :class:`Interrupts`."""
    with Interrupts():
        yield
