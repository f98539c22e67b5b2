"""Delays Ctrl-C in a lone process until nothing is half done: a step, a save, a restore."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.core.processes import consensus


class Interrupts:
    """A context manager that delays a Ctrl-C until :meth:`check` or its end; a second Ctrl-C raises at once.

    It does nothing inside another one, where other code handles SIGINT, in threads, and in the ranks of a job, because
    each rank would end after a different step, and their launcher ends them all anyway.
    """

    def __init__(self) -> None:
        self._pending = False  # a Ctrl-C came during the block
        self._installed = False  # SIGINT is ours

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if a Ctrl-C has come. Call it where the work can be continued."""
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
            # The Ctrl-C may also have caused an error: a terminal sends it to the DataLoader's workers as well.
            raise KeyboardInterrupt from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a Ctrl-C until the block, or the function that this decorates, has ended; see :class:`Interrupts`."""
    with Interrupts():
        yield
