"""Delays Ctrl-C during training until the end of a step, so that ``fit()`` can continue exactly there."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from paceline import rank_consensus


class Interrupts:
    """A context manager that delays a Ctrl-C until :meth:`step_ended`, or its end; a second Ctrl-C raises at once.

    It does nothing where other code handles SIGINT, in threads, and unless `on`, by default in a process without other
    ranks: each of several would end after another step, and their launcher ends them all anyway.
    """

    def __init__(self, *, on: bool | None = None) -> None:
        self._on = rank_consensus.is_alone() if on is None else on
        self._pending = False  # a Ctrl-C came and was not raised yet
        self._installed = False  # SIGINT is ours

    def step_ended(self) -> None:
        """Raise ``KeyboardInterrupt`` if a Ctrl-C came during the step."""
        if self._pending:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            signal.default_int_handler(number, frame)
        self._pending = True

    def __enter__(self) -> Interrupts:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._on and in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False
        if self._pending and not isinstance(error, KeyboardInterrupt):
            # An error, too, may be the Ctrl-C's: a terminal sends it to the DataLoader's workers as well.
            raise KeyboardInterrupt from error
