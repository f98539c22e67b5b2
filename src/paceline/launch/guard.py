"""Cleans up after a launcher that is killed: ends the child processes of its ranks, and removes the job's folder.

Run by path as ``python -I -S guard.py folder``. It waits for the lock of the folder, which the launcher holds until it
exits. If the launcher has removed the folder, there is nothing to do.
"""

import fcntl
import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with suppress(OSError), (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for pid in json.loads((folder / "job.json").read_text())["processes"].values():
            with suppress(ProcessLookupError):  # the kernel has killed the ranks, but not their DataLoader workers
                os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
