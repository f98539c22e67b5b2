"""Callbacks and messages of a rank that ends with an error."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from types import TracebackType

from paceline.core.stacks import place_in
from paceline.errors import UsageError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's environment variable with the file for the error of a rank."""
BEHIND_S = 10
"""Seconds added to the timestamp of a consequence, so that torchrun reports the cause instead."""
logger = logging.getLogger(__name__)
_functions: list[Callable[[BaseException], None]] = []


def at_failure(function: Callable[[BaseException], None]) -> Callable[[], None]:
    """Call `function` with the error that ends this process; return a function that cancels this.

    The error is reported first, so that other ranks see the cause before this rank ends.
    """
    _install_hook()
    _functions.append(function)

    def forget() -> None:
        if function in _functions:
            _functions.remove(function)

    return forget


def _call_functions(error: BaseException) -> None:
    """Call each function once, latest first. Their own errors are only logged, because `error` is more important."""
    # Popped one by one, so that a function that fails is not called again.
    while _functions:
        try:
            _functions.pop()(error)
        except Exception as problem:
            logger.error("this rank's state could not be saved: %s", problem)


@cache
def _install_hook() -> None:
    os.register_at_fork(after_in_child=_functions.clear)  # a forked child has no state to save
    shown = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            shown(kind, error, trace)
        finally:
            if not issubclass(kind, KeyboardInterrupt):
                _call_functions(error)

    sys.excepthook = note


def show_mistakes_in_one_line() -> None:
    """Print an error that ends this process as one line if it needs no traceback, as our launcher does.

    This applies to a user's mistakes, with exit code 2, and to consequences of another rank's failure. A
    ``sys.excepthook`` of the launcher, IPython or the user is kept.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends the program; a ``sys.excepthook`` that uses one line for mistakes and consequences."""
    # The error that reports another rank's failure, if `error` is one or was caused by one.
    lost = next((cause for cause in with_causes(error) if getattr(cause, "blamed", None) is not None), None)
    if hasattr(sys, "ps1") or sys.flags.inspect:  # Python continues interactively
        sys.__excepthook__(kind, error, trace)
    elif lost is not None:
        text = f"{type(lost).__name__}: {lost}{place_in(trace)}"
        _report_to_torchrun(text, BEHIND_S)
        print(f"error: {text}", file=sys.stderr)
    elif isinstance(error, UsageError):
        _report_to_torchrun(f"UsageError: {error}")
        # Not sys.stderr: torch's hook around this hook captures it, and prints the text only if this function returns.
        print(f"error: {error}{place_in(trace)}", file=sys.__stderr__)
        raise SystemExit(2)
    else:
        sys.__excepthook__(kind, error, trace)
        # Gloo and NCCL report a lost rank with a RuntimeError.
        behind = BEHIND_S // 2 if isinstance(error, RuntimeError) else 0
        text = "".join(traceback.format_exception_only(kind, error)).rstrip()  # the traceback is on stderr
        _report_to_torchrun(f"{text}{place_in(trace)}", behind)


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and the chain of its causes and contexts."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _report_to_torchrun(text: str, behind: int = 0) -> None:
    """Make torchrun report `text` for this rank, and not as the root cause if another rank failed in these seconds.

    torchrun reports the earliest failure as the cause. A killed rank gets the time when torchrun noticed its death, in
    whole seconds.
    """
    path = os.environ.get(ERROR_FILE)
    if path and "PACELINE_LAUNCHER" not in os.environ:
        more = {"py_callstack": text, "timestamp": str(int(time.time()) + behind)}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": more}}, file)
