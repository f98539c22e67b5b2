"""The facts about this machine and installation that a report of a defect needs: ``paceline env``."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from paceline.comm.c10d.own_backend import register
from paceline.core.processes.world import OWN_BACKEND
from paceline.core.torch_internals.versions import RANGE, untested
from paceline.launch.pinning import cores

SETTINGS = ("PACELINE_", "TORCH_", "NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "MASTER_")
SECRETS = ("TOKEN", "SECRET", "KEY", "PASSWORD")
"""Parts of the names of variables whose values are left out, because reports of defects are public."""


def describe() -> dict[str, str]:
    """Return one line for each fact that ``torch.utils.collect_env`` does not know."""
    return {
        "paceline": f"{paceline.__version__}, {Path(paceline.__file__).parent}",
        "torch": f"{torch.__version__}, {untested(str(torch.__version__)) or f'Paceline was tested with {RANGE}'}",
        "python": sys.executable,
        "packages": ", ".join(f"{name} {version(name)}" for name in ("safetensors", "rich", "typer")),
        "backends": f"{', '.join(_backends())}; paceline.init() takes {_default_backend()}",
        "cores": f"{cores()} usable of {os.cpu_count()}, {torch.get_num_threads()} threads for torch",
        "memory": f"{_memory('MemTotal')} in all, {_memory('MemAvailable')} available",
        "shared memory": _shared_memory(),
        "limits": ", ".join(f"{name} {_limit(number)}" for name, number in _LIMITS.items()),
        "settings": ", ".join(f"{name}={value}" for name, value in _settings()) or "none",
    }


_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "address space": resource.RLIMIT_AS,
}


def _backends() -> list[str]:
    register()  # "import paceline" does not in the process of the command, which rarely needs the backend
    return [name for name in (OWN_BACKEND, "gloo", "nccl", "mpi") if dist.is_backend_available(name)]


def _default_backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else OWN_BACKEND


def _memory(field: str) -> str:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return "unknown"
    found = [int(line.split()[1]) / 2**20 for line in lines if line.startswith(field + ":")]
    return f"{found[0]:.1f} GiB" if found else "unknown"


def _shared_memory() -> str:
    try:
        total, _, free = shutil.disk_usage("/dev/shm")
    except OSError:
        return "no /dev/shm"
    return f"/dev/shm {free / 2**30:.1f} GiB free of {total / 2**30:.1f}"


def _limit(number: int) -> str:
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in resource.getrlimit(number)
    )
    return soft if soft == hard else f"{soft} (at most {hard})"


def _settings() -> list[tuple[str, str]]:
    """Return the environment variables that concern ranks and backends, without those that may be secret."""
    names = sorted(name for name in os.environ if name.startswith(SETTINGS))
    return [(name, "…" if any(word in name for word in SECRETS) else os.environ[name]) for name in names]
