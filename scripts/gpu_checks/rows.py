"""The input of a check and its result."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.distributed as dist


class Verdict(str, Enum):
    """The outcome of one line of a check."""

    OK = "ok"
    FAILED = "FAILED"
    NOT_RUN = "not run"
    MEASURED = "measured"


class NotRun(Exception):
    """Raised by a check that cannot run here; its text follows "because"."""


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    what: str
    value: str
    verdict: Verdict
    remedy: str = ""
    """Advice to the user if the line failed; empty for the check's remedy."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The numbers in `value`, for programs."""


def holds(what: str, value: str, ok: bool, remedy: str = "", **numbers: float) -> Row:
    """Return a line with a pass criterion."""
    return Row(what, value, Verdict.OK if ok else Verdict.FAILED, "" if ok else remedy, numbers)


def measured(what: str, value: str, **numbers: float) -> Row:
    """Return a line without a pass criterion."""
    return Row(what, value, Verdict.MEASURED, "", numbers)


def not_run(what: str, reason: str) -> Row:
    """Return the line of an omitted check; `reason` follows "because"."""
    return Row(what, f"because {reason}", Verdict.NOT_RUN)


@dataclass(frozen=True)
class Place:
    """The rank that runs a check."""

    rank: int
    size: int
    device: torch.device
    rounds: int
    """Rounds of timing."""
    group: str = ""
    """The backend that carries gradients: nccl, gloo or paceline."""

    @property
    def on_gpu(self) -> bool:
        """Whether the check runs on a GPU; on the CPU, sizes are tiny."""
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
