"""Wrappers in one backward: all of them begin before any can fail, and resync together what an exception left.

An exception on one rank ends the backward of every wrapper that it runs through. If one of them had not begun yet, it
would owe its peers collectives that it knows nothing of. So the first wrapper that a backward reaches begins the
others, too. Afterwards all that is owed is launched before any of it is waited for, since the peers wait in an order of
their own.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary


class Member(Protocol):
    """A wrapper's reducer, as the others see it."""

    @property
    def is_aborted(self) -> bool:
        """Whether an exception ended a backward while peers still wait for this rank's part."""

    def is_expected(self) -> bool:
        """Whether the backward under way is going to reach an output of this wrapper."""

    def begin_early(self) -> None:
        """Begin the backward under way, which has not reached this wrapper's outputs yet."""

    def resync(self) -> Generator[None, None, None]:
        """Take part in what peers wait for: launch, pause, wait, pause; when closed, restore the gradients."""

    def read_blocks(self) -> None:
        """Carry a backward to its end that has shown averages before it read control blocks, if there is one."""


def enter(member: Member) -> None:
    """Let `member` take part from now on, as long as it lives."""
    _members()[next(_numbers())] = member


def is_alone() -> bool:
    """Whether there is no more than one wrapper."""
    return len(_members()) <= 1


def begin_others(first: Member) -> None:
    """Begin every other wrapper that the backward under way is going to reach."""
    for member in _in_order():
        if member is not first and member.is_expected():
            member.begin_early()


def resync_all() -> None:
    """Settle every wrapper whose backward was ended by an exception.

    Raises:
        CommunicationError: if a collective fails.
    """
    settling = [member.resync() for member in _in_order() if member.is_aborted]
    try:
        for _ in range(2):
            for restoring in settling:
                next(restoring, None)
    finally:
        for restoring in reversed(settling):  # each restores the gradients that it found
            restoring.close()


def read_all() -> None:
    """Read the control blocks that are not read yet, of all wrappers in the same order on every rank.

    Raises:
        PacelineError: the first error, once all are read.
    """
    errors: list[BaseException] = []
    for member in _in_order():
        try:
            member.read_blocks()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _in_order() -> list[Member]:
    """All members in the order in which they came, which is that of the program."""
    return [member for reference in _members().valuerefs() if (member := reference()) is not None]


@cache
def _members() -> WeakValueDictionary[int, Member]:
    return WeakValueDictionary()


@cache
def _numbers() -> count[int]:
    return count()
