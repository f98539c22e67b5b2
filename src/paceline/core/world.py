"""The world: this process's rank, the number of ranks, and the device.

The names follow torchrun's contract. This module has no state: torch.distributed holds the process group, and a
:class:`World` is computed from the group and the environment.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.constants import default_pg_timeout

from paceline.core import OWN_BACKEND
from paceline.core.failpoints import strike
from paceline.core.failure_callbacks import show_mistakes_in_one_line
from paceline.core.host import is_running
from paceline.core.missing_ranks import called_by_all, collective, failed_to_connect, missing_from
from paceline.core.nccl_communicators import abort_all, destroy_all
from paceline.core.schedulers import adopt, is_alone
from paceline.core.stores import connecting, is_one_host, meet, world_stores
from paceline.core.torch_distributed import get_default_store, get_known_groups, nccl_of
from paceline.errors import CommunicationError, PacelineError, WorldError

logger = logging.getLogger(__name__)
TIMEOUT = "PACELINE_TIMEOUT"
"""Environment variable with the default timeout of collectives, in seconds; the `timeout` of ``init`` overrides it."""
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CPU_REMEDY = "or train on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
_CHECK_S = 1.0
"""Interval in seconds at which ranks check that rank 0 still runs."""
_LONGEST_WAIT_S = 5.0
"""Longest wait for Gloo's threads at the end of the process."""


@dataclass(frozen=True)
class World:
    """This process's rank, the number of ranks, and its device.

    ``node`` is the index of the host, ``local_rank`` the index of the rank on it, and ``local_size`` the number of
    ranks on it. ``device`` is the device of this rank's replica: its GPU if CUDA is available and the backend is NCCL
    or Paceline's, else the CPU.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints, logs and writes files for all ranks."""
        return self.rank == 0

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only; takes the arguments of the built-in ``print``."""
        if self.is_main:
            print(*values, **options)

    def barrier(self) -> None:
        """Wait until every rank calls this."""
        if self.size > 1:
            with called_by_all("World.barrier()"), collective("barrier"):
                dist.barrier()

    @contextmanager
    def main_first(self) -> Iterator[bool]:
        """Run the block on rank 0 first, then on the other ranks, for example to fill a cache once.

        The other ranks wait as long as rank 0's process exists, beyond the timeout of collectives. If the block raises
        on rank 0, they raise as well and do not run it. Every rank must call this. Yields whether this is rank 0.

        Raises:
            WorldError: on the other ranks, if the block failed on rank 0.
            CommunicationError: on the other ranks, if rank 0 has exited or does not arrive within the timeout.
        """
        if self.size == 1:
            yield True
            return
        store = PrefixStore("paceline/main_first/", get_default_store())
        turn = store.add(f"{self.rank}", 1)
        if self.is_main:
            store.set(f"{turn}/began", str(os.getpid()))
            failure = "the block was left early"
            try:
                yield True
                failure = ""
            except BaseException as error:
                failure = f"{type(error).__name__}: {error}"
                raise
            finally:
                store.set(f"{turn}/ended", failure)
        else:
            with called_by_all("World.main_first()"), collective("main_first block"):
                failure = _end_of_main(store, turn, self.rank)
            if failure:
                raise WorldError(
                    f"rank {self.rank}: the main_first block failed on rank 0 ({failure}); see rank 0's error"
                ).because_of([0])
            yield False

    def close(self) -> None:
        """Leave the process group; the counterpart of :func:`init`. A second call has no effect.

        With NCCL all ranks must call it, because they destroy their communicators together.
        """
        if dist.is_initialized():
            destroy_all()
            dist.destroy_process_group()

    def _abort(self) -> None:
        """Leave the process group after an error, without waiting for running NCCL work.

        That work may never end, because other ranks depend on this one. Other backends do not wait.
        """
        if not dist.is_initialized():
            return
        try:
            if any(nccl_of(group) is not None for group in get_known_groups()):
                abort_all()
            else:
                self.close()
        except Exception:  # only logged, because the original error is more informative
            logger.exception("rank %d: the process groups could not be aborted", self.rank)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the process group; after an error, without waiting for anything."""
        is_failure = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
        self._abort() if is_failure else self.close()


def _end_of_main(store: Store, turn: int, rank: int) -> str:
    """Wait for the end of rank 0's block, as long as rank 0 runs; return its failure."""
    began, ended = f"{turn}/began", f"{turn}/ended"
    seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]
    if missing_from(store, [began], seconds):
        raise CommunicationError(f"rank {rank}: rank 0 did not arrive within {seconds:g} s").because_of([0])
    pid = int(store.get(began))
    is_here = is_one_host(os.environ, os.environ.get("MASTER_ADDR", ""))  # otherwise the launcher ends this rank
    while missing_from(store, [ended], _CHECK_S):
        if is_here and not is_running(pid) and missing_from(store, [ended]):
            raise CommunicationError(f"rank {rank}: rank 0 (pid {pid}) has exited; see its error").because_of([0])
    return str(store.get(ended).decode())


