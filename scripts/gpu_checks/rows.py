"""The arguments and the results of checks."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist


class Verdict(str, Enum):
    """The verdict on one line of a check."""

    OK = "ok"
    FAILED = "FAILED"
    NOT_RUN = "not run"
    MEASURED = "measured"


class NotRun(Exception):
    """Raised by a check that cannot run here. The report shows the text after "because"."""


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    what: str
    value: str
    verdict: Verdict
    remedy: str = ""
    """Advice to the user if the line failed. If empty, the advice of the check is shown."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The numbers in `value`, in machine-readable form."""


def holds(what: str, value: str, ok: bool, remedy: str = "", **numbers: float) -> Row:
    """Return a line with a pass criterion."""
    return Row(what, value, Verdict.OK if ok else Verdict.FAILED, "" if ok else remedy, numbers)


def measured(what: str, value: str, **numbers: float) -> Row:
    """Return a line without a pass criterion."""
    return Row(what, value, Verdict.MEASURED, "", numbers)


def not_run(what: str, reason: str) -> Row:
    """Return the line of a check that was not run. The report shows `reason` after "because"."""
    return Row(what, f"because {reason}", Verdict.NOT_RUN)


@dataclass(frozen=True)
class Place:
    """The rank that runs a check."""

    rank: int
    size: int
    device: torch.device
    folder: Path
    """A folder that all ranks share, deleted after the check."""

    @property
    def on_gpu(self) -> bool:
        """Whether the check runs on a GPU. On the CPU, it uses tiny sizes."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for the GPU and for the other ranks."""
        self.synchronize()
        if self.size > 1:
            dist.barrier()

    def tidy(self) -> None:
        """Free the memory of earlier models."""
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def steps(self, on_gpu: int, on_cpu: int) -> int:
        """Return the number of repetitions for this device."""
        return on_gpu if self.on_gpu else on_cpu
