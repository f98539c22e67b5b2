"""Python stacks of a rank's threads, which it writes itself when a signal comes.

There are two signals. For the first one the interpreter writes them, between two of its instructions. A rank that is
in a call which does not come back never gets there; for the second one ``faulthandler`` writes them in C at any
point. But a frame that the interpreter is just creating can crash it: about one in some thousand answers ended a busy
rank. So the second signal is only for ranks that do not answer the first.

Standard library only, because ranks load this file by path (``hook/sitecustomize.py``).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = "PACELINE_BLACK_BOX"  # where the launcher reads; same as in paceline.core.telemetry.flight_record


def number() -> int:
    """Return the signal for ``faulthandler``, which no program uses, as far as one can know; 0 where there is none."""
    return signal.SIGRTMAX - 5 if sys.platform == "linux" else 0


def polite_number() -> int:
    """Return the signal for the interpreter; 0 where there is none."""
    return signal.SIGRTMAX - 6 if sys.platform == "linux" else 0


def path_of(folder: Path, local_rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"stacks-{local_rank}"


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Make this process write its stacks when the signal arrives."""
    folder, rank = environment.get(FOLDER), environment.get("LOCAL_RANK")
    if not folder or not rank or not number():
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC
    try:
        descriptor = os.open(path_of(Path(folder), int(rank)), flags, 0o600)
    except (OSError, ValueError):  # the report then has no stacks
        return

    def write_stacks(*_: object) -> None:
        faulthandler.dump_traceback(descriptor, all_threads=True)

    faulthandler.register(number(), descriptor, all_threads=True, chain=False)
    signal.signal(polite_number(), write_stacks)
    signal.siginterrupt(polite_number(), False)  # blocking calls of libraries are resumed