def init(backend: str | None = None, timeout: timedelta | float | None = None) -> World:
    """Join the world that the launcher describes, or create a world with a single rank.

    Reads torchrun's environment (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK``,
    ``MASTER_ADDR``, ``MASTER_PORT``), and sets these variables if srun or mpirun started several processes; see
    :mod:`paceline.core.schedulers`. Without these variables, this process is the only rank. An existing
    process group is used unchanged. Returns once every rank is connected. From then on a
    :class:`~paceline.errors.UsageError` prints one line and exits with code 2, no matter which launcher started the
    script, unless the script sets ``sys.excepthook``.

    Args:
        backend: ``"paceline"``, ``"gloo"``, ``"nccl"`` or any name that ``torch.distributed.init_process_group``
            takes. By default NCCL, with Gloo for CPU tensors, if CUDA is available; otherwise Paceline's own backend.
        timeout: how long to wait for a rank in collectives and when a process group is created: a ``timedelta`` or a
            number of seconds. The default is the number of seconds in ``PACELINE_TIMEOUT``, which ``paceline run
            --timeout`` sets. Without it, torch's default applies.

    Raises:
        CommunicationError: if a rank does not arrive in time; the message names it.
        WorldError: if `timeout` is not a positive number, if variables of the environment are missing, not a number or
            out of range, if the backend is not available, or if the existing process group has another backend.
    """
    show_mistakes_in_one_line()
    patience = _patience(timeout, os.environ)
    if dist.is_initialized():
        _check_backend(backend)
        return current()
    strike("rendezvous")
    adopt(os.environ)  # torch and user code read torchrun's variables
    place = _place(os.environ)
    if backend is not None:
        check_available(backend)
    gpu = None
    if torch.cuda.is_available() and (backend is None or "nccl" in backend or backend == OWN_BACKEND):
        gpu = choose_gpu(place["RANK"], place["LOCAL_RANK"], torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    one_host = place["WORLD_SIZE"] == 1 or is_one_host(os.environ, os.environ["MASTER_ADDR"])
    if one_host and sys.platform == "linux":
        # Use loopback, so that no port is reachable from outside. Gloo would use the interface of the host name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    chosen = backend or (OWN_BACKEND if gpu is None else "cpu:gloo,cuda:nccl")
    # Bind the group to its GPU: this creates the NCCL communicator immediately, and others can be split from it.
    bound = torch.device("cuda", gpu) if gpu is not None and "nccl" in chosen else None
    try:
        if "RANK" in os.environ:
            rank, size = place["RANK"], place["WORLD_SIZE"]
            store = _unused_store(rank, size, one_host, patience or default_pg_timeout)
            if gpu is not None:
                check_own_gpu(store, rank, size, gpu_name(str(torch.cuda.get_device_properties(gpu).uuid), os.environ))
        else:
            rank, size, store = 0, 1, HashStore()
        with connecting(store, rank, size, patience or default_pg_timeout):
            dist.init_process_group(chosen, timeout=patience, store=store, rank=rank, world_size=size, device_id=bound)
    except PacelineError:
        raise
    except RuntimeError as error:
        raise failed_to_connect(place["RANK"], place["WORLD_SIZE"], error) from error
    except (ValueError, AttributeError) as error:
        raise WorldError(f"backend {chosen!r} cannot be used: {error}") from error
    return current()


def _patience(timeout: timedelta | float | None, environment: Mapping[str, str]) -> timedelta | None:
    """Return `timeout` or, by default, ``PACELINE_TIMEOUT``; None stands for torch's default."""
    name: str = "timeout"
    value: Any = timeout
    if timeout is None:
        if TIMEOUT not in environment:
            return None
        name, value = TIMEOUT, environment[TIMEOUT]
    try:
        if isinstance(value, bool):
            raise TypeError
        duration = value if isinstance(value, timedelta) else timedelta(seconds=float(value))
        if duration < timedelta(milliseconds=1):  # torch would round less than a millisecond to 0
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise WorldError(f"{name}={value!r} is not a timeout; pass a number of seconds above 0, such as 600") from None
    return duration


def _place(environment: Mapping[str, str]) -> dict[str, int]:
    """Read and check this rank's numbers in `environment`; by default, they describe a world with a single rank."""
    present = [name for name in REQUIRED if name in environment]
    if not present or is_alone(environment):
        return {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    missing = [name for name in REQUIRED if name not in environment]
    if missing:
        raise WorldError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}; start the script with "
            "'paceline run' or torchrun, or unset them all to run as one process"
        )
    place = {name: _number(environment, name) for name in ("RANK", "WORLD_SIZE")}
    for name, default in (("LOCAL_RANK", place["RANK"]), ("LOCAL_WORLD_SIZE", place["WORLD_SIZE"])):
        place[name] = _number(environment, name) if name in environment else default
    if not 0 <= place["RANK"] < place["WORLD_SIZE"]:
        raise WorldError(
            f"RANK={place['RANK']} is not in 0..{place['WORLD_SIZE'] - 1} (WORLD_SIZE={place['WORLD_SIZE']}); "
            "give every process a different rank below WORLD_SIZE"
        )
    return place


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise WorldError(f"{name}={environment[name]!r} is not a whole number; torchrun sets it") from None


