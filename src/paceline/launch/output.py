"""The ranks' output: files for it, and whole lines on the launcher's streams.

    ranks                        the launcher's thread                         the launcher's streams
    stdout, stderr  ──pipes──▶   keeps a line until it is complete    ──▶      stdout, stderr

If the launcher's stream is a terminal, ranks get a pseudo-terminal, so they show progress bars and colors. If a stream
is closed, full or not read, ranks keep running and do not block for long.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import FileIO, TextIOWrapper
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import to_map

from paceline.core import messages
from paceline.core.messages import MESSAGE_S
from paceline.errors import UsageError
from paceline.launch.failure_record import FILE

LONGEST = 2**24
"""Maximum length of an incomplete line that is held back, in bytes."""
PROMPT_S = 0.25
"""How long an incomplete line, which may be a prompt, is held back on a terminal, in seconds."""
MOST = 2**23
"""Maximum number of pending bytes. Beyond it, ranks wait, unless the reader has been blocked for :data:`STUCK_S`."""
STUCK_S = 5.0
AT_END_S = 15.0
"""After the ranks have ended, the launcher waits this many seconds for a blocked reader, and then exits."""


class Stream:
    """A stream of the launcher, with its pending text."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_terminal = os.isatty(descriptor)
        # A pipe that poll() reports as writable takes this many bytes without blocking.
        self._piece = 2**20 if stat.S_ISREG(os.fstat(descriptor).st_mode) else select.PIPE_BUF
        self.pending = bytearray()
        self.total = 0
        """Total number of bytes added."""
        self.owner: Channel | None = None
        """The channel whose incomplete line is at the end."""
        self._wrote_at = time.monotonic()
        self._left_out = 0

    def add(self, text: bytes, owner: Channel | None = None) -> None:
        """Append `text`, on a new line if the incomplete line of another channel is at the end."""
        if owner is not None and self.is_full and self.is_stuck():  # drop text from ranks, but never from the launcher
            self._left_out += text.count(b"\n")
        elif text:
            left_out, self._left_out = self._left_out, 0
            if left_out:
                text = b"note: the output was not read, so %d lines of ranks are left out\n" % left_out + text
            if self.owner is not None and self.owner is not owner:
                text = b"\n" + text
            self.owner = None if text.endswith(b"\n") else owner
            if not self.pending:
                self._wrote_at = time.monotonic()
            self.pending += text
            self.total += len(text)

    def end_line(self) -> None:
        """End the last line before a message from the launcher."""
        if self.owner is not None:
            self.add(b"\n", self.owner)

    @property
    def is_full(self) -> bool:
        """Whether ranks have to wait before they can print more."""
        return len(self.pending) > MOST

    def is_stuck(self, seconds: float = STUCK_S) -> bool:
        """Return whether text is pending, but nothing could be written for this time."""
        return bool(self.pending) and time.monotonic() - self._wrote_at > seconds

    @property
    def written(self) -> int:
        """Number of bytes of :attr:`total` that are no longer pending."""
        return self.total - len(self.pending)

    def write(self) -> None:
        """Write some of the pending text, up to the end of a line if possible; drop all of it if that fails."""
        piece = self.pending[: self._piece]
        piece = piece[: piece.rfind(b"\n") + 1] or piece
        try:
            count = os.write(self.descriptor, piece)
        except BlockingIOError:
            return
        except OSError:  # closed, full, or without a reader
            count = len(self.pending)
        del self.pending[:count]
        self._wrote_at = time.monotonic()


