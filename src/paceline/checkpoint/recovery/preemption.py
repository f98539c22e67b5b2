"""Signals that ask a training to end, held until all ranks have agreed on the step after which they end.

At the barrier before every optimizer step each rank shares its requests with the others, so all end after the same
step. Without a barrier the ranks exchange them with a small collective, about once a second.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import NoReturn

from paceline.checkpoint.steps.step_boundary import Boundary
from paceline.core.processes import consensus
from paceline.core.processes.missing_ranks import named_ranks
from paceline.core.telemetry.flight_record import handles
from paceline.core.telemetry.step_progress import ECHO_S, STOP_SIGNALS, StepRecord, Stopping
from paceline.errors import CommunicationError, Preempted

ASK_S = 1.0
"""Approximate time between two exchanges of ranks without a barrier."""


class StopRequests:
    """The requests that reach this rank, and the agreement of all ranks on them.

    Args:
        boundary: the step boundary, which passes on this rank's wish.
        record: this rank's record for the launcher; None without a launcher.
        saves: whether there is a folder on disk, which outlives the job.
    """

    def __init__(self, boundary: Boundary, record: StepRecord | None, saves: bool) -> None:
        self._boundary, self._record, self._saves = boundary, record, saves
        self._process = os.getpid()
        self._is_watching = False
        """Whether :meth:`watch` was called."""
        self._installed: list[signal.Signals] = []
        """Signals whose handler is this object's."""
        self._noted = 0.0
        """When the latest request came."""
        self._asked: tuple[int, float] = (0, 0.0)
        """The step after which ranks without a barrier last asked each other, and when; rank 0's time."""
        self._ask = 0
        """The step after which they ask next."""

    def watch(self) -> None:
        """Note signals from now on, unless the script handles them; do nothing outside the main thread.

        Called only when the first step ends, because a script that never calls ``step`` expects a signal to end it.
        """
        if self._is_watching:
            return
        self._is_watching = True
        if not self._saves:
            self._publish(Stopping.IN_VAIN)
        elif threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if _is_unhandled(number):
                    signal.signal(number, self.note)
                    self._installed.append(number)
            if signal.SIGTERM in self._installed:  # the launcher sends this one to ranks that are READY
                self._publish(Stopping.READY)

    def agreed(self) -> signal.Signals | None:
        """Return the signal for which all ranks end after the step that has just ended; None if they go on.

        Without a barrier it is sometimes a collective.
        """
        if not self._saves:
            return None
        wishes = self._boundary.wishes if self._boundary.barrier is not None else self._wishes()
        return next((number for bit, number in enumerate(STOP_SIGNALS) if wishes & 1 << bit), None)

    def end(self, number: signal.Signals) -> NoReturn:
        """Tell the launcher that all ranks end because of `number`, and have saved the last step; and end."""
        self._publish(Stopping.SAVED, number)
        raise Preempted(128 + number)

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        for number in self._installed:
            # A script may have set a handler of its own since, which stays; and Python sets handlers in the main
            # thread alone.
            if signal.getsignal(number) == self.note and threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._installed = []
        self._publish(Stopping.NOT)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle signal `number`: note the request, and end at once if it is the second one."""
        now, bit = time.monotonic(), 1 << STOP_SIGNALS.index(signal.Signals(number))
        is_second = bool(self._boundary.wish & bit) and now - self._noted > ECHO_S
        if os.getpid() != self._process or is_second:  # a forked child has no step to end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        barrier = self._boundary.barrier
        if barrier is not None and (
            gone := barrier.lost_ranks()
        ):  # the launcher signals a rank that will not meet the others soon
            raise CommunicationError(
                f"rank {barrier.rank}: {named_ranks(gone)} ended; look for that rank's own error"
            ).because_of(gone)
        # Of the first request only: an echo, which a launcher or a shell sends to all, must not postpone the moment
        # from which another one counts as the second.
        if not self._boundary.wish & bit:
            self._noted = now
        self._boundary.wish |= bit
        self._publish(Stopping.ASKED)

    def _wishes(self) -> int:
        """Return the wishes of all ranks if it is time to exchange them, otherwise 0."""
        world, step = consensus.here(), self._boundary.step
        if world.size == 1:
            return self._boundary.wish
        if step < self._ask or self._boundary.joins:
            return 0
        now, (asked, at) = time.monotonic(), self._asked
        # From rank 0's answer all know when they ask next; at first there is nothing to tell that by.
        steps = int((step - asked) * ASK_S / max(now - at, 1e-9)) if at else 1
        told = consensus.gather(world, [self._boundary.wish, max(1, min(steps, 2 * (step - asked)))])
        self._asked, self._ask = (step, now), step + int(told[0][1])
        wishes = 0
        for wish, _ in told:
            wishes |= int(wish)
        return wishes

    def _publish(self, state: Stopping, number: int = 0) -> None:
        if self._record is not None and self._record.stopping is not Stopping.SAVED:  # SAVED is final
            self._record.stop(state, number, self._boundary.step)


def _is_unhandled(number: signal.Signals) -> bool:
    """Return whether a signal has its default action, which ends the process and can be replaced by a save.

    Without a launcher or other ranks Ctrl-C stays Python's ``KeyboardInterrupt``, for notebooks and prompts.
    """
    handler = signal.getsignal(number)
    if number == signal.SIGINT:
        return handler is signal.default_int_handler and not consensus.is_alone()
    # Python does not know of handlers in C, such as faulthandler's.
    return handler == signal.SIG_DFL and not handles(os.getpid(), number)