def current() -> World:
    """Create the :class:`World` from the existing process group and the environment."""
    if not dist.is_initialized():
        raise WorldError("no process group exists yet; call paceline.init() first")
    _await_gloo_at_exit()
    rank, size = dist.get_rank(), dist.get_world_size()
    # Without torchrun, the local variables may be missing; assume a single host.
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    node = int(os.environ.get("GROUP_RANK", rank // local_size))
    backends = str(dist.get_backend_config())
    on_cuda = torch.cuda.is_available() and ("nccl" in backends or f"cuda:{OWN_BACKEND}" in backends)
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return World(rank, size, local_rank, local_size, node, device)


def usable_backends() -> str:
    """Return the backends of the process group for the available devices: ``cpu:gloo,cuda:nccl``."""
    backends = str(dist.get_backend_config()).split(",")
    return ",".join(backend for backend in backends if torch.cuda.is_available() or not backend.startswith("cuda:"))


def check_available(backend: str) -> None:
    """Raise if this PyTorch does not have the backend."""
    for part in backend.split(","):
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            raise WorldError(f"backend {name!r} is not available in this PyTorch; leave it out, or use 'gloo'")


def _check_backend(backend: str | None) -> None:
    if backend is None:
        return
    present = str(dist.get_backend_config())
    if backend not in (present, dist.get_backend()) and backend not in present.replace(":", ",").split(","):
        raise WorldError(
            f"the process group exists with backend {usable_backends()!r} but {backend!r} was requested; "
            "initialize it once, with the backend to use"
        )


def _unused_store(rank: int, size: int, one_host: bool, timeout: timedelta) -> Store:
    """Return a new part of the job's store, even after an earlier ``init()``."""
    # A single rank keeps no store, so that its port is free again when the group ends.
    connect = world_stores if size == 1 else _kept_stores
    store = connect(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank, size, one_host, timeout, os.getpid())[0]
    store.set_timeout(timeout)
    return PrefixStore(f"paceline/{meet(store, rank, size, timeout)}/", store)


_kept_stores = cache(world_stores)
"""Stores that are kept until the process ends. If rank 0's server ended with its first process group, another rank that
initializes again could connect to it just before it ends."""


def choose_gpu(rank: int, local_rank: int, visible: int) -> int:
    """Return the index of this rank's GPU among the `visible` ones.

    This is the local rank, or 0 if a scheduler makes only one GPU visible to each rank.
    """
    if local_rank < visible:
        return local_rank
    if visible == 1:
        return 0
    raise WorldError(
        f"rank {rank}: local rank {local_rank} has no GPU, because only {visible} are visible; start at most "
        f"that many ranks per host, make one GPU visible to each rank, {_CPU_REMEDY}"
    )


def gpu_name(uuid: str, environment: Mapping[str, str]) -> str:
    """Return the identity of a GPU: its UUID, plus the visible part if the GPU is divided (MIG).

    It includes the host's name in ``NCCL_HOSTID``, because NCCL lets ranks share a GPU if their host names differ.
    """
    visible, host = environment.get("CUDA_VISIBLE_DEVICES", ""), environment.get("NCCL_HOSTID")
    parts = [uuid, *([visible] if "MIG" in visible else []), *([f"of NCCL_HOSTID={host}"] if host else [])]
    return " ".join(parts)


def check_own_gpu(store: Store, rank: int, size: int, gpu: str) -> None:
    """Raise if another rank uses the GPU with this :func:`gpu_name`. All ranks call this with the same store."""
    store.set(f"gpu/{rank}", gpu)
    for peer in range(size):
        if peer != rank and store.get(f"gpu/{peer}").decode() == gpu:
            raise WorldError(
                f"rank {rank}: rank {peer} has the same GPU {gpu}, and NCCL allows one rank per GPU; start at most "
                f"as many ranks as GPUs, {_CPU_REMEDY}"
            )


@cache
def _await_gloo_at_exit() -> None:
    atexit.register(_await_gloo)


def _await_gloo() -> None:
    """Wait until no thread of a Gloo group is busy, at the end of the process.

    A thread may release a collective's tensors after the wait for the collective has returned. During interpreter
    shutdown it could not take the GIL for this, and would abort the process after a successful training.
    """
    idle, end = 0, time.monotonic() + _LONGEST_WAIT_S
    # Twice, because a thread that was waiting for another one can become busy between the two reads.
    while idle < 2 and time.monotonic() < end:
        time.sleep(0.001)  # threads take the GIL
        idle = 0 if _are_busy() else idle + 1


def _are_busy() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):  # empty on other systems than Linux
        with suppress(OSError):  # the thread has ended
            # Reading a file releases the GIL, so a thread that needs the GIL is running by now, not asleep.
            name, _, rest = task.read_text().rpartition(") ")
            if name.endswith("(pt_gloo_runloop") and not rest.startswith("S"):
                return True
    return False
