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
from paceline.launch.loopback import LOOPBACK, loopback_store

GRACE_S = 5.0
"""How long the other ranks may continue after a rank has ended early."""
KILL_AFTER_S = 5.0
"""At the time limit, a rank writes its stacks and exits. If it does not, it is killed after this time."""


@dataclass(frozen=True)
class Setting:
    """Settings of all checks."""

    on_gpu: bool
    gpus: int
    rounds: int


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


def serve(rank: int, size: int, port: int, path: str, setting: Setting, log: str, seconds: float, pipe: Any) -> None:
    """Run one rank of the check `path`: send its rows, followed by None."""
    os.setsid()  # in a separate process group, so that it can be killed together with its children
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds, exit=True)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    check: Check = next(check for check in CHECKS if check.path == path)
    try:
        _be_rank(rank, size, port, check, setting, pipe)
    except NotRun as reason:
        pipe.send(not_run(check.name, str(reason)))
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        free, total = (number / 2**30 for number in torch.cuda.mem_get_info())
        needs = f"needs about {check.gib:g} GiB; {free:.1f} of {total:.1f} GiB were free afterwards"
        pipe.send(Row(check.name, f"out of GPU memory: {first_line(error)}; it {needs}", Verdict.FAILED))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(Row(check.name, f"{type(error).__name__}: {first_line(error)}", Verdict.FAILED))
    else:
        pipe.send(None)
        return
    sys.stderr.flush()
    os._exit(3)  # a normal exit could wait for other ranks


def _be_rank(rank: int, size: int, port: int, check: Check, setting: Setting, pipe: Any) -> None:
    at = rank if check.ranks is Ranks.SEVERAL else 0
    device = torch.device("cuda", at) if setting.on_gpu else torch.device("cpu")
    if size > 1:
        numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        if check.ranks is Ranks.HOSTS:
            # NCCL does not allow two ranks of the same host on one GPU, so pretend that they are on different hosts,
            # which it connects with sockets.
            numbers |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "NCCL_HOSTID": rank}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update(MASTER_ADDR=LOOPBACK, TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the host may have no network
    if setting.on_gpu:
        torch.cuda.set_device(device)
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < check.gib:
            raise NotRun(f"it needs about {check.gib:g} GiB of GPU memory, and only {free:.1f} GiB are free")
    else:
        torch.set_num_threads(1)
    backend = "gloo" if check.ranks is Ranks.SHARED else None
    place = Place(rank, size, device, setting.rounds)
    if not check.joined:
        send_rows(check.run(place), pipe)
        return
    world = paceline.init(backend)
    send_rows(check.run(place), pipe)
    place.synchronize()
    world.close()


def send_rows(rows: Iterator[Row], pipe: Any) -> None:
    for row in rows:
        pipe.send(row)


def _end_with_parent(pipe: Any) -> None:
    with suppress(EOFError, OSError):
        pipe.recv()
    os.killpg(os.getpgid(0), signal.SIGKILL)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or ["(no message)"])[0]


# -- in the parent ------------------------------------------------------------------------------------------------


def sizes(check: Check, setting: Setting) -> int:
    """Return the number of ranks; 0 if there are too few GPUs."""
    if check.ranks is Ranks.ONE:
        return 1
    if check.ranks in (Ranks.SHARED, Ranks.HOSTS) or not setting.on_gpu:
        return 2
    return setting.gpus if setting.gpus > 1 else 0


def run(check: Check, setting: Setting, seconds: float) -> tuple[list[Row], str]:
    """Run a check for at most `seconds`. Return its rows and, after a failure, the last lines of the ranks' output."""
    size = sizes(check, setting)
    if size == 0:
        return [not_run(check.name, "this machine has one GPU, and each rank needs one")], ""
    with tempfile.TemporaryDirectory() as folder, started(check, size, setting, folder, seconds) as ranks:
        began = time.monotonic()
        listen(ranks, began + seconds + KILL_AFTER_S)
        took = time.monotonic() - began
        for rank in ranks:
            rank.process.join(KILL_AFTER_S if rank.is_complete else 1.0)
        rows = merged(check, ranks, took)
        has_failed = any(row.verdict is Verdict.FAILED for row in rows)
        logs = [f"rank {at}:\n{tail(rank.log)}" for at, rank in enumerate(ranks) if rank.log.exists()]
        return rows, "\n".join(logs) if has_failed else ""


@contextmanager
def started(check: Check, size: int, setting: Setting, folder: str, seconds: float) -> Iterator[list[RankProcess]]:
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
            arguments = (rank, size, store.port, check.path, setting, str(log), seconds, theirs)
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
    """Return the rows of the check, and one for each rank that died or ended without giving a reason."""
    rows = merge([rank.rows for rank in ranks], check.name)
    has_said_why = any(row.what == check.name for row in rows)
    for at, rank in enumerate(ranks):
        where = f"rank {at} " if len(ranks) > 1 else ""
        code = rank.process.exitcode
        if rank.is_complete and code != 0:
            rows.append(Row(check.name, f"{where}reached the end of the check and {death(code)}", Verdict.FAILED))
        elif not rank.is_complete and not has_said_why:
            rows.append(Row(check.name, f"{where}{death(code)} after {took:.0f} s", Verdict.FAILED))
    return rows


def merge(answers: list[list[Row]], name: str) -> list[Row]:
    """Return the rows of rank 0. A row that failed on another rank, or that rank 0 lacks, is taken from that rank.

    A row named after the check gives the reason why a rank ended early. All distinct reasons are kept.
    """
    rows: list[Row] = []
    ends = [(rank, row) for rank, others in enumerate(answers) for row in others if row.what == name]
    for rank, others in enumerate(answers):
        for at, row in enumerate(row for row in others if row.what != name):
            if at >= len(rows):
                rows.append(row)
            elif row.verdict is Verdict.FAILED and rows[at].verdict is not Verdict.FAILED:
                rows[at] = replace(row, value=f"rank {rank}: {row.value}")
    for rank, row in ends:
        if all(row.value != other.value for _, other in ends[: ends.index((rank, row))]):
            rows.append(row if len(answers) == 1 else replace(row, value=f"rank {rank}: {row.value}"))
    return rows


def death(code: int | None) -> str:
    """Describe the exit code, for example as "died of SIGSEGV"."""
    if code is None:
        return "did not end"
    with suppress(ValueError):
        if code < 0:
            return f"died of {signal.Signals(-code).name}"
    return "was not at its end" if code == 1 else f"ended with exit code {code}"


def tail(log: Path, lines: int = 60) -> str:
    """Return the last lines of a rank's output."""
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:])
