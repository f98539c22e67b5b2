"""Waits for Gloo's threads at the end of the process."""

import time
from contextlib import suppress
from pathlib import Path

_MOST_S = 5.0
"""Longest wait, in seconds."""


def await_idle() -> None:
    """Wait until no thread of a Gloo group is busy.

    A thread may release a collective's tensors after the wait for the collective has returned. During interpreter
    shutdown it could not take the GIL for this, and would abort the process after a successful training.
    """
    idle, end = 0, time.monotonic() + _MOST_S
    # Twice, because a thread that was waiting for another one can become busy between the two reads.
    while idle < 2 and time.monotonic() < end:
        time.sleep(0.001)  # threads take the GIL
        idle = 0 if _are_busy() else idle + 1


def _are_busy() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):  # empty on other systems than Linux
        with suppress(OSError):  # the thread has ended
            # Reading a file releases the GIL, so a thread that needs the GIL is running by now, not asleep.
            name, _, rest = task.read_text().rpartition(") ")
            if name.endswith("(pt_gloo_runloop") and not rest.startswith("S"):
                return True
    return False
