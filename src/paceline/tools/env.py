"""``paceline env``: facts about this machine and installation for a bug report."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from paceline.comm.own_backend import register
from paceline.core import OWN_BACKEND
from paceline.core.host import cores

SETTINGS = ("PACELINE_", "TORCH_", "NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "MASTER_")
SECRETS = ("TOKEN", "SECRET", "KEY", "PASSWORD")
"""Variables with these words in their names are hidden, because bug reports are public."""


def describe() -> dict[str, str]:
    """Return the facts that ``torch.utils.collect_env`` does not report."""
    default = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else OWN_BACKEND
    return {
        "paceline": f"{paceline.__version__}, {Path(paceline.__file__).parent}",
        "torch": str(torch.__version__),
        "python": sys.executable,
        "packages": ", ".join(f"{name} {version(name)}" for name in ("safetensors", "rich", "typer")),
        "backends": f"{', '.join(_backends())}; paceline.init() uses {default}",
        "cores": f"{cores()} usable of {os.cpu_count()}, {torch.get_num_threads()} threads for torch",
        "shared memory": _shared_memory(),
        "settings": ", ".join(f"{name}={value}" for name, value in _settings()) or "none",
    }


def _backends() -> list[str]:
    register()  # the command's process has not registered the "paceline" backend yet
    return [name for name in (OWN_BACKEND, "gloo", "nccl", "mpi") if dist.is_backend_available(name)]


def _shared_memory() -> str:
    try:
        total, _, free = shutil.disk_usage("/dev/shm")
    except OSError:
        return "no /dev/shm"
    return f"/dev/shm {free / 2**30:.1f} GiB free of {total / 2**30:.1f}"


def _settings() -> list[tuple[str, str]]:
    """Return the environment variables that affect ranks and backends, with secrets hidden."""
    names = sorted(name for name in os.environ if name.startswith(SETTINGS))
    return [(name, "…" if any(word in name for word in SECRETS) else os.environ[name]) for name in names]
