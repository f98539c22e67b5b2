"""Backwards that an exception has ended: the collectives that this rank still owes to its peers, in all wrappers.

An exception on one rank ends the backward of every wrapper that it runs through, while the peers go on and wait for
this rank's part. If a wrapper had not begun yet, it would owe collectives without knowing it. So the first
wrapper that a backward reaches also begins the others. Gradients are as they were before as soon as autograd has
dropped the graph task. The collectives are made up for when a wrapper is used next: all of them are launched before
any is waited for, because the peers may wait in another order.

The same registry knows the wrappers that have not read the other ranks' control blocks yet, as beside GPUs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from functools import cache, partial
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

from paceline.core.torch_internals.autograd import current_task, has_ended
from paceline.ddp.consistency.module_changes import Trained
from paceline.ddp.reducer.backward import Backward, Phase
from paceline.ddp.reducer.extension import Extensions


class Member(Protocol):
    """The members of a wrapper's reducer that are used here."""

    trained: Trained
    """The parameters that are averaged."""
    extensions: Extensions
    """The rare cases."""
    backward: Backward | None = None
    """The backward under way, or one whose collectives are still owed or whose blocks are not read; else None."""
    number: int
    """The number of the wrapper in the program's order of construction."""

    def is_expected(self) -> bool:
        """Return whether the backward under way will reach an output of this wrapper, and be synchronized."""

    def follow_module(self) -> None:
        """Average the parameters that the module has now, once all ranks agree."""

    def begin_early(self) -> None:
        """Begin in a backward that has reached another wrapper first, so that an exception ends both."""

    def advance(self) -> bool:
        """Run the end of backward up to its next pause; returns whether it goes on at once."""

    def resync_aborted(self) -> None:
        """Take part in collectives that other ranks wait for since an exception ended a backward of this process."""

    def complete(self) -> None:
        while self.advance():
            pass


unfinished: set[int] = set()
"""Numbers of the reducers whose latest backward has not come to its end; empty between two ordinary steps."""
_ENDING = threading.RLock()
"""Lock held while an ended backward is handled: a thread of autograd may drop the task while the main thread also
notices the exception. Reentrant, because a garbage collection inside may drop another task."""


# -- one wrapper ---------------------------------------------------------------------------------------------------


def watch_task(member: Member, backward: Backward, callback: Callable[[], Any], number: int) -> None:
    """Notice when autograd drops graph task `number`, which alone refers to `callback`.

    If `backward` is under way then, an exception has ended it.
    """
    # Weak, because `backward` holds the reference that holds `ended`: a cycle would keep the launched works alive.
    ended = partial(_task_ended, weakref.ref(member), weakref.ref(backward))
    backward.task, backward.task_number = weakref.ref(callback, ended), number


def notice_exception(member: Member) -> None:
    """Notice an exception that has ended a backward while a thread of autograd still holds its task."""
    backward = member.backward
    if backward is None or backward.task is None or not backward.is_under_way:
        return
    if has_ended(backward.task_number):
        backward.task = None  # its death must not be noticed a second time, perhaps in the middle of a resync
        _ended_by_exception(member, backward)


def _task_ended(member: weakref.ref[Member], backward: weakref.ref[Backward], _: object) -> None:
    living, ended = member(), backward()
    if living is not None and ended is not None and ended.task is not None:
        _ended_by_exception(living, ended)


def _ended_by_exception(member: Member, backward: Backward) -> None:
    """Put back the gradients from before `backward`, once, and leave its collectives to be made up for."""
    with _ENDING:
        if not backward.is_under_way:
            return
        backward.is_cut_short = backward.phase is Phase.LAUNCHING
        backward.enter(Phase.ABORTED)
        for index, parameter in enumerate(member.trained.parameters):
            if index in backward.averaged_elsewhere:
                continue
            if backward.grads_were_none:
                parameter.grad = None
            elif index in backward.saved_gradients:
                parameter.grad = backward.saved_gradients[index]
        # They are the user's again: with `saved_gradients` the resync would write an average into one of them.
        backward.saved_gradients = {}
        member.extensions.abort(backward)


