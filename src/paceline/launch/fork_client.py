"""The launcher's side of the fork server (:mod:`paceline.launch.fork_server`), and when to use it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from paceline.core.messages import signal_name
from paceline.core.torch_elastic import OPTIMIZERS_NEED, starting_ranks_with
from paceline.errors import UsageError
from paceline.launch.fork_server import LONGEST
from paceline.launch.signals import sheltered

SETTING = "PACELINE_PRELOAD"
"""Environment variable; with ``0``, every rank starts as a new interpreter."""

LIBRARY = (
    "paceline",
    "paceline.train",
    "paceline.nn",
    "paceline.compression",
    "paceline.core.rank_lookup",
    "paceline.comm.process_group",
)
"""Modules to import for programs that use Paceline, because Paceline itself imports most modules lazily."""

_READ_AT_IMPORT = r"(?:OMP|GOMP|KMP|MKL|OPENBLAS|DNNL|ONEDNN|ATEN|PYTORCH|TORCH)(?!_NCCL|ELASTIC_|I_)(?=\w*_\w)\w+"
SET_BEFORE_IMPORT = re.compile(
    rf"""(?<!\.get\()(?<!getenv\()["']({_READ_AT_IMPORT})["']|[(,](?:\s*#.*\n){{0,9}}\s*({_READ_AT_IMPORT})\s*=(?!=)"""
)
"""Environment variables that torch or one of its libraries reads when it is imported, in quotes or as keywords."""

IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+(\w*)", re.MULTILINE)
"""The top-level module of an import statement; empty if the import is relative."""
SLICE_S = 0.05  # interval between checks for signals while the launcher waits for the server
LATE_S = 1.0  # time for the server to report that a rank has exited
END_S = 2.0  # time for the server to exit
_ENDED = (BrokenPipeError, ConnectionResetError)  # the server has exited; "reset" if it left messages unread
Stream = IO[Any] | None  # a file for a rank's output; None for the launcher's own


@dataclass(frozen=True)
class Preloading:
    """Modules to import before ranks are forked; empty if every rank starts as a new interpreter.

    ``note`` is a message to the user about why ranks are not forked.
    """

    modules: tuple[str, ...] = ()
    note: str | None = None


def decide(command: Sequence[str]) -> Preloading:
    """Return the modules to import before the ranks of `command` are forked.

    The decision depends only on the script's source code, so it is the same for every start.
    """
    setting = os.environ.get(SETTING, "1")
    if setting not in ("0", "1"):
        raise UsageError(f"{SETTING}={setting!r} is neither 0 nor 1; with 0 every rank imports torch itself")
    # Programs other than Python and other interpreter options need a new process.
    if setting == "0" or not can_fork() or list(command[:2]) != [sys.executable, "-u"]:
        return Preloading()
    name, text = source(command[2:])
    if text is None:
        return Preloading()
    if variable := SET_BEFORE_IMPORT.search(text):
        return Preloading(
            note=f"note: every rank imports torch itself, because {name} may set {variable[1] or variable[2]}, which "
            "torch reads during its import; set the variable outside of the script for a faster start"
        )
    return Preloading(modules_for(text))


def can_fork() -> bool:
    """Return whether this system supports the fork server."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return sys.platform == "linux"


def source(arguments: Sequence[str]) -> tuple[str, str | None]:
    """Return the name and source of the program run by ``python ARGUMENTS``; no source if there are other options."""
    if arguments[:1] in (["-m"], ["-c"]) and len(arguments) > 1:
        name = arguments[1]
        return name, _read(_module_file(name)) if arguments[0] == "-m" else name
    if not arguments or arguments[0].startswith("-"):
        return "", None
    return arguments[0], _read(Path(arguments[0]))


def _module_file(name: str) -> Path | None:
    """Return the file of a module without importing its packages."""
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin).with_name("__main__.py") if spec.submodule_search_locations else Path(spec.origin)
    path = Path(spec.origin).parent.joinpath(*rest)
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def _read(file: Path | None) -> str:
    """Return the source code of a program; if it cannot be read, return code that counts as creating an optimizer."""
    try:
        return file.read_text(errors="replace") if file is not None and file.is_file() else "import torch.optim"
    except OSError:
        return "import torch.optim"


def modules_for(text: str) -> tuple[str, ...]:
    """Return the modules to import for the program; empty if it imports only the standard library."""
    if "paceline" in text:
        return ("torch", OPTIMIZERS_NEED, *LIBRARY)
    others = set(IMPORTED.findall(text)) - sys.stdlib_module_names  # such as the project's own, which are not read
    if "torch" not in text and not others:
        return ()
    return ("torch", OPTIMIZERS_NEED) if "optim" in text or others - {"torch"} else ("torch",)


class ForkServer:
    """A process that forks the ranks of one job. It is started with the first ranks, and restarted if it has died.

    Used by one thread. If that thread exits while the server imports its modules, the kernel kills the server.

    Args:
        command: the command of a rank.
        environment: variables of all ranks.
        modules: modules to import; empty if every rank is a new interpreter.
        say: prints a message.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], modules: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self._command = list(command)
        self._environment = environment
        self._modules = tuple(modules)
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None  # None before the server starts and after it exits
        self._socket: socket.socket | None = None  # None whenever the process is None
        self._answers: list[dict[str, Any]] = []  # answers that no call has taken yet
        self._codes: dict[int, int] = {}  # exit codes that no rank has taken yet, by process id

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Inside this context, torchelastic forks its ranks from the server, if it is running. Not thread-safe."""
        if self._socket is None:
            yield
            return

        def start(command: tuple[str, ...], environment: dict[str, str], out: Stream, err: Stream) -> ForkedRank:
            assert list(command[-len(self._command) :]) == self._command, command
            return self.fork(environment, out, err)

        with starting_ranks_with(start):
            yield

    def prepare(self, is_stopped: Callable[[], bool]) -> None:
        """Start the server unless it is running, and wait until it has imported its modules or `is_stopped()` is true.

        If the server refuses to fork, print the reason; every rank then starts as a new interpreter.
        """
        self.collect()  # detects whether the server has exited
        if self._socket is not None or not self._modules:
            return
        # Process ids are reused: an exit code from the previous server must not belong to a new rank.
        self._codes.clear()
        launcher_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end, sheltered():
            server_end.set_inheritable(True)
            setting = " ".join([str(server_end.fileno()), *self._modules])
            self._process = subprocess.Popen(
                self._command,
                # launch/hook/sitecustomize.py reads the last variable
                env={**os.environ, **self._environment, "PACELINE_FORK_SERVER": setting},
                pass_fds=[server_end.fileno()],
                start_new_session=True,  # so that only the launcher receives Ctrl-C
            )
        self._socket = launcher_end
        answer = self._wait_for_answer(is_stopped)
        if answer is None and is_stopped():
            self.close()
        elif answer is None or answer["refused"]:
            reason = answer["refused"] if answer is not None else "the process that imports it ended"
            self._say(f"note: every rank imports torch itself, because {reason}")
            self._modules = ()
            self.close()

    def fork(self, environment: Mapping[str, str], out: Stream, err: Stream, stdin: int = 0) -> ForkedRank:
        """Fork a rank with this environment. Its output goes to `out` and `err`, or else to this process's streams."""
        server = self._socket
        assert server is not None
        streams = {0: stdin, 1: out.fileno() if out else 1, 2: err.fileno() if err else 2}
        streams = {stream: file for stream, file in streams.items() if _is_open(file)}
        with open(os.memfd_create("paceline"), "w+") as request:
            json.dump({"environment": dict(environment), "streams": list(streams)}, request)
            request.flush()
            request.seek(0)
            try:
                socket.send_fds(server, [b'{"fork": 1}'], [request.fileno(), *streams.values()])
                answer = self._wait_for_answer(lambda: False)
            except _ENDED:
                answer = None
        if answer is None or "error" in answer:
            raise OSError(f"a rank cannot be started: {answer['error'] if answer else 'the fork server ended'}")
        return ForkedRank(self, answer["pid"])

    def _wait_for_answer(self, is_stopped: Callable[[], bool]) -> dict[str, Any] | None:
        """Wait for the next answer and return it; None if the server has exited or `is_stopped` returns True."""
        while not self._answers and self._socket is not None and not is_stopped():
            self.collect(SLICE_S)
        return self._answers.pop(0) if self._answers else None

    def collect(self, seconds: float = 0.0) -> None:
        """Read all messages from the server, waiting up to `seconds` for the first one."""
        # wait() instead of select(), which rejects descriptors above 1023.
        while self._socket is not None and wait([self._socket], seconds):
            seconds = 0.0
            try:
                message = json.loads(self._socket.recv(LONGEST) or "null")
            except ConnectionResetError:
                message = None
            if message is None:
                self._has_died()
            elif "code" in message:
                self._codes[message["pid"]] = message["code"]
            else:
                self._answers.append(message)

    def take_code(self, pid: int) -> int | None:
        """Return the exit code of the rank `pid` if the server has reported it. Each code is returned only once."""
        code = self._codes.pop(pid, None)
        if code is not None and self._socket is not None:
            # If the server has exited, the zombie no longer exists.
            with suppress(*_ENDED):
                self._socket.send(json.dumps({"reap": pid}).encode())
        return code

    @property
    def is_running(self) -> bool:
        """Whether the server can still report that ranks have exited."""
        return self._socket is not None

    def _has_died(self) -> None:
        process = self._process
        self.close()
        assert process is not None
        if self._modules and process.returncode:
            code = process.returncode
            how = f"signal {signal_name(-code)}" if code < 0 else f"exit code {code}"
            self._say(f"the process that forks the ranks ended ({how}), and so did its ranks")

    def close(self) -> None:
        """Stop the server if it is running."""
        if self._socket is None or self._process is None:
            return
        self._socket.close()  # makes the server exit unless it is still importing modules
        if not self._has_ended(0.2):
            self._process.kill()
            self._has_ended(END_S)
        self._process = self._socket = None

    def _has_ended(self, seconds: float) -> bool:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


class ForkedRank:
    """A rank's process, with the :class:`subprocess.Popen` members that torchelastic and the agent use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # negative for a signal
        self._server = server
        self._descriptor = os.pidfd_open(pid)  # readable once the process has exited; then closed and set to -1

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._poll(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait up to `timeout` seconds for the process to exit; return its exit code."""
        end = time.monotonic() + timeout if timeout is not None else None
        while self._poll(SLICE_S if end is None else max(0.0, min(SLICE_S, end - time.monotonic()))) is None:
            if end is not None and time.monotonic() >= end:
                assert timeout is not None
                raise subprocess.TimeoutExpired("a rank", timeout)
        assert self.returncode is not None
        return self.returncode

    def _poll(self, seconds: float) -> int | None:
        if self.returncode is None and wait([self._descriptor], seconds):
            self._server.collect()
            self.returncode = self._server.take_code(self.pid)
            end = time.monotonic() + LATE_S
            while self.returncode is None and self._server.is_running and time.monotonic() < end:
                self._server.collect(SLICE_S)
                self.returncode = self._server.take_code(self.pid)
            if self.returncode is None and not self._server.is_running:
                self.returncode = -signal.SIGKILL  # the kernel killed it together with the server
            if self.returncode is not None:
                os.close(self._descriptor)
                self._descriptor = -1
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(signal.SIGKILL)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
