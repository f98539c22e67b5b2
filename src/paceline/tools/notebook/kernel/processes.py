"""The processes of a notebook's ranks: started from a fork server, watched, replaced when they die."""

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
"""Modules that are imported before ranks are forked, besides those of every training."""
CONNECT_S = 120.0
"""Seconds that a rank may take to start; a busy machine without a fork server needs many."""
END_S = 2.0
"""Seconds that a rank may take to end when the kernel closes its connection."""


@dataclass
class Process:
    """One rank's process, and the kernel's ends of its pipe and connection."""

    rank: int
    process: ForkedRank | subprocess.Popen[bytes]
    output: int
    """Descriptor of the pipe with the rank's output."""
    connection: Connection | None = None
    """Connection for messages; None until the rank has connected."""

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self.process.pid

    def read(self) -> bytes:
        """Return the output since the last call, without waiting: all that a pipe holds at once, which is 64 KiB."""
        parts: list[bytes] = []
        # The end of what has been printed so far; the pipe does not block.
        with suppress(BlockingIOError):
            # Not without end, because a rank may print faster than this reads (`!yes`), and nobody heeds a Ctrl-C here.
            while len(parts) < 16 and (part := os.read(self.output, 65536)):
                parts.append(part)
        return b"".join(parts)

    def kill(self) -> None:
        """End the process and its children at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)

    def close(self) -> None:
        """Release the kernel's ends."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


class Processes:
    """The ranks' processes, and the parts that they share: fork server, stores, black boxes.

    Used by one thread, which lives as long as the kernel, because the system ends the ranks together with that thread.
    """

    def __init__(self, start: Start) -> None:
        check_room(start.nproc)
        if start.backend is not None:
            check_available(start.backend)  # before seconds are spent on ranks
        self.start = start
        self._resources = ExitStack()
        """Resources that :meth:`close` releases."""
        self.ranks: dict[int, Process] = {}
        """Processes that are there, by rank."""
        gpus = {} if start.gpu_ids is None else {"CUDA_VISIBLE_DEVICES": visible_gpus(start.gpu_ids, os.environ)}
        # The backend makes figures displays, which travel to the kernel, as it does in a kernel.
        env = {**gpus, **timeout_environment(start.timeout), "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        try:
            self._listener, self._address = _listen()
            self._resources.callback(self._listener.close)
            # The abstract socket can be reached by every user of the host, so ranks prove that they are ours.
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
            # The store at MASTER_PORT is the kernel's; without this, rank 0 would try to open one there.
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
        """Start these ranks, and wait until they are connected."""
        # Started now, if it is not running, because a fork server may have ended since.
        self._server.prepare(lambda: False)
        for rank in wanted:
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            with os.fdopen(writing, "wb") as output:
                self.ranks[rank] = Process(rank, self._started(rank, output), reading)
        deadline = time.monotonic() + CONNECT_S
        while missing := [rank for rank in wanted if self.ranks[rank].connection is None]:
            if wait([self._listener], 0.05):
                self._accept(missing)
            for rank in missing:
                code = self.ranks[rank].process.poll()
                if code is not None or time.monotonic() > deadline:
                    printed = self.ranks[rank].read().decode(errors="replace").strip()
                    how = "did not start in time" if code is None else f"ended at its start ({End(rank, code, 0).how})"
                    raise PacelineError(f"rank {rank} {how}{': ' + printed if printed else ''}")
        if self.boxes is not None:
            self.boxes.began({rank: each.pid for rank, each in self.ranks.items()})
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
            # A group of its own, which kill() ends with its children and a Ctrl-C in the kernel's terminal spares.
            start_new_session=True,
        )

    def _accept(self, missing: list[int]) -> None:
        """Accept a connection, and close it unless it begins with the secret word: any user of the host can connect."""
        link = self._listener.accept()[0]
        if credentials(link)[1] != os.geteuid():  # before a read, which half a message would block
            link.close()
            return
        connection = Connection(link.detach())
        try:
            word, rank = connection.recv_bytes(100).split() if connection.poll(END_S) else (b"", b"")
            # As bytes, because compare_digest() raises for text beyond ASCII.
            if hmac.compare_digest(word, self._word.encode()) and int(rank) in missing:
                self.ranks[int(rank)].connection = connection
                return
        except (EOFError, OSError, ValueError):
            pass
        connection.close()

    def end_of(self, rank: int) -> str | None:
        """Return how this rank's process ended, with its phase by the black box; None if it runs."""
        code = self.ranks[rank].process.poll()
        if code is None:
            return None
        how = End(rank, code, time.time()).how
        with suppress(OSError, ValueError):
            if self.boxes is not None and (box := read_box(path_of(self.boxes.path, rank))) is not None:
                return f"{how}, {state_of(box, time.monotonic(), raised=False).moment}"
        return how

    def remove(self, rank: int) -> None:
        """End a rank and its children, and forget it."""
        process = self.ranks.pop(rank)
        process.kill()
        process.close()
        if self.boxes is not None:
            with suppress(OSError), path_of(self.boxes.path, rank).open("r+b") as box:
                # Emptied, or its last phase would be shown for the rank that is started in its place.
                box.write(bytes(os.fstat(box.fileno()).st_size))

    def close(self) -> None:
        """End all ranks and release everything; harmless when it is done."""
        for process in self.ranks.values():
            if process.connection is not None:
                process.connection.close()
                process.connection = None
        deadline = time.monotonic() + END_S
        for process in self.ranks.values():
            while process.process.poll() is None and time.monotonic() < deadline:
                process.read()  # a rank that prints into a full pipe could not end
                time.sleep(0.01)
        for rank in list(self.ranks):
            self.remove(rank)
        self._resources.close()


def _listen() -> tuple[socket.socket, bytes]:
    """Return a socket to which ranks connect, and its address, which is abstract: no file is left after a crash."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = b"\0paceline-" + secrets.token_hex(8).encode()
    listener.bind(address)
    listener.listen(64)
    return listener, address


def visible_gpus(gpu_ids: tuple[int, ...], environment: Any) -> str:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` that shows ranks these GPUs of the kernel."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("--gpu-ids was given, but torch sees no GPU here; leave it out to run on the CPU")
    if unknown := [gpu for gpu in gpu_ids if gpu >= count]:
        raise UsageError(f"--gpu-ids: there is no GPU {unknown[0]}; torch sees {count}, from 0 to {count - 1}")
    names = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpu_ids)
