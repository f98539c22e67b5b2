"""A process of another user on this host, for tests of attacks.

    with Stranger(function, argument) as stranger:      runs function(send, argument)
        stranger.hear()                                 returns the values sent, in order

Only root can switch to another user, so tests that use it require root.
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
    """Runs ``function(send, *arguments)`` as user `NOBODY` until the block ends; ``send`` sends a value back."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._pipe, child_pipe = fork_server.Pipe()
        self.process = fork_server.Process(target=_run_as_nobody, args=(child_pipe, function, arguments))
        self.process.start()
        child_pipe.close()

    def hear(self) -> Any:
        """Return the next value sent; fail if the process ended or stays silent for `PATIENCE_S` seconds."""
        assert self._pipe.poll(PATIENCE_S), "the other user's process sent no value"
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


def _run_as_nobody(pipe: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        function(lambda value: pipe.send((True, value)), *arguments)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
