"""The processor and its settings on which the bits of sums depend, saved with models that promise the same bits."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch


def processor_of(device: torch.device) -> dict[str, Any]:
    """Return the facts on which the bits of sums on `device` depend."""
    facts = dict(_constants(device))
    if device.type == "cpu":  # kernels divide their sums among threads
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
