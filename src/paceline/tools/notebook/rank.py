"""The process of a notebook's rank, which runs its cells in an IPython shell."""

from __future__ import annotations

import builtins
import faulthandler
import getpass
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

import paceline
from paceline.core.world import current, usable_backends
from paceline.errors import PacelineError, UsageError
from paceline.launch.failure_record import consequence
from paceline.tools.notebook.messages import Failure

PLAIN = "text/plain"
_LIBRARIES = re.compile(r"/(torch|paceline)/")


class Channel:
    """The connection to the kernel. Any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.in_message = False
        """Whether the main thread is in the middle of a message, which must not be interrupted."""
        self.is_due = False
        """Whether an interrupt was postponed."""

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """Postpone interrupts, because a partial message would corrupt all later ones."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.in_message = True
        try:
            yield
        finally:
            self.in_message = False
            if self.is_due:
                self.is_due = False
                raise KeyboardInterrupt

    def send(self, *message: Any) -> None:
        """Send a message after flushing the output."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with self._lock, self._undivided():
            self._connection.send(message)

    def receive(self) -> tuple[Any, ...]:
        """Wait for the next message."""
        message: tuple[Any, ...] = self._connection.recv()
        return message


class RankDisplay(DisplayPublisher):
    """Prints text and sends other displays to the kernel."""

    channel: Channel

    def publish(
        self,
        data: Any,
        metadata: Any = None,
        source: Any = None,
        *,
        transient: Any = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        """Show `data`, a dict by MIME type, in the notebook."""
        # Text is printed, so that equal lines of several ranks are shown once.
        if set(data) <= {PLAIN} and not transient:
            print(data.get(PLAIN, ""))
        else:
            self.channel.send("display", dict(data), dict(metadata or {}), dict(transient or {}), update)

    def clear_output(self, wait: bool = False) -> None:
        """Clear the output of the cell."""
        self.channel.send("clear", wait)


class RankResults(DisplayHook):
    """Shows the value of a cell's last expression."""

    def quiet(self) -> bool:
        """Return whether the cell ends with a semicolon, which hides its value."""
        shell: Any = self.shell
        ends: Any = self.semicolon_at_end_of_expression
        return bool(ends(shell.text))

    def write_output_prompt(self) -> None:
        """Show no prompt, because the kernel shows the rank."""

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        """Publish the value in all its formats."""
        shell: Any = self.shell
        shell.display_pub.publish(format_dict, md_dict)

    def finish_displayhook(self) -> None:
        """Skip IPython's final newline."""
        self._is_active = False


class RankShell(InteractiveShell):
    """Runs the cells of one rank in a separate namespace."""

    display_pub_class = Type(RankDisplay)
    displayhook_class = Type(RankResults)
    text = ""
    """The current cell, which is not in the history."""
    failure: Failure | None = None
    """Failure of the current cell, if any."""

    @classmethod
    def start(cls, channel: Channel) -> RankShell:
        """Create the shell of this process."""
        # Disable the history: the kernel keeps one, and otherwise each rank would open the user's history database.
        config = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"separate_in": "", "banner1": ""}})
        shell: RankShell = cls.instance(config=config)
        publisher: Any = shell.display_pub
        publisher.channel = channel
        return shell

    def run(self, text: str, number: int) -> Failure | None:
        """Run a cell; return its failure, if any."""
        self.text, self.failure, self.execution_count = text, None, number
        # With a history, IPython would format every error twice.
        result = self.run_cell(text, store_history=False)  # type: ignore[no-untyped-call]
        if not result.success and self.failure is None:
            error = result.error_in_exec or result.error_before_exec
            self.failure = _failure(type(error), error, [f"{type(error).__name__}: {error}"])
        return self.failure

    def showtraceback(self, exc_tuple: Any = None, *arguments: Any, **options: Any) -> None:
        """Record the failure: an interrupt only by name, and a PacelineError without internal frames."""
        kind, error, trace = self._get_exc_info(exc_tuple)  # type: ignore[no-untyped-call]
        if issubclass(kind, KeyboardInterrupt):  # IPython takes seconds to find the sources of its frames
            self._showtraceback(kind, error, [kind.__name__])
            return
        if isinstance(error, PacelineError):
            trace = users_part(trace)
        super().showtraceback((kind, error, trace), *arguments, **options)

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        if self.failure is None:
            self.failure = _failure(etype, evalue, list(stb))

    def show_usage_error(self, exc: Any) -> None:
        """Record a magic's usage error, which is one line."""
        self.failure = self.failure or _failure(type(exc), exc, [f"UsageError: {exc}"])

    def ask_exit(self) -> None:
        """Tell the user how to end ranks, because ``exit()`` does not end them."""
        print("exit() does not end ranks; use %dist_shutdown")

    def enable_gui(self, gui: Any = None) -> None:
        """Ignored, because ranks have no windows."""


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of torch and Paceline at its end."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    while len(frames) > 1 and _LIBRARIES.search(frames[-1].tb_frame.f_code.co_filename):
        frames.pop()
    for frame in reversed(frames):
        trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return trace


