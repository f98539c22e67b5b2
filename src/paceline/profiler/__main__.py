"""Entry point of a profiled rank: ``paceline.profiler SETTINGS SCRIPT ARGUMENTS`` runs and records a script.

``-m MODULE`` instead of a script runs a module.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.profiler.environment import run_program
from paceline.profiler.recorder import Session


def stop(number: int, frame: FrameType | None) -> None:
    """End the program, but not inside a callback of the garbage collector, which ignores exceptions.

    A signal that arrives during a collection is handled at the first line of a callback.
    """
    # A callback is a function, or an object that can be called.
    codes = [getattr(call, "__code__", getattr(type(call).__call__, "__code__", None)) for call in gc.callbacks]
    if frame is not None and frame.f_code in codes:
        threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, number)).start()
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        sys.exit(128 + number)


def record(settings: dict[str, Any], program: list[str]) -> None:
    """Run and record `program` until it exits or enough steps have been measured."""
    # By default SIGTERM ends Python immediately, without closing the record. Keep a handler that the launcher
    # installed.
    for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is default:
            signal.signal(number, stop)
    sys.argv = program[1:] if program[0] == "-m" else program  # the profile's title
    with Session(Path(settings.pop("folder")), ends_program=True, **settings):
        run_program(program)


if __name__ == "__main__":
    record(json.loads(sys.argv[1]), sys.argv[2:])
