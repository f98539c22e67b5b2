"""The engines of this process: a wait in one advances the others, and a forked child leaves all of them to the rank."""

from __future__ import annotations

import os
import weakref
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.comm.shm.engine import Engine

_registry: tuple[weakref.ref[Engine], ...] = ()
"""Replaced as a whole, because threads read it while others make groups."""


def engines() -> list[Engine]:
    """Return the engines that are alive."""
    return [engine for reference in _registry if (engine := reference()) is not None]


def register(engine: Engine) -> None:
    """Add `engine`, for as long as it is alive."""
    global _registry
    _release_after_fork()
    _registry = (*(reference for reference in _registry if reference() is not None), weakref.ref(engine))


@cache
def _release_after_fork() -> None:
    """Make forked children (DataLoader workers) release the rank's engines."""

    def leave() -> None:
        global _registry
        left, _registry = engines(), ()
        for engine in left:
            engine.leave_to_parent()

    os.register_at_fork(after_in_child=leave)
