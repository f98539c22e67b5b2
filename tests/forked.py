"""Commands in tests without the seconds that an interpreter takes to load torch: forked from one that has loaded it.

    process = Forked(["run", "--nproc", "2", "script.py"], folder, environment, out, err)      the ``paceline`` command
    process = Forked(…, ranks=True)                                                            and the ranks that it starts

The command's code, its arguments, environment, streams, signals and exit code are those of a command of its own. What
differs is how the interpreter starts and ends: tests of that, and of each kind of command one, start real ones.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ranks import _context


class Forked:
    """``python -m paceline ARGUMENTS`` in a child of the fork server; what tests use of :class:`subprocess.Popen`."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], out: Path, err: Path, ranks: bool
    ) -> None:
        self._process = _context.Process(
            target=_command, args=(list(arguments), str(folder), dict(environment), str(out), str(err), ranks)
        )
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("paceline", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _command(
    arguments: list[str], folder: str, environment: dict[str, str], out: str, err: str, ranks: bool
) -> None:
    """The launcher's life."""
    os.chdir(folder)
    with open(out, "a") as stdout, open(err, "a") as stderr:
        _become(["paceline", *arguments], environment, stdout.fileno(), stderr.fileno())
    sys.path.insert(0, folder)
    if ranks:
        from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

        SubprocessHandler._popen = _rank  # type: ignore[method-assign]
    _end(lambda: runpy.run_module("paceline", run_name="__main__", alter_sys=True))


def _rank(handler: Any, command: tuple[str, ...], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """In the launcher: start a rank as a copy of this process; ``python -I -S child.py PID python -u …``."""
    child, launcher, *rank = command[3:]
    assert command[:3] == (sys.executable, "-I", "-S"), command
    assert rank[:2] == [sys.executable, "-u"], rank
    out = handler._stdout.fileno() if handler._stdout else 1
    err = handler._stderr.fileno() if handler._stderr else 2
    pid = os.fork()
    if pid:
        return _Child(pid)
    try:
        os.setsid()
        runpy.run_path(child)["die_with"](int(launcher))
        _become(rank[2:], environment, out, err)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the launcher's
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.modules.pop("sitecustomize", None)
        __import__("sitecustomize")  # our hook, which removes itself from the path
        if rank[2] == "-m":
            sys.argv = ["", *rank[4:]]
            sys.path.insert(0, os.getcwd())
            _end(lambda: runpy.run_module(rank[3], run_name="__main__", alter_sys=True))
        else:
            sys.path.insert(0, str(Path(rank[2]).resolve().parent))
            _end(lambda: runpy.run_path(rank[2], run_name="__main__"))
    except BaseException:
        traceback.print_exc()
    os._exit(70)


class _Child(subprocess.Popen[bytes]):
    """A child that this process has forked itself."""

    def __init__(self, pid: int) -> None:
        self.pid, self.args, self.returncode = pid, [], None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._communication_started, self._input = True, False, None
        self._waitpid_lock = threading.Lock()


def _become(arguments: list[str], environment: Mapping[str, str], out: int, err: int) -> None:
    """Give this process what a new one would have: signals, environment, streams, and nothing left to do at its end."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (out, 1), (err, 2)):
        os.dup2(descriptor, place)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _end(program: Callable[[], Any]) -> None:
    """Run `program` and end the process as the interpreter would have."""
    code: Any = 0
    try:
        program()
    except SystemExit as stop:
        code = stop.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, _own(error.__traceback__))
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is the program's."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace
