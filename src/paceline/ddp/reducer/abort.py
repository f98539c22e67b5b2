"""Backwards that an exception has ended, and other wrappers in the same backward: what is still owed to peers.

An exception on one rank ends the backward of every wrapper that it runs through, while the peers go on and wait for
this rank's part. If a wrapper had not begun yet, it would owe collectives that it knows nothing of. So the first
wrapper that a backward reaches begins the others, too. Gradients are as they were before as soon as autograd has
dropped the task. What is owed is carried out when a wrapper is used next: all of it is launched before any of it is
waited for, because the peers wait in an order of their own.

The same registry knows the wrappers that have not read the other ranks' control blocks yet, as beside GPUs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from functools import cache, partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from paceline.core.torch_internals.autograd import current_task, has_ended
from paceline.ddp.consistency.trained import Trained
from paceline.ddp.reducer.backward import Backward, Phase
from paceline.ddp.reducer.extension import Extensions


class Member:
    """A wrapper's reducer, as it is looked at here."""

    trained: Trained
    """The parameters that are averaged."""
    extensions: Extensions
    """The rare cases."""
    backward: Backward | None = None
    """The backward under way, or one that is still owed to peers or not read; None between two."""
    number: int
    """The number of the wrapper, in the order of the program."""

    def is_expected(self) -> bool:
        """Whether the backward under way is going to reach an output of this wrapper, and to be synchronized."""
        raise NotImplementedError

    def begin_early(self) -> None:
        """Begin in a backward that has reached another wrapper first, so that an exception ends both alike."""
        raise NotImplementedError

    def advance(self) -> bool:
        """Run the end of backward up to its next pause; returns whether it is to go on at once."""
        raise NotImplementedError

    def resync_aborted(self) -> None:
        """Take part in what other ranks wait for since an exception ended a backward of this process."""
        raise NotImplementedError

    def complete(self) -> None:
        """Carry a synchronization to its end."""
        while self.advance():
            pass


unsettled: set[int] = set()
"""Numbers of the reducers whose latest backward has not come to its end; empty between two ordinary steps."""
_ENDING = threading.RLock()
"""Held while a backward becomes one that an exception has ended."""


# -- one wrapper ---------------------------------------------------------------------------------------------------


def follow(member: Member, backward: Backward, callback: Callable[[], Any], number: int) -> None:
    """Notice when autograd drops its task, which has `callback`: if `backward` is under way then, it was ended by an
    exception."""
    # No references back, so that what was launched goes with the last reference to it.
    ended = partial(_task_ended, weakref.ref(member), weakref.ref(backward))
    backward.task, backward.task_number = weakref.ref(callback, ended), number


def notice_exception(member: Member) -> None:
    """Notice an exception that has ended a backward where a thread of autograd still holds on to its task."""
    backward = member.backward
    if backward is None or backward.task is None or not backward.is_under_way:
        return
    if has_ended(backward.task_number):
        backward.task = None
        _ended_by_exception(member, backward)


def _task_ended(member: weakref.ref[Member], backward: weakref.ref[Backward], _: object) -> None:
    living, ended = member(), backward()
    if living is not None and ended is not None and ended.task is not None:
        _ended_by_exception(living, ended)


def _ended_by_exception(member: Member, backward: Backward) -> None:
    """Act on the exception once; it is learned of in a thread of autograd, or before in our own."""
    with _ENDING:
        if not backward.is_under_way:
            return
        backward.is_cut_short = backward.phase is Phase.LAUNCHING
        backward.enter(Phase.ABORTED)
        for index, parameter in enumerate(member.trained.parameters):
            if index in backward.elsewhere:
                continue
            if backward.cleared:
                parameter.grad = None
            elif index in backward.held:
                parameter.grad = backward.held[index]
        backward.held = {}  # these keep their values while the others' collectives are met
        member.extensions.abort(backward)


def break_off(member: Member, backward: Backward) -> None:
    """Give `backward` up, as a collective has failed in it; other wrappers may have its parameters, and go on."""
    backward.enter(Phase.BROKEN)
    member.extensions.abort(backward)


def resync(member: Member, backward: Backward) -> Generator[None, None, None]:
    """Carry `backward`, which an exception has ended, to its end, so that no peer waits for this rank.

    Launches the rest, pauses, waits, and pauses again; when it is run on or closed, the gradients come back.
    """
    parameters = member.trained.parameters
    gradients = [parameter.grad for parameter in parameters]
    backward.enter(Phase.LAUNCHING if backward.is_cut_short else Phase.WAITING)
    backward.is_settling = True
    try:
        for parameter in parameters:
            parameter.grad = None
        if backward.is_cut_short:
            member.advance()
        yield  # the other wrappers launch, too
        member.complete()
        yield  # the gradients stay away until the others have finished, too
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


# -- all wrappers of this process ------------------------------------------------------------------------------------


def enter(member: Member) -> int:
    """Let the wrapper of `member` take part from now on, as long as it lives; returns its number."""
    number = next(_numbers())
    _members()[number] = member
    return number


def begin_others(first: Member) -> None:
    """Begin every other wrapper that the backward under way is going to reach."""
    if len(_members()) > 1:
        for member in _in_order():
            if member is not first and member.is_expected():
                member.begin_early()


def in_turn(member: Member) -> Member:
    """Return the wrapper that goes on next at the end of the backward under way, where `member` was to do so.

    All wrappers of a backward launch before any of them waits. Then they wait in turns, in the order of the program on
    every rank: a rank that has no data calls ``sync_gradients()`` for one wrapper after the other.
    """
    if member.backward is not None and member.backward.phase is Phase.LAUNCHING:
        return member
    task, waiting = current_task(), []
    for each in _in_order():
        if (backward := each.backward) is not None and backward.phase is Phase.WAITING and backward.task_number == task:
            waiting.append((each, backward))
    if not waiting:
        return member
    each, backward = min(waiting, key=lambda pair: pair[1].turns)
    backward.turns += 1
    return each


def resync_all() -> None:
    """Settle every wrapper whose backward was ended by an exception.

    Raises:
        CommunicationError: if a collective fails.
    """
    settling = []
    for member in _in_order():
        notice_exception(member)
        if (backward := member.backward) is not None and backward.phase is Phase.ABORTED:
            settling.append(resync(member, backward))
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
        if (backward := member.backward) is not None and backward.phase is Phase.UNREAD:
            try:
                member.complete()
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
