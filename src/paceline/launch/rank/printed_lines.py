"""Passes on the output of the ranks in whole lines, whatever prints it: Python, C, a child process, in pieces or not.

    ranks                        the launcher's thread                         the launcher's streams
    stdout, stderr  ──pipes──▶   keeps a line until it is complete    ──▶      stdout, stderr

Where the launcher's stream is a terminal, the ranks get a pseudo-terminal, so that they draw bars and colors as on any
other. A rank neither waits for a stream that nobody reads nor fails because of one that is closed or full.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import termios
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from paceline.core.output import messages
from paceline.core.output.messages import MESSAGE_S

LONGEST = 2**24
"""Bytes of a line after which it is passed on although it is not complete."""
PROMPT_S = 0.25
"""Seconds after which an incomplete line is shown on a terminal: it may ask for an answer."""
MOST = 2**23
"""Bytes that wait for a stream. Then its ranks wait too, but not for more than :data:`STUCK_S` if nothing is read."""
STUCK_S = 5.0


class Stream:
    """A stream of the launcher, with the text that waits to be written to it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_terminal = os.isatty(descriptor)
        # A pipe that poll() calls writable takes so many bytes without a wait.
        self._piece = 2**20 if stat.S_ISREG(os.fstat(descriptor).st_mode) else select.PIPE_BUF
        self.pending = bytearray()
        self.total = 0
        """Number of bytes that were ever added."""
        self.owner: Channel | None = None
        """The channel whose incomplete line stands at the end."""
        self._wrote_at = time.monotonic()
        self._left_out = 0

    def add(self, text: bytes, owner: Channel | None = None) -> None:
        """Append `text`, on a new line if the incomplete line of another channel stands at the end."""
        if owner is not None and self.is_full and self.is_stuck:  # the launcher's own messages are kept
            self._left_out += text.count(b"\n")
        elif text:
            left_out, self._left_out = self._left_out, 0
            if left_out:
                text = b"note: %d lines of ranks are left out, because nobody read them\n" % left_out + text
            if self.owner is not None and self.owner is not owner:
                self.owner.is_at_start = True
                text = b"\n" + text
            self.owner = None if text.endswith(b"\n") else owner
            if not self.pending:
                self._wrote_at = time.monotonic()  # it has not waited yet
            self.pending += text
            self.total += len(text)

    def end_line(self) -> None:
        """Complete the last line, for what the launcher says next."""
        if self.owner is not None:
            self.add(b"\n", self.owner)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that ranks have to wait, too."""
        return len(self.pending) > MOST

    @property
    def is_stuck(self) -> bool:
        """Whether nothing could be written for long, although text waits."""
        return bool(self.pending) and time.monotonic() - self._wrote_at > STUCK_S

    @property
    def written(self) -> int:
        """Number of bytes of :attr:`total` that wait no longer."""
        return self.total - len(self.pending)

    def write(self) -> None:
        """Write some of what waits, up to the end of a line if possible; drop all of it if that fails."""
        piece = self.pending[: self._piece]
        piece = piece[: piece.rfind(b"\n") + 1] or piece
        try:
            count = os.write(self.descriptor, piece)
        except BlockingIOError:
            return
        except OSError:  # the stream is closed or full, or its reader is gone
            count = len(self.pending)
        del self.pending[:count]
        self._wrote_at = time.monotonic()


class Channel:
    """The pipe or pseudo-terminal to which a rank prints, and its line that is not complete yet."""

    def __init__(self, stream: Stream, rank: int, label: bytes) -> None:
        self.stream, self.rank, self._label = stream, rank, label
        self.reader, self.writer = _pseudo_terminal() if stream.is_terminal else os.pipe()
        os.set_blocking(self.reader, False)
        self._size = b""
        self.rest = bytearray()
        self.came_at = 0.0
        """When the latest part of it came."""
        self.is_at_start = True
        """Whether the next text begins a line."""
        self.resize()

    def resize(self) -> None:
        """Give a pseudo-terminal the size of the launcher's terminal."""
        if self.stream.is_terminal:
            with suppress(OSError):
                size = fcntl.ioctl(self.stream.descriptor, termios.TIOCGWINSZ, bytes(8))
                if size != self._size:
                    self._size = fcntl.ioctl(self.reader, termios.TIOCSWINSZ, size)

    def read(self) -> bytes:
        """Return some of what was printed; nothing if there is nothing."""
        with suppress(OSError):
            return os.read(self.reader, 2**16)
        return b""

    def take(self, printed: bytes, at_once: bool) -> None:
        """Pass on the complete lines; `at_once` also the rest."""
        self.rest += printed
        self.came_at = time.monotonic()
        size = self.rest.rfind(b"\n", len(self.rest) - len(printed)) + 1
        # A progress bar goes back to the start of its line, which ends the text before; "\r\n" is one end of a line.
        size = max(size, self.rest.rfind(b"\r", size, len(self.rest) - 1))
        self.show(len(self.rest) if at_once or len(self.rest) > LONGEST else size)

    def show(self, size: int) -> None:
        """Pass on the first `size` bytes of :attr:`rest`."""
        text = bytes(self.rest[:size])
        del self.rest[:size]
        if self._label:
            text = b"".join(map(self._labelled, text.splitlines(keepends=True)))
        self.stream.add(text, self)

    def _labelled(self, line: bytes) -> bytes:
        begins, self.is_at_start = self.is_at_start and line != b"\r", line.endswith((b"\n", b"\r"))
        return self._label + line if begins else line

    def close(self) -> None:
        """Release both ends."""
        os.close(self.reader)
        os.close(self.writer)


