"""The ranks of our own tests, which are :mod:`paceline.testing`'s, and what their fork server loads."""

from __future__ import annotations

from paceline.testing.pool import (
    TIMEOUT_S,
    Pools,
    RankFailed,
    Ranks,
    fork_server,
    plain_start_method,
    preload,
    run_ranks,
)

__all__ = ["TIMEOUT_S", "Pools", "RankFailed", "Ranks", "fork_server", "plain_start_method", "run_ranks"]

preload(
    "paceline.train",
    "hypothesis",
    "pytest",
    "torch._inductor.compile_fx",  # which torch.compile loads
    "torch._dynamo.backends.inductor",
    "paceline.tools.main",  # for forked.py
    "paceline.launch.agent",
    "paceline.tools.recipes.digits",
    "sklearn.datasets",
)

Ranks.warnings_are_errors = True
