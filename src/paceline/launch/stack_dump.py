"""Makes a rank write the Python stacks of its threads on request.

There are two signals. On the first, the interpreter writes the stacks between two instructions, but not while a call
blocks. On the second, ``faulthandler`` writes them from C, at any point. A few times in ten thousand, the second signal
crashes a busy rank in a frame under construction, so it is sent only to ranks that do not answer the first signal.

Standard library only, because ranks load this module by path (``launch/hook/sitecustomize.py``).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = "PACELINE_BLACK_BOX"  # as in paceline.core.black_box


def number() -> int:
    """Return the signal for ``faulthandler``, which other programs are unlikely to use; 0 except on Linux."""
    return signal.SIGRTMAX - 5 if sys.platform == "linux" else 0


def polite_number() -> int:
    """Return the signal for the interpreter; 0 except on Linux."""
    return signal.SIGRTMAX - 6 if sys.platform == "linux" else 0


def path_of(folder: Path, local_rank: int) -> Path:
    """Return the path of the file for a rank's stacks."""
    return folder / f"stacks-{local_rank}"


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Make this process write its stacks when it receives one of the two signals."""
    folder, rank = environment.get(FOLDER), environment.get("LOCAL_RANK")
    if not folder or not rank or not number():
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC
    try:
        descriptor = os.open(path_of(Path(folder), int(rank)), flags, 0o600)
    except (OSError, ValueError):  # the report will have no stacks
        return

    def write_stacks(*_: object) -> None:
        faulthandler.dump_traceback(descriptor, all_threads=True)

    faulthandler.register(number(), descriptor, all_threads=True, chain=False)
    signal.signal(polite_number(), write_stacks)
    signal.siginterrupt(polite_number(), False)  # resume interrupted blocking calls in libraries
