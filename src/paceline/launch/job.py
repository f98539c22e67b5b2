"""A job on this host: its settings, and the command, environment and stores of its ranks."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, Popen
from textwrap import shorten
from typing import Any

import torch
from torch.distributed import TCPStore

from paceline.core import messages
from paceline.core.host import check_files, cores
from paceline.core.job_directory import PARENT, JobFolder
from paceline.core.messages import say
from paceline.core.stores import make_file, path_of
from paceline.core.world import TIMEOUT
from paceline.errors import UsageError
from paceline.launch import guard
from paceline.launch.failure_record import LAUNCHER
from paceline.launch.fork_client import ForkServer, Preloading, decide
from paceline.launch.hook import run_module
from paceline.launch.options import GRACE_S, TIMEOUT_S, Supervision
from paceline.launch.output import Logs
from paceline.launch.signals import FORWARDED, sheltered

LOOPBACK = "127.0.0.1"
FOLDER = Path(__file__).parent
TITLE = 200
"""Maximum length of a job's title."""
LONGEST_S = 2_000_000  # 23 days, because the kernel waits for at most 2**31 ms at a time


@dataclass(frozen=True)
class Job:
    """A job on this host: the command of its ranks, and the launcher's settings.

    Args:
        command: program and arguments of each rank.
        nproc: number of ranks.
        max_restarts: maximum number of consecutive restarts without progress; None for the default of
            :mod:`paceline.launch.restart_policy`.
        env: variables added to the ranks' environment. torchrun's variables (``RANK``, …) take precedence.
        grace: how many seconds ranks have to exit after a signal to the launcher.
        interval: seconds between two polls of the ranks, if the kernel cannot report their exits.
        run_id: ``TORCHELASTIC_RUN_ID`` of the ranks; random by default.
        logs: destinations of the ranks' output; the launcher's streams by default.
        signals: signals to the launcher that end the job.
        role: ``ROLE_NAME`` of the ranks.
        virtual_local_rank: whether each rank sees only its own GPU, as local rank 0.
        start_options: more arguments for torchelastic's ``start_processes``.
        report: file for the report of :mod:`paceline.launch.job_report`.
        supervision: further settings of the launcher.
        modules: modules, in addition to torch, to import before ranks are forked.
    """

    command: Sequence[str]
    nproc: int
    max_restarts: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    grace: float = GRACE_S
    interval: float = 0.1
    run_id: str = ""
    logs: Logs = field(default_factory=Logs)
    signals: Sequence[signal.Signals] = FORWARDED
    role: str = "default"
    virtual_local_rank: bool = False
    start_options: Mapping[str, Any] = field(default_factory=dict)
    report: str | None = None
    supervision: Supervision = field(default_factory=Supervision)
    modules: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("the command is empty; name a script to run")
        for name, value, minimum in (
            ("nproc", self.nproc, 1),
            ("max_restarts", self.max_restarts or 0, 0),
            ("shutdown_timeout", self.grace, 0),
        ):
            if value < minimum:
                raise UsageError(f"{name}={value} is less than {minimum}; give {minimum} or more")
        if self.interval <= 0:
            raise UsageError(f"monitor_interval={self.interval} is not positive; give seconds, such as 0.1")
        check_files(self.nproc)
        self.supervision.slots(self.nproc)


def fork_server(job: Job, say: Callable[[str], None] = messages.say) -> ForkServer:
    """Return the job's fork server without starting it."""
    environment = rank_environment(job)
    # With --numa-binding, another program starts the rank.
    preloading = Preloading() if job.start_options.get("numa_options") is not None else decide(job.command)
    if preloading.note:
        say(preloading.note)
    modules = (*preloading.modules, *job.modules) if preloading.modules else ()
    return ForkServer(job.command, environment, modules, say)


@contextmanager
def black_boxes(name: str, program: Sequence[str], nproc: int) -> Iterator[JobFolder]:
    """Make the job's folder for the ranks' black boxes, with a guard that removes it if this process is killed."""
    try:
        folder = JobFolder(name, title_of(program), nproc)
    except OSError as error:
        raise UsageError(
            f"the job's folder cannot be made ({error}); free some space, or name another place in {PARENT}"
        ) from None
    if folder.remark:
        say(f"note: the job's folder, for what its ranks rescue, is {folder.remark}")
    command = [sys.executable, "-I", "-S", guard.__file__, str(folder.path)]
    with folder:
        with sheltered():
            process = Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
        with process, folder:  # the guard exits after the folder is removed
            yield folder


def title_of(command: Sequence[str]) -> str:
    """Return a one-line title for a rank's `command`, without the interpreter and its options."""
    words = list(command)
    if words[0] == sys.executable:
        words = words[1:]
        while words and words[0] == "-u":
            words = words[1:]
    # Modules of this package receive their settings as JSON, so show the command that the user typed.
    if "paceline_command" in sys.modules and words[:1] == [run_module.__file__]:
        words = ["paceline", *sys.argv[1:]]
    return shorten(" ".join(words), TITLE, placeholder=" …")


