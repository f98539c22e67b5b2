"""A rank of ``paceline profile``: ``python -m paceline.profiler SETTINGS SCRIPT ARGUMENTS`` runs it and records.

``-m MODULE`` in place of a script runs a module, as Python does.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from paceline.launch.failure_report import rank_main
from paceline.profiler.session import Session


class Enough(SystemExit):
    """Ends the program: as many steps as were wanted are measured."""


def _enough() -> NoReturn:
    raise Enough(0)


def _terminated(*_: Any) -> NoReturn:
    """End as after an exception, so that the record is closed."""
    raise SystemExit(128 + signal.SIGTERM)


def record(settings: dict[str, Any], program: list[str]) -> None:
    """Run `program` to its end, or until enough steps were measured, and record it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)
    is_module = program[0] == "-m"
    sys.argv = program[1:] if is_module else program
    session = Session(Path(settings["folder"]), settings["steps"], operators=settings["operators"], on_enough=_enough)
    try:
        if is_module:
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program[0]).absolute().parent))
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as error:
        session.close(None if not error.code else error)
        raise
    except BaseException as error:
        session.close(error)
        raise
    session.close()


if __name__ == "__main__":
    rank_main(lambda: record(json.loads(sys.argv[1]), sys.argv[2:]))
