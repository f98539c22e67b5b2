"""Tests of distributed training on real ranks.

With pytest, ``@pytest.mark.ranks(2)`` runs a test's body on ranks; the plug-in is always there, and sleeps until a test
uses it. What is here works in any process with a process group, and on any wrapper, torch's included.
"""

from paceline.testing.pool import Pools, RankFailed, Ranks, run_ranks

__all__ = ["Pools", "RankFailed", "Ranks", "run_ranks"]
