"""Ranks as threads of one process, each with its own Gloo group: real messages in worlds of any size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore

TIMEOUT_S = 30.0


class ThreadRanks:
    """A world of `size` threads, independent of the default process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._groups: list[Any] = [None] * size
        store = HashStore()

        def join(rank: int) -> None:
            self._groups[rank] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S))

        self._side_by_side(join)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(group, *arguments)`` on every rank; return results by rank or raise the first error."""
        return self._side_by_side(lambda rank: function(self._groups[rank], *arguments))

    def leave(self, rank: int) -> None:
        """Close a rank's connections as if it had exited; its group becomes None."""
        self._groups[rank] = None

    def _side_by_side(self, function: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}

        def serve(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors[rank] = error

        threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise errors[min(errors)]
        return results
