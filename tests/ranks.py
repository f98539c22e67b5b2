"""The ranks of :mod:`paceline.testing`, with the modules that their fork server preloads for our tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import insides
from insides import TIMEOUT_S, fork_server, plain_start_method, preload, run_ranks
from paceline.testing import Pools, RankFailed

__all__ = ["TIMEOUT_S", "Pools", "RankFailed", "Ranks", "fork_server", "plain_start_method", "run_ranks"]

preload(
    "paceline.train",
    "hypothesis",
    "pytest",
    "torch._inductor.compile_fx",  # for torch.compile
    "torch._dynamo.backends.inductor",
    "paceline.tools.main",  # for forked.py
    "paceline.launch.agent",
    "paceline.tools.recipes.digits",
    "sklearn.datasets",
)

insides.Ranks.warnings_are_errors = True


class Ranks(insides.Ranks):  # type: ignore[misc]
    """Ranks that can be started without waiting for all of them."""

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start ``function(world, *arguments)`` on every rank; :meth:`answer` returns a rank's result."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def answer(self, rank: int, seconds: float) -> Any:
        """Return the result of `rank` after :meth:`start`. Other ranks may have ended.

        Raises:
            RankFailed: if the function raised on this rank, or did not return within `seconds`.
        """
        if not self._pipes[rank].poll(seconds):
            raise RankFailed(f"rank {rank} did not answer within {seconds:g} s")
        ok, value = self._receive(rank)
        if not ok:
            raise RankFailed(value)
        return value
