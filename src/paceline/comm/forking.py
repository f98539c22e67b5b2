"""Keeps forked children, such as DataLoader workers, away from their rank's groups and memory.

A child has copies of the rank's objects, but not the rank's threads. Gloo's destructor would wait forever for such a
thread, and would close the rank's connections. So a child never destroys a process group, even one that is garbage.
Finalizers that affect peers or shared memory run only in the process that registered them.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from paceline.core.torch_distributed import get_known_groups
from paceline.errors import CommunicationError

_groups: weakref.WeakSet[Any] = weakref.WeakSet()
"""Process groups that were passed to :func:`keep_in_children`."""
_held: list[list[Any]] = []
"""Groups and stores for each fork that is under way; several threads may fork at once."""


def finalize(owner: Any, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function` when `owner` is garbage-collected in this process, but not in a forked child or at exit."""
    weakref.finalize(owner, _run_in, os.getpid(), function, arguments).atexit = False


def _run_in(process: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        function(*arguments)


def check_own_process(process: int) -> None:
    """Raise an error if this process is a forked child of `process`."""
    if os.getpid() != process:
        raise CommunicationError(
            f"this process was forked from a rank (pid {process}), which alone can use its process groups; "
            "communicate in the rank, or spawn processes and initialize a group for them"
        )


def keep_in_children(group: Any) -> None:
    """Keep forked children from destroying `group`, and any group that torch knows at the time of the fork."""
    _groups.add(group)
    _register()


@cache
def _register() -> None:
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_keep_all)


def _hold() -> None:
    """Hold references to every group and its store until the fork is over.

    This runs before the fork because hooks registered earlier, such as logging's, run first in the child. Their
    allocations may start a garbage collection, which would destroy an unreferenced group.
    """
    known_groups = get_known_groups()
    _held.append([*_groups, *known_groups, *known_groups.values()])


def _let_go() -> None:
    _held.pop()


def _keep_all() -> None:
    """In a child, keep the held groups and stores forever, even at exit."""
    for reference in _held.pop():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(reference))
