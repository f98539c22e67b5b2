"""Runs each check in separate processes, so that a crash, hang or lack of memory does not stop the others."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import paceline
from gpu_checks.catalogue import CHECKS, Check, Ranks
from gpu_checks.rows import NotRun, Place, Row, Verdict, not_run
from paceline.core.messages import signal_name
from paceline.launch.job import LOOPBACK, loopback_store

GRACE_S = 5.0
"""How long the other ranks may continue after a rank has ended early."""
KILL_AFTER_S = 5.0
"""At the time limit, a rank writes its stacks and exits. If it does not, it is killed after this time."""


@dataclass
class RankProcess:
    """The parent's view of one rank of a check."""

    process: Any
    connection: Connection
    log: Path
    rows: list[Row] = field(default_factory=list)
    is_complete: bool = False
    """Whether the rank has reached the end of the check."""

    def kill(self) -> None:
        """End the rank and its child processes."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


# -- in the child -------------------------------------------------------------------------------------------------


def serve(rank: int, size: int, port: int, path: str, on_gpu: bool, log: Path, pipe: Any) -> None:
    """Run one rank of the check `path`: send its rows, followed by None."""
    os.setsid()  # in a separate process group, so that it can be killed together with its children
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    check: Check = next(check for check in CHECKS if check.path == path)
    faulthandler.enable()
    faulthandler.dump_traceback_later(check.seconds, exit=True)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    at = rank if check.ranks is Ranks.SEVERAL else 0
    place = Place(rank, size, torch.device("cuda", at) if on_gpu else torch.device("cpu"), log.parent)
    try:
        _be_rank(place, port, check, pipe)
    except NotRun as reason:
        pipe.send(not_run(check.name, str(reason)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(Row(check.name, f"{type(error).__name__}: {error}".splitlines()[0], Verdict.FAILED))
    else:
        pipe.send(None)
        return
    sys.stderr.flush()
    os._exit(3)  # a normal exit could wait for other ranks


def _be_rank(place: Place, port: int, check: Check, pipe: Any) -> None:
    rank, size = place.rank, place.size
    if size > 1:
        numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        if check.ranks is Ranks.HOSTS:
            # NCCL does not allow two ranks of the same host on one GPU, so pretend that they are on different hosts,
            # which it connects with sockets.
            numbers |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "NCCL_HOSTID": rank}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update(MASTER_ADDR=LOOPBACK, TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the host may have no network
    if place.on_gpu:
        torch.cuda.set_device(place.device)
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < check.gib:
            raise NotRun(f"it needs about {check.gib:g} GiB of GPU memory, and only {free:.1f} GiB are free")
    else:
        torch.set_num_threads(1)
    backend = "gloo" if check.ranks is Ranks.SHARED else None
    world = paceline.init(backend) if check.joined else None
    for row in check.run(place):
        pipe.send(row)
    if world is not None:
        place.synchronize()
        world.close()


def _end_with_parent(pipe: Any) -> None:
    with suppress(EOFError, OSError):
        pipe.recv()
    os.killpg(os.getpgid(0), signal.SIGKILL)


# -- in the parent ------------------------------------------------------------------------------------------------


def sizes(check: Check, on_gpu: bool) -> int:
    """Return the number of ranks; 0 if there are too few GPUs."""
    if check.ranks is Ranks.ONE:
        return 1
    if check.ranks in (Ranks.SHARED, Ranks.HOSTS) or not on_gpu:
        return 2
    gpus = torch.cuda.device_count()
    return gpus if gpus > 1 else 0


def run(check: Check, on_gpu: bool) -> tuple[list[Row], str]:
    """Run a check. Return its rows and, after a failure, the last lines of the ranks' output."""
    size = sizes(check, on_gpu)
    if size == 0:
        return [not_run(check.name, "this machine has one GPU, and each rank needs one")], ""
    with tempfile.TemporaryDirectory() as folder, started(check, size, on_gpu, folder) as ranks:
        began = time.monotonic()
        listen(ranks, began + check.seconds + KILL_AFTER_S)
        took = time.monotonic() - began
        for rank in ranks:
            rank.process.join(KILL_AFTER_S if rank.is_complete else 1.0)
        rows = merged(check, ranks, took)
        has_failed = any(row.verdict is Verdict.FAILED for row in rows)
        logs = [f"rank {at}:\n{tail(rank.log)}" for at, rank in enumerate(ranks) if rank.log.exists()]
        return rows, "\n".join(logs) if has_failed else ""


@contextmanager
def started(check: Check, size: int, on_gpu: bool, folder: str) -> Iterator[list[RankProcess]]:
    """Start the ranks of a check, and end them when the block ends."""
    context = multiprocessing.get_context("forkserver")
    # Ranks can be forked from the server, because it loads torch without initializing CUDA.
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "gpu_checks.children"])
    ranks: list[RankProcess] = []
    store = loopback_store()  # otherwise, rank 0 would need a free port
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            log = Path(folder, f"rank-{rank}.log")
            arguments = (rank, size, store.port, check.path, on_gpu, log, theirs)
            process = context.Process(target=serve, args=arguments)
            process.start()
            theirs.close()
            ranks.append(RankProcess(process, ours, log))
        yield ranks
    finally:
        for started_rank in ranks:
            started_rank.kill()
            started_rank.connection.close()


def listen(ranks: list[RankProcess], deadline: float) -> None:
    """Receive rows until every rank has ended or the time is up."""
    talking = {rank.connection: rank for rank in ranks}
    while talking and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(talking), left):
            assert isinstance(connection, Connection)
            rank = talking[connection]
            try:
                row = connection.recv()
            except (EOFError, OSError):
                del talking[connection]
                if not rank.is_complete:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                continue
            if row is None:
                rank.is_complete = True
            else:
                rank.rows.append(row)


def merged(check: Check, ranks: list[RankProcess], took: float) -> list[Row]:
    """Return the rows of rank 0, those that failed on another rank, and one for each rank that died without a reason.

    A row named after the check gives the reason why a rank ended early.
    """
    rows = list(ranks[0].rows)
    for number, rank in enumerate(ranks[1:], start=1):
        rows += [
            replace(row, value=f"rank {number}: {row.value}")
            for row in rank.rows
            if (row.verdict is Verdict.FAILED or row.what == check.name) and row not in rows
        ]
    has_said_why = any(row.what == check.name for row in rows)
    for at, rank in enumerate(ranks):
        where = f"rank {at} " if len(ranks) > 1 else ""
        code = rank.process.exitcode
        if rank.is_complete and code != 0:
            rows.append(Row(check.name, f"{where}reached the end of the check and {death(code)}", Verdict.FAILED))
        elif not rank.is_complete and not has_said_why:
            rows.append(Row(check.name, f"{where}{death(code)} after {took:.0f} s", Verdict.FAILED))
    return rows


def death(code: int | None) -> str:
    """Describe how a rank ended, for example as "died of SIGSEGV". At the time limit, it exits with code 1."""
    if code is None:
        return "did not end"
    if code < 0:
        return f"died of {signal_name(-code)}"
    return "was not at its end" if code == 1 else f"ended with exit code {code}"


def tail(log: Path, lines: int = 60) -> str:
    """Return the last lines of a rank's output."""
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:])
