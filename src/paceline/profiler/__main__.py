"""Entry point of a profiled rank: ``python -m paceline.profiler SETTINGS SCRIPT ARGUMENTS`` runs and records a script.

``-m MODULE`` instead of a script runs a module.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from paceline.profiler.recording.program import Enough, run_program
from paceline.profiler.recording.recorder import Session


def _enough() -> NoReturn:
    raise Enough(0)


def record(settings: dict[str, Any], program: list[str]) -> None:
    """Run and record `program` until it exits or enough steps have been measured."""
    # By default SIGTERM ends Python immediately, without closing the record. Keep a handler that the launcher
    # installed.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.argv = program[1:] if program[0] == "-m" else program  # the profile's title
    session = Session(Path(settings.pop("folder")), on_enough=_enough, **settings)
    try:
        run_program(program)
    except SystemExit as error:
        # sys.exit() and sys.exit(0) count as success.
        session.close(None if not error.code else error)
        raise
    except BaseException as error:
        session.close(error)
        raise
    session.close()


if __name__ == "__main__":
    record(json.loads(sys.argv[1]), sys.argv[2:])
