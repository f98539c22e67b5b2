"""A job on this host: its settings, and the command and environment of its ranks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, Popen
from textwrap import shorten
from typing import Any

import torch

from paceline.core.output import messages
from paceline.core.output.messages import say
from paceline.core.processes.world import TIMEOUT
from paceline.core.telemetry.job_directory import PARENT, JobFolder
from paceline.errors import UsageError
from paceline.launch.fork_server.client import ForkServer
from paceline.launch.fork_server.policy import Preloading, decide
from paceline.launch.host_limits import check_files, cores
from paceline.launch.loopback import LOOPBACK
from paceline.launch.options import GRACE_S, TIMEOUT_S, Supervision
from paceline.launch.rank.channels import Logs
from paceline.launch.rank.failure_record import LAUNCHER
from paceline.launch.rank.hook import run_module
from paceline.launch.watching import guard
from paceline.launch.watching.signals import FORWARDED, sheltered

RANK = Path(__file__).parent / "rank"
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
        report: file for the report of :mod:`paceline.launch.failures.job_report`.
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
        self.supervision.places(self.nproc)


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


def farewell(number: signal.Signals, saved: int | None = None) -> int:
    """Report that a signal ended the launcher, and which step was `saved`; return the exit code."""
    suffix = "" if saved is None else f", after step {saved} was saved"
    say(f"{'interrupted' if number == signal.SIGINT else f'terminated by {number.name}'}{suffix}")
    return 128 + number


def tied(command: Sequence[str]) -> list[str]:
    """Return the Python arguments that run `command` in a process that exits when this process does."""
    return ["-I", "-S", str(RANK / "child.py"), str(os.getpid()), *command]


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
    environment["PYTHONPATH"] = os.pathsep.join([str(RANK / "hook"), *([path] if path else [])])
    return environment


def torchrun_environment(job: Job, rank: int, size: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for one of `size` ranks on one host."""
    variables = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": job.role,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts or 0),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
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
