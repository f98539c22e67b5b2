"""The IPython shell of a rank, which sends errors and figures to the kernel."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from paceline.errors import PacelineError
from paceline.launch.rank.failure_record import consequence
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
