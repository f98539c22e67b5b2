"""Another user of this host, for tests: a process that does what it likes under another user id.

    with Stranger(function, argument) as stranger:      function(tell, argument) runs in it
        stranger.hear()                                 what it told, in order

Only root can become somebody else, so tests that use it are skipped for other users.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import pytest

from ranks import fork_server

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
PATIENCE_S = 30.0


class Stranger:
    """Runs ``function(tell, *arguments)`` as user `NOBODY` until the block ends; ``tell`` sends one value back."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = fork_server.Pipe()
        self.process = fork_server.Process(target=_live, args=(theirs, function, arguments))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """The next value that it told; fails if it ended, or says nothing for long."""
        assert self._pipe.poll(PATIENCE_S), "the stranger says nothing"
        ok, value = self._pipe.recv()
        assert ok, value
        return value

    def __enter__(self) -> Stranger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _live(pipe: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        function(lambda value: pipe.send((True, value)), *arguments)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
