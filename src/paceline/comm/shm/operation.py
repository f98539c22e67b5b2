"""An operation of a group on this rank, and the comparison of what all ranks posted under its number."""

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
        """Operations that this rank posted before it in the group; the same operation has one number on every rank."""
        self.header = header
        self.compute = compute
        """Called once with every local rank's header, in the order of ranks, when all are there; then dropped."""
        self.computed = False
        """Whether this rank has done its part, or has found that the headers differ."""
        self.finished = False
        """Whether everybody has done their part, so that no one reads our memory for it any more."""
        self.error: Exception | None = None
        """Set before `computed` if the headers differ: every rank has the same error."""


def is_computed(operation: Operation) -> bool:
    """Tell whether this rank has done its part of `operation`."""
    return operation.computed


def is_finished(operation: Operation) -> bool:
    """Tell whether every rank has done its part of `operation`."""
    return operation.finished


def mismatch(number: int, headers: Sequence[Header], names: Sequence[int], name: int) -> DesyncError | None:
    """Compare the requests of all ranks for operation `number`, before any byte of anyone's data is used.

    The verdict is the same on every rank.

    Args:
        number: of the operation.
        headers: one for each rank.
        names: what messages call these ranks.
        name: what messages call this rank.

    Returns:
        The error to raise; None if all posted the same.
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
