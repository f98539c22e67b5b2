"""The ranks of :mod:`paceline.testing`, with the modules that their fork server preloads for our tests."""

from __future__ import annotations

from insides import TIMEOUT_S, Ranks, fork_server, plain_start_method, preload, run_ranks
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

Ranks.warnings_are_errors = True
