"""Functions that a rank calls last when an error ends it, to save what would be lost."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)

_functions: list[Callable[[BaseException], None]] = []
_process = 0
"""The process whose uncaught exceptions are noticed; 0 for none yet."""


def at_failure(function: Callable[[BaseException], None]) -> Callable[[], None]:
    """Have `function` called with the error that ends this process; returns what takes that back.

    The error has been reported before: what the others see of this rank's end comes after its cause.
    """
    _notice()
    _functions.append(function)

    def forget() -> None:
        if function in _functions:
            _functions.remove(function)

    return forget


def say_last_words(error: BaseException) -> None:
    """Call the functions, once each, the latest first; whatever they raise is logged, as `error` says more."""
    if os.getpid() != _process:  # a child that was forked has nothing of its own to save
        return
    while _functions:
        try:
            _functions.pop()(error)
        except Exception as problem:
            logger.error("what this rank had could not be saved: %s", problem)


def _notice() -> None:
    global _process
    if _process == os.getpid():
        return
    _process, shown = os.getpid(), sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            say_last_words(error)

    sys.excepthook = note