def break_off(member: Member, backward: Backward) -> None:
    """Give `backward` up after a failed collective; other wrappers with its parameters may continue."""
    backward.enter(Phase.BROKEN)
    member.extensions.abort(backward)


def resync(member: Member, backward: Backward) -> Generator[None, None, None]:
    """Carry `backward`, which an exception has ended, to its end, so that no peer waits for this rank.

    Launches the rest, pauses, waits, and pauses again; when it is resumed or closed, the gradients come back.
    """
    parameters = member.trained.parameters
    gradients = [parameter.grad for parameter in parameters]
    backward.enter(Phase.LAUNCHING if backward.is_cut_short else Phase.WAITING)
    backward.is_resyncing = True
    try:
        for parameter in parameters:
            parameter.grad = None  # the buckets that are left go with zeros; accumulated gradients stay the user's
        if backward.is_cut_short:
            member.advance()
        yield  # the other wrappers launch
        member.complete()
        yield  # wrappers may share parameters, so gradients stay away until all have finished
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


# -- all wrappers of this process ------------------------------------------------------------------------------------


def register(member: Member) -> int:
    """Register the wrapper of `member` for as long as it lives; returns its number."""
    number = next(_numbers())
    _members()[number] = member
    return number


def unregister(number: int) -> None:
    """Forget a wrapper that averages no more."""
    unfinished.discard(number)
    _members().pop(number, None)


def follow_modules(last: Member) -> None:
    """Follow the modules of wrappers up to `last` in one order on all ranks, whichever a rank's backward reaches first.

    Ranks wait for each other in this.
    """
    for member in _in_order():
        if member is last:
            break
        if member.is_expected():
            member.follow_module()
    last.follow_module()


def begin_others(first: Member) -> None:
    """Begin a backward in every other wrapper that the one under way is going to reach."""
    if len(_members()) > 1:
        for member in _in_order():
            if member is not first and member.is_expected():
                member.begin_early()


def in_turn(member: Member) -> Member:
    """Return the wrapper that goes on next at the end of the backward under way, where `member` was to do so.

    All wrappers of a backward launch before any of them waits. Then each comes to its end before the next one waits, in
    the order of the program: other ranks may run a backward for each, or call ``sync_gradients()`` for each.
    """
    if member.backward is not None and member.backward.phase is Phase.LAUNCHING:
        return member
    task = current_task()
    for each in _in_order():
        if (backward := each.backward) is not None and backward.phase is Phase.WAITING and backward.task_number == task:
            return each
    return member


def resync_all() -> None:
    """Make up for the collectives of every wrapper whose backward was ended by an exception."""
    running = []
    for member in _in_order():
        notice_exception(member)
        if (backward := member.backward) is not None and backward.phase is Phase.ABORTED:
            running.append(resync(member, backward))
    try:
        for _ in range(2):
            for each in running:
                next(each, None)
    finally:
        # In reverse, because each restores the gradients that it found, the first the user's own.
        for each in reversed(running):
            each.close()


def read_all() -> None:
    """Read the control blocks that are not read yet, of all wrappers in the same order on every rank."""
    errors: list[BaseException] = []
    for member in _in_order():
        if (backward := member.backward) is not None and backward.phase is Phase.UNREAD:
            try:
                member.complete()
            except BaseException as error:  # the other ranks read the next wrapper's blocks all the same
                errors.append(error)
    if errors:
        raise errors[0]


def _in_order() -> list[Member]:
    """Return all members in their order of construction, which is the same on every rank."""
    return [member for reference in _members().valuerefs() if (member := reference()) is not None]


@cache
def _members() -> WeakValueDictionary[int, Member]:
    return WeakValueDictionary()


@cache
def _numbers() -> count[int]:
    return count()
