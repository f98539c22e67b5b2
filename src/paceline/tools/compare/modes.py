"""The variants to compare: modes of training and numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.tools.program import ProgramConfig

MODES = {
    "single": "one process on one device",
    "dp": "one process, a thread and a replica for each device",
    "ddp": "a rank for each device, Paceline's wrapper",
    "ddp-torch": "a rank for each device, torch's wrapper on Gloo or NCCL",
}


@dataclass(frozen=True)
class Way:
    """A variant: a mode and its number of devices."""

    mode: str
    devices: int

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.devices if self.mode.startswith("ddp") else 1

    @property
    def name(self) -> str:
        """Name used in file names."""
        return f"{self.mode}-{self.devices}"


@dataclass(frozen=True)
class Run(ProgramConfig):
    """Settings of one rank."""

    mode: str
    devices: int
    steps: int
    """Optimizer steps to time."""
    record: str
    """File for the measurements, written by rank 0."""
    program: list[str]
    """A script or ``-m MODULE``, followed by its arguments."""
    turns: tuple[str, int, int]
    """Arguments of :class:`~paceline.tools.compare.measured_run.Turns`."""


def choose_ways(names: str | None, counts: Sequence[int]) -> list[Way]:
    """Return the variants to compare: all modes for one number of devices, or Paceline's wrapper for several.

    Args:
        names: comma-separated modes that override this choice.
        counts: numbers of devices.
    """
    numbers = sorted(set(counts))
    if numbers == [1]:
        raise UsageError("--nproc 1 leaves only one way to train; give at least 2")
    if names is not None:
        modes = list(dict.fromkeys(name.strip() for name in names.split(",")))
    else:
        modes = list(MODES) if len(numbers) == 1 else ["ddp"]
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"--modes has {mode!r}; choose among {', '.join(MODES)}")
    if numbers[0] == 1 and "single" not in modes:
        modes.insert(0, "single")
    ways = [Way(mode, 1 if mode == "single" else number) for mode in modes for number in numbers if number > 1]
    return list(dict.fromkeys(ways))
