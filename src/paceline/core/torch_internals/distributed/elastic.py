"""torchelastic's way of starting a rank, and a slow module that most ranks import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

OPTIMIZERS_NEED = "torch._dynamo"
"""The module that torch imports, in seconds, when the first optimizer is made."""

Start = Callable[[tuple[str, ...], dict[str, str], IO[Any] | None, IO[Any] | None], Any]


@contextmanager
def starting_ranks_with(start: Start) -> Iterator[None]:
    """Make torchelastic start ranks by ``start(command, environment, out, err)`` instead of ``subprocess.Popen``.

    `out` and `err` are the files for a rank's output; None where it goes to this process's own. The result has the
    members of ``Popen`` that torchelastic uses. This holds for the whole process until the block ends.
    """

    def popen(handler: SubprocessHandler, args: tuple[Any, ...], env: dict[str, str]) -> Any:
        return start(args, env, handler._stdout, handler._stderr)

    before = SubprocessHandler._popen
    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SubprocessHandler._popen = before  # type: ignore[method-assign]
