"""Recovery from backward passes that ended with an exception, across all wrappers of this process.

An exception on one rank ends the backward pass of every wrapper involved, while the peers continue and wait for this
rank. This rank therefore still owes them the remaining collectives. A wrapper that the backward pass had not reached
yet would owe collectives without knowing it, so the first wrapper that is reached also begins the others. Gradients are
restored as soon as autograd drops the graph task. The owed collectives run the next time a wrapper is used. All of them
are launched before any is waited for, because the peers may wait in a different order.

The same registry is used to find wrappers that have not read the other ranks' control blocks yet (with GPUs, blocks are
read late).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

from paceline.core.torch_internals import current_task, has_ended
from paceline.ddp.backward import Backward, Forward, PendingForwards, Phase
from paceline.ddp.extension_points import Extensions
from paceline.ddp.finisher import Finisher
from paceline.ddp.module_changes import Trained


class Member(Protocol):
    """The part of a reducer's interface that this module uses."""

    trained: Trained
    """The averaged parameters."""
    extensions: Extensions
    """The rare cases."""
    finisher: Finisher
    """Averages buckets over the ranks."""
    backward: Backward | None
    """The backward pass in progress, or one with collectives still to run or blocks still to read; else None."""
    number: int
    """The wrapper's number in order of construction."""
    forwards: PendingForwards
    """Its forward passes that await their backward pass."""

    def is_expected(self) -> bool:
        """Return whether the backward pass in progress will reach an output of this wrapper and be synchronized."""

    def follow_module(self) -> None:
        """Switch to the module's current parameters once all ranks agree on them."""

    def begin_in_graph_task(self, forward: Forward | None) -> None:
        """Begin a backward pass of `forward`; None if the backward pass reached another wrapper first."""

    def advance(self) -> bool:
        """Run the end of the backward pass up to its next pause; returns whether to continue immediately."""

    def complete(self) -> None:
        """Run the end of the backward pass without pauses."""


unfinished: set[int] = set()
"""Numbers of the reducers whose latest backward pass is incomplete; empty between ordinary steps."""
_ENDING = threading.RLock()
"""Held while handling the end of a backward pass, because an autograd thread may drop the task while the main thread
also detects the exception. Reentrant, because garbage collection may drop another task meanwhile."""
members: WeakValueDictionary[int, Member] = WeakValueDictionary()
"""The living wrappers of this process, by number; a dict keeps them in order of construction."""
living: dict[int, Any] = members.data  # type: ignore[attr-defined]
"""The same in a dict, whose length is cheaper to ask."""
_numbers = count()


# -- one wrapper ---------------------------------------------------------------------------------------------------


def notice_exception(member: Member) -> None:
    """Detect a backward pass that an exception ended, even if an autograd thread still holds its graph task."""
    backward = member.backward
    if backward is None or backward.task is None or not backward.is_under_way:
        return
    if has_ended(backward.task_number):
        backward.task = None  # so that its end is not detected again, possibly during a resync
        _ended_by_exception(member, backward)


def task_ended(member: weakref.ref[Member], backward: weakref.ref[Backward], _: object) -> None:
    """Called when autograd drops the graph task of `backward`; if that is in progress, an exception has ended it."""
    living, ended = member(), backward()
    if living is not None and ended is not None and ended.task is not None:
        _ended_by_exception(living, ended)


def _ended_by_exception(member: Member, backward: Backward) -> None:
    """Restore the gradients from before `backward`; its collectives run later. Repeated calls do nothing."""
    with _ENDING:
        if not backward.is_under_way:
            return
        backward.is_cut_short = backward.phase is Phase.LAUNCHING
        backward.enter(Phase.BROKEN if member.finisher.has_failed else Phase.ABORTED)
        for index, parameter in enumerate(member.trained.parameters):
            if index in backward.averaged_elsewhere:
                continue
            if backward.grads_were_none:
                parameter.grad = None
            elif index in backward.saved_gradients:
                parameter.grad = backward.saved_gradients[index]
        # These gradients belong to the user again. If they were kept here, the resync could write an average into one.
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
            parameter.grad = None  # the remaining buckets send zeros, not gradients that the user is accumulating
        if backward.is_cut_short:
            member.advance()
        yield  # so that the other wrappers can launch
        member.complete()
        yield  # wrappers may share parameters, so gradients are restored only when all have finished
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


# -- all wrappers of this process ------------------------------------------------------------------------------------


def register(member: Member) -> int:
    """Register `member` until it is garbage-collected; returns its number."""
    number = next(_numbers)
    members[number] = member
    return number


def unregister(number: int) -> None:
    """Forget a wrapper that no longer averages."""
    unfinished.discard(number)
    members.pop(number, None)


def follow_modules(last: Member) -> None:
    """Call ``follow_module()`` for the wrappers up to `last`, in the same order on all ranks.

    The order matters because the calls are collective, and backward passes on different ranks may reach different
    wrappers first.
    """
    for member in _in_order():
        if member is last:
            break
        if member.is_expected():
            member.follow_module()
    last.follow_module()


def others_await(member: Member) -> bool:
    """Return whether another wrapper may be reached by the backward pass in progress."""
    others = [other.forwards for other in _in_order() if other is not member]
    return any(forwards.is_unseen or bool(forwards) for forwards in others)


def begin_others(first: Member) -> None:
    """Begin every other wrapper that the backward pass in progress will reach."""
    for member in _in_order():
        if member is not first and member.is_expected():
            member.begin_in_graph_task(None)


def in_turn(member: Member) -> Member:
    """Return the wrapper that must continue next at the end of the current backward pass: `member` or an earlier one.

    All wrappers in a backward pass launch before any of them waits. Then they finish one after another, in order of
    construction, because other ranks may run a separate backward pass for each, or call ``sync_gradients()``.
    """
    if member.backward is not None and member.backward.phase is Phase.LAUNCHING:
        return member
    task = current_task()
    for item in _in_order():
        if (backward := item.backward) is not None and backward.phase is Phase.WAITING and backward.task_number == task:
            return item
    return member


def resync_all() -> None:
    """Run the collectives that wrappers owe because an exception ended their backward pass."""
    running = []
    for member in _in_order():
        notice_exception(member)
        if (backward := member.backward) is not None and backward.phase is Phase.ABORTED:
            running.append(resync(member, backward))
    try:
        for _ in range(2):
            for generator in running:
                next(generator, None)
    finally:
        # In reverse order, because each one restores the gradients that it saw, and the first one saw the user's.
        for generator in reversed(running):
            generator.close()


def read_all() -> None:
    """Read the unread control blocks of all wrappers, in the same order on every rank."""
    errors: list[BaseException] = []
    for member in _in_order():
        if (backward := member.backward) is not None and backward.phase is Phase.UNREAD:
            try:
                member.complete()
            except BaseException as error:  # the other ranks still read the next wrapper's blocks
                errors.append(error)
    if errors:
        raise errors[0]


def _in_order() -> list[Member]:
    """Return all members in order of construction, which is the same on every rank."""
    return [member for reference in members.valuerefs() if (member := reference()) is not None]
