"""Backwards that ended with an exception: the collectives that this rank still owes to its peers, in all wrappers.

An exception on one rank ends the backward of every wrapper involved, while the peers continue and wait for this rank.
A wrapper that had not begun yet would owe collectives without knowing it. So the first wrapper that a backward reaches
also begins the others. Gradients are restored as soon as autograd has dropped the graph task. The owed collectives are
run when a wrapper is used next: all of them are launched before any is waited for, because the peers may wait in
another order.

The same registry finds the wrappers that have not read the other ranks' control blocks yet (with GPUs, they are read
late).
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
    """The backward under way, or one that still owes collectives or has not read its blocks; else None."""
    number: int
    """The wrapper's number in order of construction."""

    def is_expected(self) -> bool:
        """Return whether the backward under way will reach an output of this wrapper and be synchronized."""

    def follow_module(self) -> None:
        """Switch to the module's present parameters, once all ranks agree on them."""

    def begin_early(self) -> None:
        """Begin in a backward that reached another wrapper first, so that an exception ends it here too."""

    def advance(self) -> bool:
        """Run the end of backward up to its next pause; returns whether it continues at once."""

    def resync_aborted(self) -> None:
        """Run the collectives that other ranks are still waiting for after an exception ended a backward here."""

    def complete(self) -> None:
        while self.advance():
            pass


unfinished: set[int] = set()
"""Numbers of the reducers whose latest backward is not complete; empty between two ordinary steps."""
_ENDING = threading.RLock()
"""Lock held while the end of a backward is handled: an autograd thread may drop the task while the main thread also
notices the exception. Reentrant, because garbage collection may drop another task while the lock is held."""


# -- one wrapper ---------------------------------------------------------------------------------------------------


def watch_task(member: Member, backward: Backward, callback: Callable[[], Any], number: int) -> None:
    """Watch for autograd to drop graph task `number`, which holds the only reference to `callback`.

    If `backward` is still under way at that point, an exception has ended it.
    """
    # Weak references, because `backward` refers to `ended` through its `task`: a cycle would keep launched works alive.
    ended = partial(_task_ended, weakref.ref(member), weakref.ref(backward))
    backward.task, backward.task_number = weakref.ref(callback, ended), number


def notice_exception(member: Member) -> None:
    """Detect that an exception has ended a backward although an autograd thread still holds its task."""
    backward = member.backward
    if backward is None or backward.task is None or not backward.is_under_way:
        return
    if has_ended(backward.task_number):
        backward.task = None  # so that its end is not noticed a second time, perhaps in the middle of a resync
        _ended_by_exception(member, backward)


def _task_ended(member: weakref.ref[Member], backward: weakref.ref[Backward], _: object) -> None:
    living, ended = member(), backward()
    if living is not None and ended is not None and ended.task is not None:
        _ended_by_exception(living, ended)


def _ended_by_exception(member: Member, backward: Backward) -> None:
    """Restore the gradients from before `backward`, once; its collectives remain to be run later."""
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
        # They belong to the user again; if they stayed here, the resync would write an average into one of them.
        backward.saved_gradients = {}
        member.extensions.abort(backward)


def break_off(member: Member, backward: Backward) -> None:
    """Abandon `backward` after a failed collective; other wrappers with the same parameters may continue."""
    backward.enter(Phase.BROKEN)
    member.extensions.abort(backward)


def resync(member: Member, backward: Backward) -> Generator[None, None, None]:
    """Complete `backward`, which an exception has ended, so that no peer waits for this rank.

    Launches the remaining buckets, pauses, waits, and pauses again; when resumed or closed, it restores the gradients.
    """
    parameters = member.trained.parameters
    gradients = [parameter.grad for parameter in parameters]
    backward.enter(Phase.LAUNCHING if backward.is_cut_short else Phase.WAITING)
    backward.is_resyncing = True
    try:
        for parameter in parameters:
            parameter.grad = None  # the remaining buckets send zeros; accumulated gradients stay the user's
        if backward.is_cut_short:
            member.advance()
        yield  # the other wrappers launch
        member.complete()
        yield  # wrappers may share parameters, so gradients are restored only when all have finished
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
    """Forget a wrapper that no longer averages."""
    unfinished.discard(number)
    _members().pop(number, None)


def follow_modules(last: Member) -> None:
    """Call ``follow_module()`` for the wrappers up to `last`, in the same order on all ranks.

    The order matters because the calls are collective, and ranks' backwards may reach different wrappers first.
    """
    for member in _in_order():
        if member is last:
            break
        if member.is_expected():
            member.follow_module()
    last.follow_module()


def begin_others(first: Member) -> None:
    """Begin a backward in every other wrapper that the backward under way will reach."""
    if len(_members()) > 1:
        for member in _in_order():
            if member is not first and member.is_expected():
                member.begin_early()


def in_turn(member: Member) -> Member:
    """Return the wrapper that must continue next at the end of the backward under way: `member`, or one before it.

    All wrappers of a backward launch before any of them waits. Then each one finishes before the next one waits, in
    order of construction: other ranks may run a separate backward, or call ``sync_gradients()``, for each.
    """
    if member.backward is not None and member.backward.phase is Phase.LAUNCHING:
        return member
    task = current_task()
    for each in _in_order():
        if (backward := each.backward) is not None and backward.phase is Phase.WAITING and backward.task_number == task:
            return each
    return member


def resync_all() -> None:
    """Run the collectives owed by every wrapper whose backward was ended by an exception."""
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
        # In reverse, because each restores the gradients it found, and the first one found the user's.
        for each in reversed(running):
            each.close()


def read_all() -> None:
    """Read the unread control blocks of all wrappers, in the same order on every rank."""
    errors: list[BaseException] = []
    for member in _in_order():
        if (backward := member.backward) is not None and backward.phase is Phase.UNREAD:
            try:
                member.complete()
            except BaseException as error:  # the other ranks will still read the next wrapper's blocks
                errors.append(error)
    if errors:
        raise errors[0]


def _in_order() -> list[Member]:
    """Return all members in order of construction, which is the same on every rank."""
    return [member for reference in _members().valuerefs() if (member := reference()) is not None]


@cache
def _members() -> WeakValueDictionary[int, Member]:
    return WeakValueDictionary()


@cache
def _numbers() -> count[int]:
    return count()
