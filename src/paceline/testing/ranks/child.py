"""The life of a forked rank, from the fork to its end; nothing of the test process goes on in it."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from paceline.core.processes.private_store import STORE
from paceline.launch.loopback import LOOPBACK
from paceline.launch.rank.child import die_with
from paceline.launch.rank.stack_dump import number as stack_signal
from paceline.launch.rank.stack_dump import path_of
from paceline.testing.ranks.outcomes import Outcome
from paceline.testing.ranks.recorded_collectives import Note

ENDED_BADLY = 70


@dataclass
class Connected:
    """A rank's place, and its connection to the test process."""

    rank: int
    size: int
    port: int
    """Port of the store, on loopback."""
    private: str
    """Value of ``PACELINE_STORE``, by which ``paceline.init`` finds the private store of ranks on one host."""
    pipe: Connection
    note: Note
    folder: Path
    """Folder for the rank's files, which the test process deletes."""
    drawn: Any
    """State of the ``random`` module in the test process."""

    def send(self, what: str, value: Any = None) -> None:
        """Tell the test process something."""
        self.pipe.send((what, value))

    def request(self, what: str) -> bool:
        """Ask the test process something."""
        self.send(what)
        return bool(self.pipe.recv())


def be_rank(body: Callable[[Connected], Outcome], connected: Connected) -> NoReturn:
    """Run `body` in this process, which was just forked, and wait to be killed."""
    try:
        gc.freeze()  # or the first collection would copy the memory of all objects of the test process
        os.setpgid(0, 0)  # a group of its own, so that the rank can be killed with its children
        die_with(os.getppid())
        signal.set_wakeup_fd(-1)  # the descriptor belongs to an event loop of the test process
        random.setstate(connected.drawn)  # Python gives forks another; a fixture's seed is for the ranks, too
        torch.set_num_threads(1)  # the fork has none of the test process's OpenMP threads, and would wait for them
        with path_of(connected.folder, connected.rank).open("w") as stack:
            faulthandler.enable(stack)
            if stack_signal():
                faulthandler.register(stack_signal(), stack, all_threads=False, chain=False)
            connected.send("ended", body(connected))
            with suppress(EOFError, OSError):
                connected.pipe.recv()
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc(file=sys.__stderr__)
    finally:
        # Whatever happened: if this returned, a second pytest would go on with the session.
        os._exit(ENDED_BADLY)


def environment(connected: Connected, hosts: int) -> dict[str, str]:
    """Return torchrun's environment for this rank, as if the ranks were on so many hosts."""
    local = connected.size // hosts
    place = {
        "RANK": connected.rank,
        "WORLD_SIZE": connected.size,
        "LOCAL_RANK": connected.rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": connected.rank // local,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": connected.port,
        # The store is the test process's; without this, rank 0 would try to open one at its port.
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    settings = {name: str(value) for name, value in place.items()}
    if sys.platform == "linux":
        # Or Gloo takes the address of the host's name, which need not resolve. Only Linux calls loopback lo.
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    if hosts > 1:
        settings["PACELINE_HOSTS"] = str(hosts)
    else:
        settings[STORE] = connected.private
    return settings
