"""The process of a rank, which runs its cells."""

from __future__ import annotations

import builtins
import faulthandler
import getpass
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import paceline
from paceline.core.processes.world import current, usable_backends
from paceline.errors import UsageError
from paceline.launch.rank.failure_record import consequence
from paceline.tools.notebook.messages import Failure
from paceline.tools.notebook.rank.shell import Channel, RankShell


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
