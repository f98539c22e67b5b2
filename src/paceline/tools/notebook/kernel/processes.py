"""The rank processes of a notebook: forked from a fork server, monitored, and replaced when they die."""

from __future__ import annotations

import hmac
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from paceline.comm.shm.introduction import credentials
from paceline.core.processes.private_store import STORE
from paceline.core.processes.world import check_available
from paceline.core.telemetry.flight_record import FOLDER, path_of, read_box
from paceline.core.telemetry.job_directory import JobFolder
from paceline.errors import PacelineError, UsageError
from paceline.launch.failures.rank_state import state_of
from paceline.launch.failures.root_cause import End
from paceline.launch.fork_server.client import ForkedRank, ForkServer
from paceline.launch.host_limits import check_room
from paceline.launch.job import Job, black_boxes, fork_server, rank_environment, tied, timeout_environment
from paceline.launch.loopback import LOOPBACK, LoopbackStores
from paceline.launch.rank.channels import Logs, RankFiles
from paceline.tools.notebook.cell_parser import Start
from paceline.tools.notebook.messages import SETTING

COMMAND = [sys.executable, "-u", "-m", "paceline.tools.notebook"]
MODULES = ("paceline.tools.notebook.rank.main",)
"""Additional modules to import before ranks are forked."""
CONNECT_S = 120.0
"""Start timeout in seconds; long, because a busy machine without a fork server is slow."""
END_S = 2.0
"""Seconds that a rank may take to exit after the kernel closes its connection."""


@dataclass
class Process:
    """One rank's process, and the kernel's ends of its pipe and connection."""

    process: ForkedRank | subprocess.Popen[bytes]
    output: int
    """File descriptor of the pipe with the rank's output."""
    connection: Connection | None = None
    """Message connection; None until the rank has connected."""

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
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