def _failure(kind: type[BaseException], error: Any, lines: list[str]) -> Failure:
    broken = isinstance(error, BaseException) and consequence(error) is not None
    return Failure(kind.__name__, str(error), tuple(lines), broken or kind.__name__ == "DesyncError")


@dataclass
class Rank:
    """Handler of the kernel's messages."""

    channel: Channel
    shell: RankShell
    is_busy: bool = False
    """Whether a request is running, which an interrupt would end."""

    def serve(self) -> None:
        """Handle requests until the kernel ends."""
        signal.signal(signal.SIGINT, self.interrupt)
        functions: dict[str, Callable[..., Any]] = {
            "run": self.shell.run,
            "join": self.join,
            "leave": self.leave,
            "place": self.place,
            "barrier": lambda: current().barrier(),
            "pull": self.pull,
        }
        while True:
            kind, *arguments = self.channel.receive()
            result, failure = None, None
            try:
                self.is_busy = True
                result = functions[kind](*arguments)
                if isinstance(result, Failure):
                    result, failure = None, result
            # This includes SystemExit and KeyboardInterrupt, which end the cell but not the rank.
            except BaseException as error:
                self.is_busy = False  # must come first, because an interrupt here would not be caught
                line = f"{type(error).__name__}: {error}"
                failure = Failure(type(error).__name__, str(error), (line,), consequence(error) is not None)
            finally:
                self.is_busy = False
            self.channel.send("done", result, failure)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: end the running cell, but never in the middle of a message."""
        if self.is_busy and self.channel.in_message:
            self.channel.is_due = True
        elif self.is_busy:
            raise KeyboardInterrupt

    def join(self, backend: str | None) -> str:
        """Create the process group, set variables such as ``rank`` for the cells, and return :meth:`place`."""
        world = paceline.init(backend)
        gpu_id = None if world.device.type == "cpu" else world.device.index
        self.shell.user_ns.update(rank=world.rank, world_size=world.size, device=world.device, gpu_id=gpu_id)
        return self.place()

    def place(self) -> str:
        """Return the device and backends of the process group, or an empty string if a cell has destroyed it."""
        return f"{current().device}, {usable_backends()}" if dist.is_initialized() else ""

    def leave(self) -> None:
        """Leave the process group without waiting for other ranks."""
        if dist.is_initialized():
            with suppress(_Leaving), current():  # an error aborts the world, so that it does not wait for peers
                raise _Leaving

    def pull(self, names: Sequence[str]) -> list[bytes]:
        """Return the values of variables, each pickled."""
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise NameError(f"{missing[0]!r} is not defined on rank {os.environ['RANK']}")
        values = []
        for name in names:
            buffer = io.BytesIO()
            try:
                torch.save(self.shell.user_ns[name], buffer)
            except Exception as error:
                kind = type(self.shell.user_ns[name]).__name__
                raise TypeError(f"cannot pickle {name!r} ({kind}) on rank {os.environ['RANK']}: {error}") from error
            values.append(buffer.getvalue())
        return values


class _Leaving(Exception):
    """Raised to leave a world without waiting for other ranks."""


def connect() -> Connection:
    """Return the connection to the kernel, which is the standard input; replace that with an empty one."""
    connection = Connection(os.dup(0))  # programs started by cells do not inherit the copy
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    return connection


def refuse_input(*_: object, **__: object) -> NoReturn:
    """Replacement for ``input`` and ``breakpoint``, because a rank has no terminal."""
    raise UsageError("input() and debuggers do not work on ranks; assign or print values in a cell")


def main() -> None:
    """Run as a rank of the kernel that started this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C during the start must not end the rank
    faulthandler.enable()
    channel = Channel(connect())
    shell = RankShell.start(channel)
    builtins.input = getpass.getpass = sys.breakpointhook = refuse_input
    sys.argv = [""]  # as in a Jupyter kernel
    sys.path.insert(0, "")  # only now, so that cells import from the working folder, and this program does not
    try:
        channel.send("ready")
        Rank(channel, shell).serve()
    except (EOFError, ConnectionError):
        os._exit(0)  # destroying the process group would wait for peers that may be gone