def report_stop(number: signal.Signals, saved: int | None = None) -> int:
    """Report that a signal ended the launcher, and which step was `saved`; return the exit code."""
    suffix = "" if saved is None else f", after step {saved} was saved"
    say(f"{'interrupted' if number == signal.SIGINT else f'terminated by {number.name}'}{suffix}")
    return 128 + number


def child_arguments(command: Sequence[str]) -> list[str]:
    """Return the Python arguments that run `command` in a process that exits when this process does."""
    return ["-I", "-S", str(FOLDER / "child.py"), str(os.getpid()), *command]


def rank_environment(job: Job) -> dict[str, str]:
    """Return the ranks' environment variables on one host, except torchrun's. The user's settings take precedence."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores() // job.nproc)),
        # By default Gloo and NCCL listen on the interface of the host's name, and other hosts can reach it.
        **({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }
    environment = {name: value for name, value in defaults.items() if name not in os.environ}
    environment.update(job.env)
    environment[LAUNCHER] = str(os.getpid())
    # The sitecustomize in the first folder records uncaught exceptions.
    path = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER / "hook"), *([path] if path else [])])
    return environment


def group_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for one rank of a process group on one host, with the store at `port`."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # Tells torch that this process serves the store. Otherwise, rank 0 would try to open one at the same port.
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }


def torchrun_environment(job: Job, rank: int, size: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for one of `size` ranks on one host."""
    variables = {
        **group_environment(rank, size, port),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": job.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts or 0),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if job.virtual_local_rank:  # each rank sees only one GPU
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = list(map(str, range(size))) if visible is None else visible.split(",")
        if len(gpus) < size:
            raise UsageError(f"--virtual-local-rank: {size} ranks, but CUDA_VISIBLE_DEVICES={visible}; start fewer")
        variables |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpus[rank].strip()}
    return variables


def timeout_environment(timeout: str | None) -> dict[str, str]:
    """Return the timeout of collectives as an environment variable: `timeout`, the user's variable, or ten minutes."""
    name, value = ("--timeout", timeout) if timeout is not None else (TIMEOUT, os.environ.get(TIMEOUT, str(TIMEOUT_S)))
    try:
        number = float(value)
    except ValueError:
        raise UsageError(f"{name}={value!r} is not a number of seconds; give one such as {TIMEOUT_S}") from None
    if not 0 < number <= LONGEST_S:
        raise UsageError(
            f"{name}={value} must be above 0 and at most {LONGEST_S:,} seconds; give one such as {TIMEOUT_S}"
        )
    return {TIMEOUT: value}


def resolve_nproc(wanted: str | int) -> tuple[int, str | None]:
    """Return the number of ranks to start and, if they exceed the cores and GPUs, a note for the user.

    Args:
        wanted: a number; ``"gpu"`` for one rank per GPU; ``"cpu"`` for one per core; or ``"auto"``: GPUs if there are
        any, else cores.
    """
    gpus, available = torch.cuda.device_count(), cores()
    named = {"auto": gpus or available, "gpu": gpus, "cpu": available}
    try:
        count = named[wanted] if isinstance(wanted, str) and wanted in named else int(wanted)
    except ValueError:
        several = "; to compare numbers of ranks, use paceline compare" if "," in str(wanted) else ""
        raise UsageError(f"--nproc={wanted!r} is neither a number nor auto, gpu or cpu{several}") from None
    if wanted == "gpu" and count == 0:
        raise UsageError("--nproc=gpu, but this host has no GPU that torch can use; give a number, or cpu")
    if count < 1:
        raise UsageError(f"--nproc={wanted} is less than 1; give the number of ranks to start, or auto")
    if count > available and count > gpus:
        return count, f"note: {count} ranks on {available} cores: they take turns, so training is no faster"
    return count, None


def loopback_listener() -> socket.socket:
    """Listen on a free port of the loopback interface."""
    return socket.create_server((LOOPBACK, 0), backlog=128)


def loopback_store(listener: socket.socket | None = None) -> TCPStore:
    """Serve a new store on `listener`, taking it over, or on a free loopback port.

    The server lives as long as the returned object. Ranks connect as clients: they get ``MASTER_ADDR``, ``MASTER_PORT``
    (``store.port``) and ``TORCHELASTIC_USE_AGENT_STORE=True``.
    """
    listener = listener or loopback_listener()
    port = listener.getsockname()[1]
    # Without a listening socket, TCPStore listens on every interface, without authentication. detach(), because the
    # store takes ownership of the descriptor.
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class LoopbackStores:
    """The stores for one start of the ranks. A store from the previous start would hold the addresses of dead ranks.

    There are two stores, because every user of the host can write to a TCPStore. :func:`paceline.init` uses the private
    store, given in ``PACELINE_STORE``. torch's functions use the public store, given in ``MASTER_ADDR`` and
    ``MASTER_PORT``.
    """

    def __init__(self) -> None:
        self._public = loopback_store()
        self.port = self._public.port
        self._file = -1
        self.private = ""
        """The value of ``PACELINE_STORE``."""
        if sys.platform == "linux":
            self._file = make_file(str(self.port))
            self.private = f"{self.port} {path_of(self._file)}"

    def close(self) -> None:
        """Close the stores. Call this after the ranks have exited."""
        del self._public
        if self._file >= 0:
            os.close(self._file)
