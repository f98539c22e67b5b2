"""Runs a test's body in a forked rank."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from paceline.launch.loopback import LOOPBACK
from paceline.launch.rank.child import die_with
from paceline.launch.rank.stack_dump import number as stack_signal
from paceline.launch.rank.stack_dump import path_of
from paceline.testing.ranks.outcomes import Outcome
from paceline.testing.ranks.recorded_collectives import Note

ENDED_BADLY = 70


@dataclass
class Connected:
    """A rank's number and its connection to the test process."""

    rank: int
    size: int
    port: int
    """Port of the store, on loopback."""
    pipe: Connection
    note: Note
    folder: Path
    """Folder for the rank's files, deleted by the test process."""
    drawn: Any
    """State of the ``random`` module in the test process."""

    def send(self, kind: str, value: Any = None) -> None:
        """Send a message to the test process."""
        self.pipe.send((kind, value))

    def request(self, kind: str) -> bool:
        """Send a question to the test process; return the answer."""
        self.send(kind)
        return bool(self.pipe.recv())


@contextmanager
def stacks_on_request(folder: Path, rank: int) -> Iterator[None]:
    """In the block, make this process write its stack into `folder` on a signal and when it crashes."""
    with path_of(folder, rank).open("w") as stack:
        faulthandler.enable(stack)
        if stack_signal():
            faulthandler.register(stack_signal(), stack, all_threads=False, chain=False)
        yield


def be_rank(body: Callable[[Connected], Outcome], connected: Connected) -> NoReturn:
    """Run `body` in this newly forked process, and wait to be killed."""
    try:
        gc.freeze()  # a garbage collection would copy the memory of all objects of the test process
        os.setpgid(0, 0)  # so that the rank can be killed together with its child processes
        die_with(os.getppid())
        signal.set_wakeup_fd(-1)  # the descriptor belongs to an event loop of the test process
        random.setstate(connected.drawn)  # Python reseeds forks, but a fixture's seed should also apply to the ranks
        torch.set_num_threads(1)  # the fork lacks the test process's OpenMP threads, and would wait for them
        with stacks_on_request(connected.folder, connected.rank):
            connected.send("ended", body(connected))
            with suppress(EOFError, OSError):
                connected.pipe.recv()
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc(file=sys.__stderr__)
    finally:
        # If this function returned, the rank would continue the pytest session.
        os._exit(ENDED_BADLY)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for a rank on a single host, with the store at `port`."""
    settings = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # Tells torch that the test process serves the store. Otherwise, rank 0 would try to open one at the same port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if sys.platform == "linux":
        # By default Gloo resolves the host's name, which may fail. Only on Linux is the loopback interface named lo.
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    return settings
