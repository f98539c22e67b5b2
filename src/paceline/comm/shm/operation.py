"""An operation of a group on this rank, and its comparison with those that other ranks posted under its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.comm.shm.header import Header, Kind
from paceline.core.processes.missing_ranks import ranks_by_value
from paceline.errors import DesyncError


class Operation:
    """One operation under way on this rank. The engine alone changes it."""

    __slots__ = ("compute", "computed", "error", "finished", "header", "number")

    def __init__(self, number: int, header: Header, compute: Callable[[list[Header]], None]) -> None:
        self.number = number
        """Number of operations posted before it in the group; the same operation has one number on every rank."""
        self.header = header
        self.compute = compute
        """Called once with every local rank's header, in the order of ranks, when all have posted; then dropped."""
        self.computed = False
        """Whether this rank has done its part, or has found that the headers differ."""
        self.finished = False
        """Whether every rank has done its part, so that none reads our memory for it any more."""
        self.error: Exception | None = None
        """Error of the operation if the headers differ, the same on every rank; set before `computed`."""


def is_computed(operation: Operation) -> bool:
    """Return whether this rank has done its part of `operation`."""
    return operation.computed


def is_finished(operation: Operation) -> bool:
    """Return whether every rank has done its part of `operation`."""
    return operation.finished


def mismatch(number: int, headers: Sequence[Header], names: Sequence[int], name: int) -> DesyncError | None:
    """Return the error to raise if ranks posted different operations under `number`; None if all posted the same.

    It is called before any data are used, and the result is the same on every rank.

    Args:
        number: the operation's number.
        headers: the headers of all ranks.
        names: the ranks' names in messages.
        name: this rank's name.
    """
    if all(header.same_as(headers[0]) for header in headers[1:]):
        return None
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
