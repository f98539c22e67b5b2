"""Keeps forked children, such as DataLoader workers, away from the groups and the memory of their rank.

A child has copies of the rank's objects but not its threads. Gloo's destructor waits for such a thread for ever, and
would say goodbye to the peers in the rank's name. So a child never destroys a process group, even if nothing refers to
it. Finalizers that concern peers or shared memory run only in the process that made them.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from paceline.core.torch_internals.distributed.c10d import get_known_groups
from paceline.errors import CommunicationError

_groups: weakref.WeakSet[Any] = weakref.WeakSet()
"""Process groups that were passed to :func:`keep_in_children`."""
_held: list[list[Any]] = []
"""Groups and stores for each fork that is under way, as several threads may fork."""


def finalize(owner: Any, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function` when `owner` is collected in this process, but not in a forked child or at exit."""
    weakref.finalize(owner, _run_in, os.getpid(), function, arguments).atexit = False


def _run_in(process: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        function(*arguments)


def check_own_process(process: int) -> None:
    """Check that this is not a child of `process`."""
    if os.getpid() != process:
        raise CommunicationError(
            f"this process was forked from a rank (pid {process}), and only the rank itself belongs to its process "
            "groups; communicate there, or initialize a group of the children's own in processes that are spawned"
        )


def keep_in_children(group: Any) -> None:
    """Keep forked children from destroying `group`, and any group that torch knows at the time of the fork."""
    _groups.add(group)
    _register()


@cache
def _register() -> None:
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_keep_all)


def _hold() -> None:
    """Refer to every group and its store until the fork is over.

    Before the fork, because hooks that were registered earlier, such as those of logging, come first in a child. What
    they allocate may start a collection there, which would destroy a group that is garbage already.
    """
    known = get_known_groups()
    _held.append([*_groups, *known, *known.values()])


def _let_go() -> None:
    _held.pop()


def _keep_all() -> None:
    """In a child: never release what is held, not even at exit."""
    for kept in _held.pop():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
