"""Delays Ctrl-C in a single process until a step, a save or a restore is complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.core.processes import consensus


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