class Channel:
    """The pipe or pseudo-terminal that a rank prints to, with its incomplete line."""

    def __init__(self, stream: Stream, rank: int | None, prefix: bytes) -> None:
        self.stream, self.rank, self._prefix = stream, rank, prefix
        self.reader, self.writer = _pseudo_terminal() if stream.is_terminal else os.pipe()
        os.set_blocking(self.reader, False)
        self._size = b""
        self.rest = bytearray()
        self.came_at = 0.0
        """When the latest part of :attr:`rest` was printed."""
        self._at_line_start = True
        self.resize()

    def resize(self) -> None:
        """Give a pseudo-terminal the size of the launcher's terminal."""
        if self.stream.is_terminal:
            with suppress(OSError):
                size = fcntl.ioctl(self.stream.descriptor, termios.TIOCGWINSZ, bytes(8))
                if size != self._size:
                    self._size = fcntl.ioctl(self.reader, termios.TIOCSWINSZ, size)

    def pass_on(self, reads: int, at_once: bool) -> None:
        """Read the channel up to `reads` times, and pass on the complete lines; if `at_once`, pass on everything."""
        for _ in range(reads):
            printed = b""
            with suppress(OSError):
                printed = os.read(self.reader, 2**16)
            if not printed:
                return
            self.rest += printed
            self.came_at = time.monotonic()
            size = self.rest.rfind(b"\n", len(self.rest) - len(printed)) + 1
            # The "\r" of a progress bar completes the text before it, but "\r\n" is a single line end.
            size = max(size, self.rest.rfind(b"\r", size, len(self.rest) - 1))
            self.show(len(self.rest) if at_once or len(self.rest) > LONGEST else size)

    def show(self, size: int) -> None:
        """Pass on the first `size` bytes of :attr:`rest`."""
        text = bytes(self.rest[:size])
        del self.rest[:size]
        if self._prefix:
            text = b"".join(map(self._prefixed, text.splitlines(keepends=True)))
        self.stream.add(text, self)

    def _prefixed(self, line: bytes) -> bytes:
        # Another channel or the launcher may have completed this channel's line.
        begins = (self._at_line_start or self.stream.owner is not self) and line != b"\r"
        self._at_line_start = line.endswith((b"\n", b"\r"))
        return self._prefix + line if begins else line

    def close(self) -> None:
        """Close both ends."""
        os.close(self.reader)
        os.close(self.writer)


