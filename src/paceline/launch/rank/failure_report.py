"""Ends a rank: its error reaches the launcher, and its exit never waits for a lost peer."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from paceline.core.telemetry.failure_callbacks import say_last_words
from paceline.errors import UsageError
from paceline.launch.rank import failure_record


def rank_main(function: Callable[[], None]) -> None:
    """Run `function` as a rank's whole work; return only if it succeeds.

    A :class:`UsageError` becomes one line, printed once by ``paceline``, and exit code 2. Anything else is
    reported to the launcher, which prints the first rank's traceback, and exit code 1. Both leave without the
    interpreter's own shutdown, which can hang or abort in a process group that has lost a rank.
    """
    try:
        function()
    except UsageError as error:
        code = _usage(error)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        code = stop.code if isinstance(stop.code, int) else 1
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        _write(failure_record.of(error))
        if not failure_record.is_shown_by_launcher():
            traceback.print_exc()
        say_last_words(error)
        code = 1
    else:
        return
    _leave(code)


def _usage(error: UsageError) -> int:
    note = failure_record.of(error, usage=True)
    _write(note)
    if not failure_record.is_shown_by_launcher():
        print(f"error: {error}", file=sys.stderr)
    return 2 if note.usage else 1


def _write(note: failure_record.Record) -> None:
    path = os.environ.get(failure_record.FILE)
    if path:
        failure_record.write(path, note)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
