"""Sets torchrun's variables for ranks that ``srun`` or ``mpirun`` started.

An existing ``RANK`` takes precedence. A single process needs no variables.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from paceline.errors import WorldError

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Ports below the range of automatically assigned ports."""


@dataclass(frozen=True)
class Starter:
    """A program that starts processes, and the environment variables that describe each process."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]
    """Variables that are equal in all processes of a job, and differ between jobs on a host."""
    node: str = ""


SRUN = Starter(
    # SLURM_STEP_*: only srun sets them; a batch script itself is one process, whatever SLURM_NTASKS says.
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    "SLURM_NODEID",
)
MPI = (
    Starter(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"),
    ),
    Starter("mpiexec (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ()),
)
STARTERS = (*MPI, SRUN)
"""In order of precedence. mpirun and mpiexec start helpers on other nodes through srun, so a rank there also has the
variables of that srun step, which count helpers."""
UNKNOWN = ("PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "ALPS_APP_PE")
"""Rank variables of unsupported engines."""


def adopt(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables in `environment`, if one of the :data:`STARTERS` started this process."""
    variables = adopted(environment)
    if variables and is_typed(environment):  # the other ranks would never start
        size = variables["WORLD_SIZE"]
        raise WorldError(
            f"this shell is one of {size} tasks of srun --pty, and the other tasks do not run commands typed here; use "
            f"'paceline run --nproc {size} script.py' (or --nproc 1), or use srun outside of this shell"
        )
    if variables and "MASTER_ADDR" not in environment:
        address = variables["MASTER_ADDR"]
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:  # the ranks would retry until their timeout
            raise WorldError(
                f"rank {variables['RANK']}: the name of the first node, {address!r}, cannot be resolved here "
                f"({error.strerror}); set MASTER_ADDR to an address of that node on all ranks"
            ) from None
    environment.update(variables)


def adopted(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a process that one of the :data:`STARTERS` started; empty if none did.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are kept if they are already set.
    """
    if "RANK" in environment:
        return {}
    starter = _starter(environment)
    if starter is not None and environment[starter.size] != "1":
        variables = _variables(starter, environment)
        # Batch scripts set it along with MASTER_ADDR, for scripts that read their rank from the starter's variables.
        size = environment.get("WORLD_SIZE", variables["WORLD_SIZE"])
        if size != variables["WORLD_SIZE"]:
            raise WorldError(
                f"WORLD_SIZE={size}, but {starter.name} started {variables['WORLD_SIZE']} processes; unset "
                "WORLD_SIZE, or start as many processes"
            )
        return variables
    for name in UNKNOWN:
        if environment.get(name, "0") != "0":
            raise WorldError(
                f"this process is one of several ({name}={environment[name]}), but their launcher is unknown; "
                "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each, or "
                "start one 'paceline run' or torchrun on each host"
            )
    return {}


def is_typed(environment: Mapping[str, str]) -> bool:
    """Return whether the user typed this command in the interactive shell of an ``srun --pty`` task.

    A shell with job control gives each command a separate process group. A program that srun starts on a terminal is in
    the process group of its session's leader; tasks of a step without ``--pty`` do not read a terminal.
    """
    return "SLURM_PTY_PORT" in environment and os.isatty(0) and os.getpgrp() != os.getsid(0)


def is_alone(environment: Mapping[str, str]) -> bool:
    """Return whether one of the :data:`STARTERS` started this process as its only one.

    ``MASTER_ADDR`` may still be set, by a batch script that starts one rank for each allocated task.
    """
    starter = None if "RANK" in environment or environment.get("WORLD_SIZE", "1") != "1" else _starter(environment)
    return starter is not None and environment[starter.size] == "1"


def _starter(environment: Mapping[str, str]) -> Starter | None:
    for starter in STARTERS:
        # srun --mpi=pmi2 also sets mpiexec's rank and size, but not its local rank and size.
        is_sruns = starter is not SRUN and starter.local_size not in environment and SRUN.size in environment
        if starter.rank in environment and starter.size in environment and not is_sruns:
            return starter
    return None


def _variables(starter: Starter, environment: Mapping[str, str]) -> dict[str, str]:
    try:
        rank, size = int(environment[starter.rank]), int(environment[starter.size])
        node = int(environment.get(starter.node, "0"))
        sizes = _counts(environment.get(starter.local_size, str(size)))
        local_size = sizes[node if len(sizes) > 1 else 0]
        local_rank = int(environment.get(starter.local_rank, str(rank)))
    except (ValueError, IndexError):
        names = (starter.rank, starter.size, starter.local_rank, starter.local_size, starter.node)
        values = ", ".join(f"{name}={environment[name]!r}" for name in names if name in environment)
        raise WorldError(
            f"this process was started by {starter.name}, but its variables cannot be read ({values}); set "
            "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"
        ) from None
    # Under Slurm, mpirun's ranks have the host list of the step that started the helpers. It lacks the first host.
    hosts = environment.get("SLURM_STEP_NODELIST", "") if starter is SRUN else ""
    address = LOOPBACK if local_size == size else _first_host(hosts)
    address = environment.get("MASTER_ADDR", address)
    if not address:
        raise WorldError(
            f"{starter.name} started {size} processes on several hosts, but does not report the host of rank 0; set "
            "MASTER_ADDR to that host on all ranks (mpirun -x MASTER_ADDR=host), or start torchrun on each host"
        )
    if not starter.node:  # unknown; assume that all hosts have the same number of ranks
        node = rank // local_size
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node,
    }
    port = environment.get("MASTER_PORT") or str(_port(starter, environment))
    return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": address, "MASTER_PORT": port}


def _counts(text: str) -> list[int]:
    """Return the numbers in a list in Slurm's notation: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(hosts: str) -> str:
    """Return the first host in a list in Slurm's notation: ``n07`` for ``n[07-09,12],m1``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", hosts)
    return "" if match is None else match[1] + (match[2] or "") + (match[3] or "")


def _port(starter: Starter, environment: Mapping[str, str]) -> int:
    """Return a port that is the same in all processes of the job, and most likely different in other jobs."""
    job = [environment[name] for name in starter.job if name in environment] or [str(os.getppid())]
    digest = hashlib.sha256("/".join([starter.name, *job]).encode()).digest()
    return PORTS[int.from_bytes(digest[:4], "big") % len(PORTS)]
