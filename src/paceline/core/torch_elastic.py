"""Patches torchelastic's launcher and how it starts ranks, and names a slow module that most ranks import."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any

from torch.distributed import DistError, Store
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.utils import store as store_util

OPTIMIZERS_NEED = "torch._dynamo"
"""The module that torch imports when the first optimizer is created; this takes seconds."""

Start = Callable[[tuple[str, ...], dict[str, str], IO[Any] | None, IO[Any] | None], Any]


@contextmanager
def starting_ranks_with(start: Start) -> Iterator[None]:
    """Make torchelastic start ranks with ``start(command, environment, out, err)`` instead of ``subprocess.Popen``.

    `out` and `err` are the files for a rank's output; None means this process's output. The result has the
    members of ``Popen`` that torchelastic uses. This applies to the whole process until the block ends.
    """

    def popen(handler: SubprocessHandler, args: tuple[Any, ...], env: dict[str, str]) -> Any:
        return start(args, env, handler._stdout, handler._stderr)

    original = SubprocessHandler._popen
    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SubprocessHandler._popen = original  # type: ignore[method-assign]


def ignore_echoes(seconds: float) -> None:
    """Make torchelastic's launcher ignore signals that arrive within `seconds` after one that it has handled."""
    stop, stopped_at = api._terminate_process_handler, -seconds

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal stopped_at
        if time.monotonic() - stopped_at > seconds:
            stopped_at = time.monotonic()
            stop(signum, frame)

    api._terminate_process_handler = handle


def leave_together(seconds: float) -> None:
    """Keep the launcher that holds the store until the others have left the last barrier, for at most `seconds`.

    Otherwise, its connection may close while other launchers still wait in that barrier.
    """
    wait = store_util.barrier

    def barrier(store: Store, world_size: int, key_prefix: str, barrier_timeout: float = 300, **trace: Any) -> None:
        wait(store, world_size, key_prefix, barrier_timeout, **trace)
        with suppress(DistError):  # all launchers have reached the first barrier, so the job's result is known
            wait(store, world_size, f"{key_prefix}/passed", min(seconds, barrier_timeout))

    store_util.barrier = barrier  # type: ignore[assignment]


def close_outputs(handlers: Iterable[SubprocessHandler]) -> None:
    """Close the files that torchelastic opened for the output of ranks; it leaves them to the garbage collector."""
    for handler in handlers:
        for file in (handler._stdout, handler._stderr):
            if file is not None:
                file.close()
