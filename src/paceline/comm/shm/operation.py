"""An operation of a group on this rank, and its comparison with those that other ranks posted under its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from paceline.comm.shm.header import Header, Kind, Shown
from paceline.core.processes.missing_ranks import ranks_by_value
from paceline.errors import DesyncError

Compute = Callable[[list[Shown]], None]
"""Computes an operation on this rank from what each local rank shows, in the order of ranks."""


class Advances(Protocol):
    """Advances operations: the engine."""

    def wait(self, operation: Operation) -> None:
        """Wait until the result of `operation` is whole on this rank."""

    def progress(self) -> None:
        """Advance operations as far as they go now, without waiting."""


class Operation:
    """One operation under way on this rank. The engine alone changes it."""

    __slots__ = ("compute", "computed", "engine", "error", "finished", "header", "is_own", "number")

    def __init__(self, engine: Advances, number: int, header: Header, compute: Compute, *, is_own: bool) -> None:
        self.engine = engine
        self.number = number
        """Number of operations posted before it in the group; the same operation has one number on every rank."""
        self.header = header
        # Any thread may compute it, and an inference tensor can be written to in inference mode alone.
        self.compute = torch.inference_mode()(compute) if torch.is_inference_mode_enabled() else compute
        """Called once, when all ranks have posted; then dropped."""
        self.is_own = is_own
        """Whether the result is whole when this rank has done its part, because no other rank writes to it."""
        self.computed = False
        """Whether this rank has done its part, or has found that the headers differ."""
        self.finished = False
        """Whether every rank has done its part, so that none reads our memory for it any more."""
        self.error: Exception | None = None
        """Error of the operation if the headers differ, the same on every rank; set before `computed`."""

    def wait(self) -> None:
        """Wait until the result is whole on this rank; raise the errors of the engine's ``wait``."""
        self.engine.wait(self)

    def progress(self) -> None:
        """Advance it, and all before it, as far as they go now."""
        self.engine.progress()

    def is_completed(self) -> bool:
        """Return whether the result is whole on this rank."""
        return self.computed if self.is_own else self.finished

    def end_part(self) -> None:
        """Note that this rank has done its part."""
        self.computed = True
        self.compute = _nothing  # dropped, because it may hold the caller's tensors


def _nothing(_: list[Shown]) -> None:
    """Replace a function that has computed its operation."""


def is_computed(operation: Operation) -> bool:
    """Return whether this rank has done its part of `operation`."""
    return operation.computed


def is_finished(operation: Operation) -> bool:
    """Return whether every rank has done its part of `operation`."""
    return operation.finished


def mismatch(number: int, headers: Sequence[Header], names: Sequence[int], name: int) -> DesyncError:
    """Return the error to raise where ranks posted different operations under `number`, the same on every rank.

    Args:
        number: the operation's number.
        headers: the headers of all ranks.
        names: the ranks' names in messages.
        name: this rank's name.
    """
    descriptions = []
    for header in headers:
        description = str(header)
        if header.kind is Kind.broadcast and 0 <= header.root < len(names):
            description += f" from rank {names[header.root]}"
        descriptions.append(description)
    groups = ranks_by_value(zip(names, descriptions, strict=True))
    parts = "; ".join(f"rank {', '.join(map(str, ranks))}: {description}" for description, ranks in groups.items())
    return DesyncError(
        f"rank {name}: ranks are out of step in operation {number} of this group ({parts}); "
        "call the same collectives in the same order, with equal shapes and dtypes, on every rank"
    )
