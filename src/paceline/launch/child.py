"""Ensures that a rank's process exits when the launcher does, and then executes the rank's command.

Run by path as ``python -I -S child.py <launcher's pid> command…``, without site-packages, so that it starts quickly. On
Linux PR_SET_PDEATHSIG makes the kernel kill this process when the launcher thread that started it exits; the setting
survives exec. On other systems this module only executes the command.
"""

import os
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127  # the shell's exit codes for a missing command, and for one that is not executable
NOT_EXECUTABLE = 126


def die_with(launcher: int) -> None:
    """Make the kernel kill this process when its parent, `launcher`, exits."""
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        print("warning: this rank will outlive a launcher that is killed (prctl failed)", file=sys.stderr)
    if os.getppid() != launcher:  # the launcher exited before the call above
        os._exit(1)


def become(command: "list[str]") -> None:
    """Replace this process with `command`; if that fails, exit with the same code as a shell."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        try:
            print(f"error: cannot start {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        finally:  # even if stderr cannot be written to
            os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    become(sys.argv[2:])
