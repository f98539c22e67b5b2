"""Replaces torchelastic's way of starting ranks and its signal handler; names a slow module that most ranks import."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

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


def close_outputs(handlers: Iterable[SubprocessHandler]) -> None:
    """Close the files that torchelastic opened for the output of ranks; it leaves them to the garbage collector."""
    for handler in handlers:
        for file in (handler._stdout, handler._stderr):
            if file is not None:
                file.close()
