"""Entry point of a profiled rank: ``paceline.profiler SETTINGS SCRIPT ARGUMENTS`` runs and records a script.

``-m MODULE`` instead of a script runs a module.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from paceline.profiler.environment import run_program
from paceline.profiler.recorder import Session


def record(settings: dict[str, Any], program: list[str]) -> None:
    """Run and record `program` until it exits or enough steps have been measured."""
    # By default SIGTERM ends Python immediately, without closing the record. Keep a handler that the launcher
    # installed.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.argv = program[1:] if program[0] == "-m" else program  # the profile's title
    with Session(Path(settings.pop("folder")), ends_program=True, **settings):
        run_program(program)


if __name__ == "__main__":
    record(json.loads(sys.argv[1]), sys.argv[2:])
