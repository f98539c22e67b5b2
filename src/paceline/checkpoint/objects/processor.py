"""The processor and its settings on which the bits of sums depend, saved with a model that has virtual ranks.

Whatever the number of ranks, a run has the same bits only on the same kind of processor, with the same versions and
number of threads. So a resume elsewhere says that they end here.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline.core.state.virtual_ranks import virtual_ranks_of


def processor_of(registered: Any) -> dict[str, Any] | None:
    """Return the facts that the bits of a wrapper with virtual ranks depend on; None for other objects."""
    if not virtual_ranks_of(registered) or not hasattr(registered, "process_group"):  # loaders have them, too
        return None
    facts = dict(_constants(registered.device))
    if registered.device.type == "cpu":  # kernels divide their sums among threads
        facts["threads"] = torch.get_num_threads()
    return facts


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the facts that differ: ``"threads 1 in place of 2"``."""
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return [f"{name} {now.get(name)} in place of {saved.get(name)}" for name in names]


@cache
def _constants(device: torch.device) -> Mapping[str, Any]:
    if device.type == "cuda":
        more = {"device": torch.cuda.get_device_name(device), "CUDA": torch.version.cuda}
        return {"torch": torch.__version__, **more, "cuDNN": torch.backends.cudnn.version()}
    if device.type != "cpu":
        return {"torch": torch.__version__, "device": str(device.type)}
    return {"torch": torch.__version__, "device": _cpu_name(), "kernels": torch.backends.cpu.get_cpu_capability()}


def _cpu_name() -> str:
    """Return the model of the CPU, or its architecture where the system does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()
