"""A rank of a notebook: the process that runs its cells, started as ``python -u -m paceline.tools.notebook``."""

from __future__ import annotations

import builtins
import faulthandler
import getpass
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline.core.processes.world import current, usable_backends
from paceline.launch.rank.failure_record import consequence
from paceline.tools.notebook.messages import SETTING, Failure
from paceline.tools.notebook.rank.shell import Channel, RankShell, asking


@dataclass
class Rank:
    """This process, between the messages of the kernel."""

    channel: Channel
    shell: RankShell
    backend: str | None
    gpu_id: int | None
    """GPU of this rank in the user's numbers; None on the CPU, or where paceline.init() chooses."""
    is_busy: bool = False
    """Whether a request is being served, which an interrupt ends."""

    def serve(self) -> None:
        """Serve the kernel's requests until it ends."""
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
            if kind == "answer":  # it came too late: the question was interrupted
                continue
            result, failure = None, None
            try:
                self.is_busy = True
                result = functions[kind](*arguments)
                if isinstance(result, Failure):
                    result, failure = None, result
            # Also SystemExit and Ctrl-C, which end the cell, but not the rank with its variables.
            except BaseException as error:
                self.is_busy = False  # first, because nothing would catch an interrupt from here on
                line = f"{type(error).__name__}: {error}"
                failure = Failure(type(error).__name__, str(error), (line,), consequence(error) is not None)
            finally:
                self.is_busy = False
            self.channel.send("done", result, failure)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: end the cell that runs, but never in the midst of a message."""
        if self.is_busy and self.channel.in_message:
            self.channel.is_due = True
        elif self.is_busy:
            raise KeyboardInterrupt

    def join(self) -> str:
        """Make a process group with the other ranks, and set its facts as variables; returns its :meth:`place`."""
        world = paceline.init(self.backend)
        gpu_id = self.gpu_id
        if world.device.type == "cpu":
            gpu_id = None
        elif gpu_id is None:
            gpu_id = world.device.index
        self.shell.user_ns.update(rank=world.rank, world_size=world.size, device=world.device, gpu_id=gpu_id)
        return self.place()

    def place(self) -> str:
        """Return the device and the backends of the process group; nothing if a cell has destroyed it."""
        return f"{current().device}, {usable_backends()}" if dist.is_initialized() else ""

    def leave(self) -> None:
        """Leave the process group, without waiting for anyone."""
        if dist.is_initialized():
            with suppress(_Leaving), current():  # a world that is left by an error aborts, and does not wait for peers
                raise _Leaving

    def pull(self, names: Sequence[str]) -> list[bytes]:
        """Return the values of variables, each pickled."""
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise NameError(f"there is no variable {missing[0]!r} on rank {os.environ['RANK']}")
        values = []
        for name in names:
            buffer = io.BytesIO()
            try:
                torch.save(self.shell.user_ns[name], buffer)
            except Exception as error:
                kind = type(self.shell.user_ns[name]).__name__
                raise TypeError(f"{name!r}, a {kind}, cannot leave rank {os.environ['RANK']}: {error}") from error
            values.append(buffer.getvalue())
        return values


class _Leaving(Exception):
    """An error that makes a world leave without waiting."""


def connect(setting: str) -> Connection:
    """Return the connection to the kernel that `setting` describes: an address in hexadecimal digits, and a word."""
    address, word = setting.split(":")
    kernel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    kernel.connect(bytes.fromhex(address))
    connection = Connection(kernel.detach())
    connection.send_bytes(f"{word} {os.environ['RANK']}".encode())
    return connection


def main() -> None:
    """Serve the kernel that started this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C during the start must not end the rank
    faulthandler.enable()
    # Taken out of the environment, because programs that cells start must not get the secret word.
    connection = connect(os.environ.pop(SETTING))
    channel = Channel(connection)
    options = channel.receive()[0]
    shell = RankShell.start(channel, {})
    # A rank has no terminal; the kernel asks in its place.
    builtins.input = asking(channel)
    getpass.getpass = asking(channel)
    sys.argv = [""]  # as in a kernel
    try:
        Rank(channel, shell, options["backend"], options["gpu_id"]).serve()
    except (EOFError, ConnectionError):
        os._exit(0)  # without destroying the process group, which would wait for peers that may be gone
