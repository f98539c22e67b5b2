"""Replaces torchelastic's way of starting ranks; names a slow module that most ranks import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

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


def close_outputs(handlers: Iterable[SubprocessHandler]) -> None:
    """Close the files that torchelastic opened for the output of ranks; it leaves them to the garbage collector."""
    for handler in handlers:
        for file in (handler._stdout, handler._stderr):
            if file is not None:
                file.close()
