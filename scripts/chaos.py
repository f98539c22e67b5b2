"""Strikes ranks at exact moments, and compares what they end with to runs that nothing disturbed: ``make chaos``.

Every run trains a small network with dropout, batch normalization, a schedule and shuffled data. It has to end with the
very bits of the undisturbed run: parameters, buffers, optimizer, schedule, random generators, and the log of samples.
Under torch DDP and Gloo with more than two ranks the sum's order may follow the buckets, so there one bucket is used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.failpoints import VARIABLE

LOOP = Path(__file__).parent / "chaos_checks" / "loop.py"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MOMENTS = ("rendezvous", "forward", "bucket", "prepared", "gate", "optimizer", "stepped", "boundary")
TIMEOUT_S = 180.0
STEPS = 24


@dataclass(frozen=True)
class Case:
    """One run: how ranks train, what strikes them, and what is expected besides equal bits."""

    name: str
    nproc: int
    orders: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    redone: int | None = 0
    """Completed steps computed again; None for any number."""
    source: str | None = "any"
    """Where the last start went on from."""
    says: str = ""
    """Words that have to be on stderr."""

    @property
    def kills(self) -> int:
        """How many strikes there are."""
        return len(self.orders)


@dataclass
class Outcome:
    """How a case ended."""

    case: Case
    seconds: float
    problems: list[str]
    restarts: int = 0
    redone: int = 0


def sequences() -> Iterator[Case]:
    """Yield runs that are struck again in every start, so that every moment has its turn, at alternating ranks."""
    for nproc in (2, 4):
        for wrapper in ("ours", "torch"):
            for backend in ("paceline", "gloo"):
                turn = nproc + 2 * (wrapper == "torch") + (backend == "gloo")
                orders = tuple(
                    f"{moment} rank={(number + turn) % nproc} at={1 if moment == 'rendezvous' else 2} start={number}"
                    for number, moment in enumerate(MOMENTS)
                )
                # A rank that is killed before the first Checkpointer is a program that never ran.
                yield Case(
                    f"{wrapper}, {backend}", nproc, (*orders[1:4], *orders[4:], ), dict(wrapper=wrapper, backend=backend)
                )


def renumbered(orders: tuple[str, ...]) -> tuple[str, ...]:
    """Return the orders, each for a start of its own."""
    return tuple(f"{order} start={number}" for number, order in enumerate(orders))
