"""The rank processes of a notebook: forked from a fork server, monitored, and replaced when they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from paceline.core.black_box import FOLDER, snapshot_of
from paceline.core.stores import STORE
from paceline.core.world import check_available
from paceline.errors import PacelineError
from paceline.launch.fork_client import ForkedRank
from paceline.launch.hook.run_module import module_command
from paceline.launch.job import (
    Job,
    LoopbackStores,
    black_boxes,
    child_arguments,
    fork_server,
    group_environment,
    rank_environment,
    timeout_environment,
)
from paceline.launch.output import Logs, RankFiles
from paceline.launch.rank_processes import exit_code
from paceline.launch.root_cause import End, state_of
from paceline.tools.notebook.cell_parser import Start

COMMAND = module_command("paceline.tools.notebook")
MODULES = ("paceline.tools.notebook.rank",)
"""Additional modules to import before ranks are forked."""
START_S = 120.0
"""Start timeout in seconds; long, because a busy machine without a fork server is slow."""
END_S = 2.0
"""Seconds that a rank may take to exit after the kernel closes its connection."""


@dataclass
class Process:
    """One rank's process, and the kernel's ends of its pipe and connection."""

    process: ForkedRank | subprocess.Popen[bytes]
    output: int
    """File descriptor of the pipe with the rank's output."""
    connection: Connection
    """The kernel's end of the message connection."""

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self.process.pid

    def read(self) -> bytes:
        """Return the output since the last call without blocking, 1 MiB at most."""
        parts: list[bytes] = []
        with suppress(BlockingIOError):  # the pipe is empty
            # Read a limited amount: a rank may print faster than this loop reads (`!yes`), and the loop ignores Ctrl-C.
            while len(parts) < 16 and (part := os.read(self.output, 65536)):
                parts.append(part)
        return b"".join(parts)

    def kill(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)

    def close(self) -> None:
        """Close the connection and the pipe."""
        self.connection.close()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


class Processes:
    """The rank processes and their shared resources: fork server, stores, black boxes.

    Must be used by a thread that lives as long as the kernel, because the ranks are killed when that thread exits.
    """

    def __init__(self, start: Start) -> None:
        if start.backend is not None:
            check_available(start.backend)  # fail early, because ranks start slowly
        self.start = start
        self._resources = ExitStack()
        """Resources to release in :meth:`close`."""
        self.ranks: dict[int, Process] = {}
        """Processes by rank."""
        # This Matplotlib backend turns figures into displays, which ranks send to the kernel.
        env = {**timeout_environment(start.timeout), "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        try:
            stores = LoopbackStores()
            self._resources.callback(stores.close)
            job = Job(COMMAND, start.nproc, env=env, modules=MODULES)
            self.boxes = self._resources.enter_context(black_boxes("notebook", ["notebook"], start.nproc))
            files = self._resources.enter_context(closing(RankFiles(Logs())))
            slots: dict[int, dict[str, str]] = {rank: {} for rank in range(start.nproc)}
            files.reify(slots)
            common = {**os.environ, **rank_environment(job), **env}
            common |= {STORE: stores.private, FOLDER: str(self.boxes.path)}
            self._environments = {
                rank: {**common, **slot, **group_environment(rank, start.nproc, stores.port)}
                for rank, slot in slots.items()
            }
            self._server = self._resources.enter_context(closing(fork_server(job)))
        except BaseException:
            self.close()
            raise

    def spawn(self, wanted: list[int]) -> None:
        """Start these ranks and wait until they are ready for messages."""
        # Restarts the fork server if it has died.
        self._server.prepare(lambda: False)
        for rank in wanted:
            connection, rank_end = Pipe()
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            with rank_end, os.fdopen(writing, "wb") as output:
                self.ranks[rank] = Process(self._started(rank, rank_end.fileno(), output), reading, connection)
        deadline = time.monotonic() + START_S
        for rank in wanted:
            self._wait_until_ready(rank, deadline)
        self.boxes.began({rank: process.pid for rank, process in self.ranks.items()})

    def _started(self, rank: int, rank_end: int, output: Any) -> ForkedRank | subprocess.Popen[bytes]:
        """Start a rank, whose standard input is its end of the connection."""
        environment = self._environments[rank]
        if self._server.is_running:
            return self._server.fork(environment, output, output, rank_end)
        return subprocess.Popen(
            [sys.executable, *child_arguments(COMMAND)],
            env=environment,
            stdin=rank_end,
            stdout=output,
            stderr=output,
            # In a separate process group, so that kill() also ends children, and Ctrl-C in the terminal ends neither.
            start_new_session=True,
        )

    def _wait_until_ready(self, rank: int, deadline: float) -> None:
        process = self.ranks[rank]
        while (code := exit_code(process.process)) is None and time.monotonic() < deadline:
            if process.connection.poll(0.05):
                with suppress(EOFError, OSError):  # the rank is exiting
                    process.connection.recv()
                    return
        how = "did not start in time" if code is None else f"exited while starting ({End(rank, code, 0).how})"
        printed = process.read().decode(errors="replace").strip()
        raise PacelineError(f"rank {rank} {how}{': ' + printed if printed else ''}")

    def end_of(self, rank: int) -> str | None:
        """Return how this rank's process ended, including its phase; None if it is running."""
        code = exit_code(self.ranks[rank].process)
        if code is None:
            return None
        how = End(rank, code, time.time()).how
        if (box := snapshot_of(self.boxes.path, rank)) is not None:
            return f"{how}, {state_of(box, time.monotonic(), raised=False).moment}"
        return how

    def remove(self, rank: int) -> None:
        """Kill a rank with its children and forget it."""
        process = self.ranks.pop(rank)
        process.kill()
        process.close()
        # Otherwise, the new rank would be shown with the last phase of this one.
        self.boxes.clear([rank])

    def close(self) -> None:
        """End all ranks and release all resources. Can be called twice."""
        for process in self.ranks.values():
            process.connection.close()
        deadline = time.monotonic() + END_S
        for process in self.ranks.values():
            while process.process.poll() is None and time.monotonic() < deadline:
                process.read()  # otherwise, a rank blocked on a full pipe could not exit
                time.sleep(0.01)
        for rank in list(self.ranks):
            self.remove(rank)
        self._resources.close()