class Processes:
    """The rank processes and their shared resources: fork server, stores, black boxes.

    Must be used by a thread that lives as long as the kernel, because the ranks are killed when that thread exits.
    """

    def __init__(self, start: Start) -> None:
        check_room(start.nproc)
        if start.backend is not None:
            check_available(start.backend)  # fail early, because ranks start slowly
        self.start = start
        self._resources = ExitStack()
        """Resources to release in :meth:`close`."""
        self.ranks: dict[int, Process] = {}
        """Processes by rank."""
        gpus = {} if start.gpu_ids is None else {"CUDA_VISIBLE_DEVICES": visible_gpus(start.gpu_ids, os.environ)}
        # This Matplotlib backend turns figures into displays, which ranks send to the kernel.
        env = {**gpus, **timeout_environment(start.timeout), "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        try:
            self._listener, self._address = _listen()
            self._resources.callback(self._listener.close)
            # Any user of the host can connect to the abstract socket, so ranks authenticate with a secret.
            self._word = secrets.token_hex(16)
            stores = LoopbackStores()
            self._resources.callback(stores.close)
            job = Job(COMMAND, start.nproc, env=env, modules=MODULES)
            self.boxes: JobFolder | None = black_boxes("notebook", ["notebook"], start.nproc)
            if self.boxes is not None:
                self._resources.callback(self.boxes.remove)
            files = self._resources.enter_context(RankFiles(Logs()))
            slots: dict[int, dict[str, str]] = {rank: {} for rank in range(start.nproc)}
            files.reify(slots)
            common = {**os.environ, **rank_environment(job), **env, STORE: stores.private}
            common |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(stores.port), "GROUP_RANK": "0"}
            # The kernel hosts the store at MASTER_PORT. Without this variable, rank 0 would host a second one.
            common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(start.nproc)}
            common |= {"LOCAL_WORLD_SIZE": str(start.nproc), SETTING: f"{self._address.hex()}:{self._word}"}
            common[FOLDER] = "" if self.boxes is None else str(self.boxes.path)
            self._environments = {
                rank: {**common, **slots[rank], "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in slots
            }
            self._server: ForkServer = self._resources.enter_context(fork_server(job))
        except BaseException:
            self.close()
            raise

    def spawn(self, wanted: list[int]) -> None:
        """Start these ranks and wait until they are connected."""
        # Restarts the fork server if it has died.
        self._server.prepare(lambda: False)
        for rank in wanted:
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            with os.fdopen(writing, "wb") as output:
                self.ranks[rank] = Process(self._started(rank, output), reading)
        deadline = time.monotonic() + CONNECT_S
        while missing := [rank for rank in wanted if self.ranks[rank].connection is None]:
            if wait([self._listener], 0.05):
                self._accept(missing)
            for rank in missing:
                code = self.ranks[rank].process.poll()
                if code is not None or time.monotonic() > deadline:
                    printed = self.ranks[rank].read().decode(errors="replace").strip()
                    how = (
                        "did not start in time"
                        if code is None
                        else f"ended during its start ({End(rank, code, 0).how})"
                    )
                    raise PacelineError(f"rank {rank} {how}{': ' + printed if printed else ''}")
        if self.boxes is not None:
            self.boxes.began({rank: process.pid for rank, process in self.ranks.items()})
        for rank in wanted:
            gpu_id = None if self.start.gpu_ids is None else self.start.gpu_ids[rank]
            connection = self.ranks[rank].connection
            assert connection is not None
            connection.send([{"backend": self.start.backend, "gpu_id": gpu_id}])

    def _started(self, rank: int, output: Any) -> ForkedRank | subprocess.Popen[bytes]:
        environment = self._environments[rank]
        if self._server.is_running:
            return self._server.fork(environment, output, output)
        return subprocess.Popen(
            [sys.executable, *tied(COMMAND)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # In a separate process group, so that kill() also ends children, and Ctrl-C in the terminal ends neither.
            start_new_session=True,
        )

    def _accept(self, missing: list[int]) -> None:
        """Accept a connection, and close it unless it begins with the secret."""
        link = self._listener.accept()[0]
        if credentials(link)[1] != os.geteuid():  # check before reading, which could block
            link.close()
            return
        connection = Connection(link.detach())
        try:
            word, rank = connection.recv_bytes(100).split() if connection.poll(END_S) else (b"", b"")
            # Compare bytes, because compare_digest() raises an error for non-ASCII text.
            if hmac.compare_digest(word, self._word.encode()) and int(rank) in missing:
                self.ranks[int(rank)].connection = connection
                return
        except (EOFError, OSError, ValueError):
            pass
        connection.close()

    def end_of(self, rank: int) -> str | None:
        """Return how this rank's process ended, including its phase; None if it is running."""
        code = self.ranks[rank].process.poll()
        if code is None:
            return None
        how = End(rank, code, time.time()).how
        with suppress(OSError, ValueError):
            if self.boxes is not None and (box := read_box(path_of(self.boxes.path, rank))) is not None:
                return f"{how}, {state_of(box, time.monotonic(), raised=False).moment}"
        return how

    def remove(self, rank: int) -> None:
        """Kill a rank with its children and forget it."""
        process = self.ranks.pop(rank)
        process.kill()
        process.close()
        if self.boxes is not None:
            # Otherwise, the new rank would be shown with the last phase of this one.
            self.boxes.clear([rank])

    def close(self) -> None:
        """End all ranks and release all resources. Can be called twice."""
        for process in self.ranks.values():
            if process.connection is not None:
                process.connection.close()
                process.connection = None
        deadline = time.monotonic() + END_S
        for process in self.ranks.values():
            while process.process.poll() is None and time.monotonic() < deadline:
                process.read()  # otherwise, a rank blocked on a full pipe could not exit
                time.sleep(0.01)
        for rank in list(self.ranks):
            self.remove(rank)
        self._resources.close()


def _listen() -> tuple[socket.socket, bytes]:
    """Return a listening socket and its abstract address, which leaves no file behind after a crash."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = b"\0paceline-" + secrets.token_hex(8).encode()
    listener.bind(address)
    listener.listen(64)
    return listener, address


def visible_gpus(gpu_ids: tuple[int, ...], environment: Any) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for ranks that use these GPUs of the kernel."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("--gpu-ids was given, but torch finds no GPU; omit it to run on the CPU")
    if unknown := [gpu for gpu in gpu_ids if gpu >= count]:
        raise UsageError(f"--gpu-ids: GPU {unknown[0]} does not exist; choose from 0 to {count - 1}")
    names = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpu_ids)