class Order:
    """Tells the thread what to do once it has passed on what ranks have printed.

    Args:
        text: a message of the launcher.
        closes: whether the ranks have ended.
        ends: whether the job has ended, too.
    """

    def __init__(self, text: str = "", closes: bool = False, ends: bool = False) -> None:
        self.text, self.closes, self.ends = text, closes, ends
        self.targets: dict[Stream, int] = {}
        """How much must be written of each stream until the order is carried out."""
        self.done = threading.Event()


class PrintedLines:
    """The output of the ranks of one job; a context manager, at whose end it is written.

    Only its thread touches channels and streams; others give it orders.

    Args:
        prefix: whether each line begins with the number of its rank.
        is_stopped: tells whether the launcher was told to end; then it does not wait for a reader that does not read.
    """

    def __init__(self, prefix: bool = False, is_stopped: Callable[[], bool] = lambda: True) -> None:
        self._prefix, self._is_stopped = prefix, is_stopped
        self._streams = _streams()
        self._lock = threading.Lock()
        """Held for the next two."""
        self._channels: list[Channel] = []
        self._orders: list[Order] = []
        self._woken, self._wake = os.pipe()
        self._thread: threading.Thread | None = None

    def open(self, rank: int, numbers: Iterable[int]) -> dict[int, Channel]:
        """Return the channels of a rank for those of its streams, 1 and 2, that the launcher has, too."""
        label = b"rank %d | " % rank if self._prefix else b""
        channels: dict[Stream, Channel] = {}
        found = {}
        for number in numbers:
            if (stream := self._streams.get(number)) is not None:
                # One channel for both if the launcher's end in one place, so that they keep their order.
                found[number] = channels[stream] = channels.get(stream) or Channel(stream, rank, label)
        with self._lock:
            self._channels += channels.values()
        if self._thread is None:
            # A daemon, so that it cannot keep a launcher alive that ends by an error.
            self._thread = threading.Thread(target=self._run, name="paceline-lines", daemon=True)
            self._thread.start()
        self._give(Order())
        return found

    def say(self, text: str) -> None:
        """Print a message of the launcher on stderr, after all that ranks have printed before."""
        if self._thread is None or 2 not in self._streams:
            messages.say(text)
        else:
            self._give(Order(text=text)).done.wait(MESSAGE_S)

    def end_start(self) -> None:
        """Pass on the rest of the output of ranks that have ended."""
        if self._thread is not None:
            self._give(Order(closes=True)).done.wait(MESSAGE_S)

    def __enter__(self) -> PrintedLines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._give(Order(closes=True, ends=True))
            while self._thread.is_alive():
                self._thread.join(0.1)
                if self._is_stopped() and any(stream.is_stuck for stream in self._streams.values()):
                    return
        os.close(self._woken)
        os.close(self._wake)

    def _give(self, order: Order) -> Order:
        with self._lock:
            self._orders.append(order)
        os.write(self._wake, b".")
        return order

    # The thread

    def _run(self) -> None:
        under_way: list[Order] = []
        while not any(order.ends and order.done.is_set() for order in under_way):
            under_way = [order for order in under_way if not order.done.is_set()]
            ready = self._wait()
            with self._lock:
                channels, orders, self._orders = list(self._channels), self._orders, []
            ranks = {channel.rank for channel in channels}
            for channel in channels:
                channel.resize()
                if orders or channel.reader in ready:
                    _pass_on(channel, bool(orders), is_alone=len(ranks) == 1)
                elif channel.stream.is_terminal and time.monotonic() - channel.came_at > PROMPT_S:
                    channel.show(len(channel.rest))
            for order in orders:
                self._obey(order)
            under_way += orders
            for stream in set(self._streams.values()):
                if stream.descriptor in ready:
                    stream.write()
            for order in under_way:
                if all(stream.written >= target for stream, target in order.targets.items()):
                    order.done.set()

    def _wait(self) -> set[int]:
        """Wait until there is something to do; return the descriptors that are ready."""
        poll, timeout = select.poll(), None
        poll.register(self._woken, select.POLLIN)
        for channel in self._channels:
            if not channel.stream.is_full or channel.stream.is_stuck:
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

    def _obey(self, order: Order) -> None:
        if order.text:
            self._streams[2].end_line()
            self._streams[2].add(f"{order.text}\n".encode(errors="backslashreplace"))
        if order.closes:
            with self._lock:
                closed, self._channels = self._channels, []
            for channel in closed:
                channel.show(len(channel.rest))
                channel.close()
            for number, stream in self._streams.items():
                if number == 2 or stream.is_terminal:  # a message of the launcher may come
                    stream.end_line()
        order.targets = {stream: stream.total for stream in self._streams.values()}


def _pass_on(channel: Channel, is_all: bool, is_alone: bool) -> None:
    """Pass on some of what was printed to the channel, or all that is there now."""
    for _ in range(MOST // 2**16 if is_all else 1):
        if not (printed := channel.read()):
            return
        channel.take(printed, at_once=is_alone or channel.stream.owner is channel)


def _streams() -> dict[int, Stream]:
    """Return the launcher's stdout and stderr, if they are open; one for both if they are the same file."""
    streams: dict[int, Stream] = {}
    files: dict[tuple[int, int], Stream] = {}
    for number in (1, 2):
        with suppress(OSError):
            status = os.fstat(number)
            file = (status.st_dev, status.st_ino)
            streams[number] = files[file] = files.get(file) or Stream(number)
    return streams


def _pseudo_terminal() -> tuple[int, int]:
    """Return both ends of a pseudo-terminal that leaves ends of lines alone; of a pipe if there is none to be had."""
    with suppress(OSError):
        # The leader of a session that has no controlling terminal would get this one, and SIGHUP when it is closed.
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
