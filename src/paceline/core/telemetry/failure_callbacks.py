"""The last acts of a rank that an error ends: it saves its state, and reports the error."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType

from paceline.core.telemetry.users_code import place_in
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
    """Show in one line what needs no traceback, if it ends this process, as our launcher does.

    A user's mistake has exit code 2. The consequence of another rank's failure is shown where that rank has its error.
    A hook of the launcher, of IPython or of the user stays as it is.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error that ends the program, as ``sys.excepthook``: mistakes and consequences in one line."""
    lost = _lost_rank(error)
    if hasattr(sys, "ps1") or sys.flags.inspect:  # Python does not end here, but takes more lines
        sys.__excepthook__(kind, error, trace)
    elif lost is not None:
        text = f"{type(lost).__name__}: {lost}{place_in(trace)}"
        _tell_torchrun(text)
        print(f"error: {text}", file=sys.stderr)
    elif isinstance(error, UsageError):
        # Not on sys.stderr: torch's hook around this one collects its text, and shows that only if this function
        # returns.
        print(f"error: {error}{place_in(trace)}", file=sys.__stderr__)
        raise SystemExit(2)
    else:
        sys.__excepthook__(kind, error, trace)


def _lost_rank(error: BaseException) -> BaseException | None:
    """Return the error that says that another rank has failed, if `error` is or comes from one."""
    return next((each for each in with_causes(error) if getattr(each, "blamed", None) is not None), None)


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, and the chain of its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
BEHIND_S = 10
"""Seconds by which a consequence is dated behind its cause, for torchrun."""


def _tell_torchrun(text: str) -> None:
    """Have torchrun report `text` of this rank, and not as the root cause.

    It takes the earliest failure for that, and dates a rank that was killed by when it notices, in whole seconds.
    """
    path = os.environ.get(ERROR_FILE)
    if path:
        more = {"py_callstack": text, "timestamp": str(int(time.time()) + BEHIND_S)}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": more}}, file)
