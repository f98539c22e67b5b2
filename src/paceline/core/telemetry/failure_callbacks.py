"""The last acts of a rank that an error ends: it saves its state, and reports the error."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType

from paceline.errors import UsageError

logger = logging.getLogger(__name__)

_functions: list[Callable[[BaseException], None]] = []
_process = 0
"""The process whose uncaught exceptions are noticed; 0 for none yet."""


def at_failure(function: Callable[[BaseException], None]) -> Callable[[], None]:
    """Call `function` with the error that ends this process; returns a function that cancels this.

    The error is reported first, so that other ranks see this rank's end after its cause.
    """
    _notice()
    _functions.append(function)

    def forget() -> None:
        if function in _functions:
            _functions.remove(function)

    return forget


def say_last_words(error: BaseException) -> None:
    """Call the functions, once each, the latest first; their own errors are logged, because `error` says more."""
    if os.getpid() != _process:  # a child that was forked has nothing of its own to save
        return
    # Popped one by one, so that a function which fails is not called again by the next one.
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
        try:
            shown(kind, error, trace)
        finally:
            if not issubclass(kind, KeyboardInterrupt):
                say_last_words(error)

    sys.excepthook = note


def show_mistakes_in_one_line() -> None:
    """Show a user's mistake that ends this process in one line, with exit code 2, as our launcher does.

    A hook of the launcher, of IPython or of the user stays as it is.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error that ends the program, as ``sys.excepthook``: a mistake of the script in one line."""
    is_asked_for_more = hasattr(sys, "ps1") or sys.flags.inspect  # Python does not end here, but takes more lines
    if is_asked_for_more or not isinstance(error, UsageError) or not _is_own(error):
        sys.__excepthook__(kind, error, trace)
        return
    # Not on sys.stderr: torch's hook around this one collects its text, and shows that only if this function returns.
    print(f"error: {error.with_line()}", file=sys.__stderr__)
    raise SystemExit(2)


def _is_own(error: BaseException) -> bool:
    """Return whether `error` is no consequence of another rank's failure."""
    chain = [error]
    while (origin := chain[-1].__cause__ or chain[-1].__context__) is not None and origin not in chain:
        chain.append(origin)
    return all(getattr(each, "blamed", None) is None for each in chain)