class PrintedLines:
    """The output of one job's ranks. A context manager that writes the pending output on exit.

    A thread reads the channels and writes to the streams.

    Args:
        prefix_ranks: whether each line begins with its rank.
        is_stopped: returns whether the launcher has received a signal; if so, the context exits without waiting for a
            blocked stream.
    """

    def __init__(self, prefix_ranks: bool = False, is_stopped: Callable[[], bool] = lambda: True) -> None:
        self._prefix_ranks, self._is_stopped = prefix_ranks, is_stopped
        self._streams = _streams()
        self._changed = threading.Condition()
        """Held while channels are read or changed and while text is added to a stream; notified after a write."""
        self._channels: list[Channel] = []
        self._is_over = False
        self._woken, self._wake = os.pipe()
        self._thread: threading.Thread | None = None

    def open(self, rank: int | None, numbers: Iterable[int]) -> dict[int, Channel]:
        """Return a channel for each of a rank's streams (1 and 2), except streams that are closed in the launcher.

        Without a `rank`, return channels for lines that already name their rank.
        """
        channels: dict[Stream, Channel] = {}
        prefix = b"rank %d | " % rank if self._prefix_ranks and rank is not None else b""
        by_number = {}
        for number in numbers:
            if (stream := self._streams.get(number)) is not None:
                # If stdout and stderr are the same file, they share a channel, which keeps their output in order.
                by_number[number] = channels[stream] = channels.get(stream) or Channel(stream, rank, prefix)
        with self._changed:
            self._channels += channels.values()
        if self._thread is None:
            # A daemon thread, so that it does not keep the launcher alive after an error.
            thread = threading.Thread(target=self._run, name="paceline-lines", daemon=True)
            thread.start()  # which fails if the limit on threads is reached
            self._thread = thread
        os.write(self._wake, b".")
        return by_number

    def say(self, text: str) -> None:
        """Print a message from the launcher on stderr, after all earlier output of the ranks."""
        if self._thread is None or 2 not in self._streams:
            messages.say(text)
            return
        with self._changed:
            self._read_all()
            self._streams[2].end_line()
            self._streams[2].add(f"{text}\n".encode(errors="backslashreplace"))
            self._wait_until_written()

    def end_start(self) -> None:
        """Print the remaining output of ranks that have exited."""
        if self._thread is not None:
            with self._changed:
                self._close_channels()
                self._wait_until_written()

    def __enter__(self) -> PrintedLines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            with self._changed:
                self._close_channels()
                self._is_over = True
            os.write(self._wake, b".")
            while self._thread.is_alive():
                self._thread.join(0.1)
                seconds = STUCK_S if self._is_stopped() else AT_END_S
                if any(stream.is_stuck(seconds) for stream in self._streams.values()):
                    messages.say(f"note: the output was not read for {seconds:.0f} s, so the rest of it is lost")
                    return
        os.close(self._woken)
        os.close(self._wake)

    def _read_all(self) -> None:
        for channel in self._channels:
            channel.pass_on(MOST // 2**16, self._is_shown_at_once(channel))

    def _close_channels(self) -> None:
        self._read_all()
        for channel in self._channels:
            channel.show(len(channel.rest))
            channel.close()
        self._channels = []
        for number, stream in self._streams.items():
            if number == 2 or stream.is_terminal:  # a message from the launcher may follow
                stream.end_line()

    def _wait_until_written(self) -> None:
        totals = {stream: stream.total for stream in self._streams.values()}
        os.write(self._wake, b".")
        self._changed.wait_for(
            lambda: all(stream.written >= total for stream, total in totals.items()), timeout=MESSAGE_S
        )

    def _is_shown_at_once(self, channel: Channel) -> bool:
        """Return whether to pass on an incomplete line at once, because no other rank can print into it."""
        return channel.stream.owner is channel or len({peer.rank for peer in self._channels}) == 1

    # The thread

    def _run(self) -> None:
        while not self._is_over or any(stream.pending for stream in self._streams.values()):
            ready = self._wait()
            with self._changed:
                for channel in self._channels:
                    channel.resize()
                    if channel.reader in ready:
                        channel.pass_on(1, self._is_shown_at_once(channel))
                    elif channel.stream.is_terminal and time.monotonic() - channel.came_at > PROMPT_S:
                        channel.show(len(channel.rest))
            for stream in set(self._streams.values()):
                if stream.descriptor in ready:
                    stream.write()  # outside the lock, because a slow disk may block
            with self._changed:
                self._changed.notify_all()

    def _wait(self) -> set[int]:
        """Wait until there is something to do; return the descriptors that are ready."""
        poll, timeout = select.poll(), None
        poll.register(self._woken, select.POLLIN)
        with self._changed:
            for channel in self._channels:
                if not channel.stream.is_full or channel.stream.is_stuck():
                    poll.register(channel.reader, select.POLLIN)
                if channel.stream.is_full or (channel.rest and channel.stream.is_terminal):
                    timeout = PROMPT_S * 1000
            for stream in set(self._streams.values()):
                if stream.pending:
                    poll.register(stream.descriptor, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(timeout)}
        if self._woken in ready:
            os.read(self._woken, 4096)
        return ready


def _streams() -> dict[int, Stream]:
    """Return the launcher's stdout and stderr, if they are open; one object for both if they are the same file."""
    streams: dict[int, Stream] = {}
    files: dict[tuple[int, int], Stream] = {}
    for number in (1, 2):
        with suppress(OSError):
            status = os.fstat(number)
            file = (status.st_dev, status.st_ino)
            streams[number] = files[file] = files.get(file) or Stream(number)
    return streams


def _pseudo_terminal() -> tuple[int, int]:
    """Return both ends of a pseudo-terminal that does not change line endings, or of a pipe if none is available."""
    with suppress(OSError):
        # A session leader without a controlling terminal would get this one, and SIGHUP when it is closed.
        if os.getsid(0) == os.getpid():
            os.close(os.open("/dev/tty", os.O_RDWR))
        reader, writer = os.openpty()
        with suppress(termios.error):
            settings = termios.tcgetattr(writer)
            settings[1] &= ~termios.OPOST
            settings[3] &= ~termios.ECHO
            termios.tcsetattr(writer, termios.TCSANOW, settings)
        return reader, writer
    return os.pipe()


@dataclass(frozen=True)
class Logs:
    """Destinations of the ranks' output: torchrun's options, in torchrun's format.

    ``only`` contains the ranks whose output is shown. ``prefix`` is added to each teed line. With ``prefix_ranks``,
    every printed line starts with its rank.
    """

    folder: str | None = None
    redirects: str = "0"
    tee: str = "0"
    only: frozenset[int] = frozenset()
    prefix: str = ""
    prefix_ranks: bool = False

    def __post_init__(self) -> None:
        for option, value in (("--redirects", self.redirects), ("--tee", self.tee)):
            try:
                Std.from_str(value)
            except ValueError:
                raise UsageError(
                    f"{option}={value!r} is neither 0..3 nor a list such as 0:3,1:1; "
                    "give 1 for stdout, 2 for stderr or 3 for both"
                ) from None
        if self.redirects != "0" and not self.folder:
            raise UsageError(f"--redirects={self.redirects!r} needs a folder; give one with --log-dir")
        if self.folder and os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise UsageError(f"--log-dir {self.folder!r} is a file; name a folder")


class RankFiles(LogsSpecs):
    """Creates the files of each start: an error file for each rank, and the user's logs.

    On Linux an unnamed file is passed as ``/proc/<launcher>/fd/<n>``, so that no file is left behind, even after ``kill
    -9``. On other systems, temporary files are removed when the job ends.

    Args:
        logs: destinations of the output.
        printed: prints output without any other destination; None if ranks inherit the launcher's streams.
    """

    def __init__(self, logs: Logs, printed: PrintedLines | None = None) -> None:
        redirects, tee = Std.from_str(logs.redirects), Std.from_str(logs.tee)
        shown = set(logs.only) or None
        super().__init__(logs.folder, redirects, tee, shown)
        self._named = DefaultLogsSpecs(logs.folder, redirects, tee, shown) if logs.folder else None
        self.prefix = logs.prefix or None
        self._printed = printed
        self._open: list[IO[Any]] = []
        self.errors: dict[int, str] = {}
        self.teed: set[int] = set()
        """Ranks whose stderr torchelastic shows, with their tracebacks."""

    @contextmanager
    def teeing(self) -> Iterator[None]:
        """Make torchelastic copy logs to channels, because the launcher's own streams may block. Not thread-safe.

        Call this for each start, because it closes the files of the previous one.
        """
        self.close()
        channels = self._printed.open(None, [1, 2]) if self._printed is not None and self._tee != Std.NONE else {}
        raw = {number: FileIO(channel.writer, "w", closefd=False) for number, channel in channels.items()}
        out, err = (TextIOWrapper(raw[n], "utf-8", write_through=True) if n in raw else None for n in (1, 2))
        with redirect_stdout(out or sys.stdout), redirect_stderr(err or sys.stderr):
            yield

    @property
    def root_log_dir(self) -> str:
        """The user's log folder, or an empty string."""
        return str(self._root_log_dir or "")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the files of a start."""
        if self._named is not None:
            dest = self._named.reify(envs)
        else:
            dest = self._unnamed(len(envs))
            for rank, environment in envs.items():
                environment[FILE] = dest.error_files[rank]
        self.errors, self.teed = dest.error_files, set(dest.tee_stderrs)
        if self._printed is not None:
            for rank in envs:
                streams = {number: paths for number, paths in ((1, dest.stdouts), (2, dest.stderrs)) if not paths[rank]}
                for number, channel in self._printed.open(rank, streams).items():
                    streams[number][rank] = f"/dev/fd/{channel.writer}"
        return dest

    def _unnamed(self, size: int) -> LogsDest:
        dest = LogsDest(dict.fromkeys(range(size), ""), dict.fromkeys(range(size), ""))
        tee = to_map(self._tee, size)
        for rank in range(size):
            dest.error_files[rank] = self._slot(memory=True)
            shown = not self._local_ranks_filter or rank in self._local_ranks_filter
            for stream, paths, tailed in (
                (Std.OUT, dest.stdouts, dest.tee_stdouts),
                (Std.ERR, dest.stderrs, dest.tee_stderrs),
            ):
                if not shown:
                    paths[rank] = os.devnull
                elif tee[rank] & stream:
                    paths[rank] = tailed[rank] = self._slot(memory=False)
        return dest

    def _slot(self, memory: bool) -> str:
        """Return the path of a new empty file. With `memory`, writes succeed even if the disk is full."""
        file: IO[Any]
        if sys.platform == "linux":
            file = os.fdopen(os.memfd_create("paceline"), "w") if memory else tempfile.TemporaryFile()  # noqa: SIM115
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            file = tempfile.NamedTemporaryFile(prefix="paceline-")  # noqa: SIM115
            path = file.name
        self._open.append(file)
        return path

    def close(self) -> None:
        """Close the unnamed files."""
        for file in self._open:
            file.close()
        self._open = []
        if self._printed is not None:
            self._printed.end_start()
