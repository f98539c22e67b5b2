"""Commands for tests that skip the seconds of importing torch: forked from a process that has imported it already.

    process = Forked(["-m", "paceline", "run", "script.py"], folder, environment, out, err)      like ``python …``
    process = Forked(…, ranks=True)                          also forks the ranks of a command that starts ranks
    call(function, argument)                                 result of a function called in a separate process
    with in_processes(function, ranks, argument) as pipes:   several processes that communicate through pipes

Code, arguments, environment, streams, signals and exit code are the same as for a real command. Only the interpreter's
startup differs and, unless :data:`REAL_END` is set, its shutdown. Some tests run each kind of command for real.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO, Any

import torch

from ranks import fork_server, plain_start_method

TIMEOUT_S = 300.0
REAL_END = "FORKED_HAS_A_REAL_END"
"""Environment variable that makes a command and its ranks shut the interpreter down instead of exiting at once."""


class Forked:
    """``python COMMAND`` in a child of the fork server, with the part of :class:`subprocess.Popen` that tests use."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        out: Path,
        err: Path,
        ranks: bool = False,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Call `first` in the new process before the command."""
        self._process = fork_server.Process(
            target=_command, args=(list(command), str(folder), dict(environment), str(out), str(err), ranks, first)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("paceline", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of ``function(*arguments)`` called in a separate process."""
    pipe, child_pipe = fork_server.Pipe()
    process = fork_server.Process(target=_answer, args=(child_pipe, function, arguments))
    process.start()
    child_pipe.close()
    try:
        assert pipe.poll(TIMEOUT_S), f"{function.__name__} does not end"
        ok, value = pipe.recv()
        assert ok, value
        return value
    finally:
        process.kill()
        process.join()
        pipe.close()


@contextmanager
def in_processes(function: Callable[..., None], ranks: Iterable[int], *arguments: Any) -> Iterator[list[Any]]:
    """Run ``function(rank, *arguments, pipe)`` in one process per rank until the block ends; yields the pipes."""
    pipes, processes = [], []
    for rank in ranks:
        pipe, child_pipe = fork_server.Pipe(duplex=True)
        processes.append(fork_server.Process(target=function, args=(rank, *arguments, child_pipe)))
        processes[-1].start()
        pipes.append(pipe)
    try:
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    gc.freeze()
    plain_start_method()
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)


def _command(
    command: list[str],
    folder: str,
    environment: dict[str, str],
    out: str,
    err: str,
    ranks: bool,
    first: Callable[[], None] | None,
) -> None:
    gc.freeze()  # otherwise the first collection would copy all memory of the fork server
    os.chdir(folder)
    with open(out, "a") as stdout, open(err, "a") as stderr:
        _become(environment, stdout.fileno(), stderr.fileno())
    if first is not None:
        first()  # only now, because it may replace the streams
    if ranks:
        os.environ["PACELINE_PRELOAD"] = "0"  # ranks are forked from the launcher anyway
        from insides import restart_policy, starting_ranks_with

        vars(restart_policy)["subprocess"] = SimpleNamespace(run=_run_copy)
        with starting_ranks_with(_rank):
            _run(command)
    _run(command)


def _rank(
    command: tuple[str, ...], environment: dict[str, str], out_file: IO[Any] | None, err_file: IO[Any] | None
) -> subprocess.Popen[bytes]:
    """Start a rank as a fork of the launcher for the command ``python -I -S child.py PID python -u …``.

    Ranks of torchrun have the command ``python -u …``.
    """
    rank, child, launcher = list(command), "", ""
    if rank[1:3] == ["-I", "-S"]:
        _, _, _, child, launcher, *rank = rank
    assert rank[:2] == [sys.executable, "-u"], command
    out = out_file.fileno() if out_file else 1
    err = err_file.fileno() if err_file else 2
    pid = os.fork()
    if pid:
        return _Child(pid)
    try:
        # Do not collect the launcher's garbage here: the store of an earlier job would wake its thread, which does not
        # exist in this process, through a closed descriptor, and libuv would call abort().
        gc.freeze()
        os.setsid()
        if child:
            runpy.run_path(child)["die_with"](int(launcher))
        _become(environment, out, err)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # inherited from the launcher
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
        if "PACELINE_LAUNCHER" in environment:  # unset on several hosts, which use torchrun
            sys.modules.pop("sitecustomize", None)
            __import__("sitecustomize")  # our hook, which removes itself from the path
        _run(rank[2:])
    except BaseException:
        traceback.print_exc()
    os._exit(70)


def _run_copy(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """Replace ``subprocess.run`` in the launcher: run the command in a fork of this process."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = _rank(tuple(command), {"OMP_NUM_THREADS": "1", **os.environ}, out, err).wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


class _Child(subprocess.Popen[bytes]):
    """A child that this process forked itself."""

    def __init__(self, pid: int) -> None:
        self.pid, self.args, self.returncode = pid, [], None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._communication_started, self._input = True, False, None
        self._waitpid_lock = threading.Lock()


def _become(environment: Mapping[str, str], out: int, err: int) -> None:
    """Reset signals, environment, streams and exit handlers to those of a new process."""
    plain_start_method()
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    if REAL_END in environment:
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # normally registered by the first finalizer
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]  # normally registered by its import
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # take it from the new environment, not from the fork server's
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (out, 1), (err, 2)):
        os.dup2(descriptor, place)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _run(command: list[str]) -> None:
    """Do what ``python COMMAND`` does, then exit."""
    first, *rest = command
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        _end(lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True))
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        _end(lambda: exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"}))
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(first).resolve().parent))
        _end(lambda: runpy.run_path(first, run_name="__main__"))


def _end(program: Callable[[], Any]) -> None:
    """Run `program` and exit like the interpreter."""
    code: Any = 0
    try:
        program()
    except SystemExit as exit_:
        code = exit_.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        code = 1
        try:
            sys.excepthook(type(error), error, _without_our_frames(error.__traceback__))
        except SystemExit as exit_:
            code = exit_.code
    if REAL_END in os.environ:
        ctypes.pythonapi.Py_Exit(code or 0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this file and of :mod:`runpy` from the top of a traceback."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace
