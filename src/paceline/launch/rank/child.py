"""Ties the life of a rank's process to the launcher's, then becomes the rank's own command.

Run by path as ``python -I -S child.py <launcher's pid> command…``, so that it costs one bare interpreter: no
site-packages, no paceline, no torch. Linux only: PR_SET_PDEATHSIG makes the kernel kill this process when the
launcher's thread that started it ends, however it ends; the setting survives exec. Elsewhere this only execs.
"""

import os
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127  # the shell's exit codes for a command that is not there, or not executable
NOT_EXECUTABLE = 126


def die_with(launcher: int) -> None:
    """Make the kernel kill this process when `launcher`, its parent, ends."""
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        print("warning: this rank will not end by itself if the launcher is killed (prctl)", file=sys.stderr)
    if os.getppid() != launcher:  # the launcher ended before the call above
        os._exit(1)


def become(command: "list[str]") -> None:
    """Replace this process by `command`; exit with a shell's code if that is impossible."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        try:
            print(f"error: cannot start {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        finally:  # also if stderr cannot be written
            os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


def pin() -> None:
    """Keep to the cores that the launcher chose for this rank, if it did; threads and children inherit that."""
    shares = os.environ.get("PACELINE_CORES")
    if shares:
        cores = shares.split(";")[int(os.environ["RANK"])]  # all are on this host
        os.sched_setaffinity(0, map(int, cores.split(",")))


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    pin()
    become(sys.argv[2:])
