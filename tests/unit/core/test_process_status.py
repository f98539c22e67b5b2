"""The status of processes, from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from paceline.core.host import busy_seconds, processor_seconds

SPIN = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
DELAY_S = 0.1


def test_a_process_waiting_for_a_core_is_busy_and_a_sleeping_one_is_not() -> None:
    """A notebook killed a low-priority rank because it got hardly any CPU time."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2)]
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    try:
        assert sleeping.stdout is not None
        sleeping.stdout.readline()
        began = time.monotonic(), busy_seconds(sleeping.pid)
        while any(busy_seconds(process.pid) - processor_seconds(process.pid) < DELAY_S for process in spinning):
            assert time.monotonic() < began[0] + 60
            time.sleep(0.01)
        assert 0 <= busy_seconds(sleeping.pid) - began[1] < DELAY_S
    finally:
        for process in (*spinning, sleeping):
            process.kill()
            process.communicate()
    assert busy_seconds(sleeping.pid) == float("inf")
    assert busy_seconds(os.getpid()) < float("inf")
