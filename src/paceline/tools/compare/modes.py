"""The ways to train that are compared, and the settings of their ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from paceline.errors import UsageError
from paceline.tools.compare.turn_taking import Place

Wrapper = Literal["paceline", "threads", "torch"]
"""Class in the place of ``paceline.DistributedDataParallel``: itself, DataParallel's threads, or torch DDP."""


@dataclass(frozen=True)
class Mode:
    """One way to train."""

    summary: str
    """Description for ``--help`` and below the table."""
    wrapper: Wrapper = "paceline"
    is_single: bool = False
    """Whether one process does everything."""
    accumulate: int = 1
    """Batches of the loader per optimizer step, times those of the program."""


MODES = {
    "single": Mode("one process on one device", is_single=True),
    "dp": Mode("one process, a thread and a replica for each device", "threads", is_single=True),
    "ddp": Mode("a rank for each device, Paceline's wrapper"),
    "ddp-torch": Mode("a rank for each device, torch's wrapper on Gloo or NCCL", "torch"),
    "ddp-accumulate": Mode("as ddp, with an optimizer step for every second batch", accumulate=2),
}


class Way(NamedTuple):
    """A mode on so many devices: one of those that are compared."""

    mode: str
    devices: int
    """Devices of the comparison, of which the mode ``single`` has one."""

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.mode}-{self.devices}"


@dataclass(frozen=True)
class Run:
    """The work of one rank in one mode; travels to it as JSON."""

    wrapper: Wrapper
    devices: int
    """Replicas of the threads' wrapper."""
    steps: int
    """Optimizer steps that are timed."""
    record: str
    """File to which rank 0 writes the measurements."""
    recipe: str | None
    """Name of a recipe, whose configuration is the only argument; None for a script."""
    arguments: tuple[str, ...]
    """The recipe's configuration as JSON, or a script and its arguments."""
    place: Place
    """Place among the modes that take turns."""

    def to_json(self) -> str:
        """Return it as one argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
        """Read the output of :meth:`to_json`."""
        values = json.loads(text)
        arguments, place = tuple(values["arguments"]), Place(**values["place"])
        return cls(**{**values, "arguments": arguments, "place": place})


def choose_modes(names: str | None, *, is_recipe: bool) -> list[str]:
    """Return the modes that the user names with commas between, or all that the target can run."""
    if names is None:
        return [name for name, mode in MODES.items() if is_recipe or mode.accumulate == 1]
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in MODES:
            raise UsageError(f"--modes has {name!r}, which is none of {', '.join(MODES)}")
        if MODES[name].accumulate > 1 and not is_recipe:
            raise UsageError(f"--modes {name} is for recipes: a script decides itself when its optimizer steps")
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"--modes {names} names a mode twice; name each once")
    return chosen


def scaling_ways(counts: Sequence[int], *, is_recipe: bool) -> list[Way]:
    """Return one process, and the ranks of each other number with and, for a recipe, without a step for every batch."""
    listed = ",".join(map(str, counts))
    if len(set(counts)) < len(counts):
        raise UsageError(f"--nproc {listed} has a number twice; give each once")
    if 1 not in counts:
        raise UsageError(f"--nproc {listed} lacks 1, to which speed-up is relative; give --nproc 1,{listed}")
    modes = ("ddp", "ddp-accumulate") if is_recipe else ("ddp",)
    return [Way("single", 1), *(Way(mode, count) for mode in modes for count in sorted(counts) if count > 1)]


def ranks_of(mode: Mode, nproc: int) -> int:
    """Return how many processes `mode` runs on `nproc` devices."""
    return 1 if mode.is_single else nproc


def devices_of(name: str, nproc: int) -> int:
    """Return how many devices the mode called `name` trains on."""
    return 1 if name == "single" else nproc
