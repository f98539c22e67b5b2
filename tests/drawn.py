"""How many cases property tests draw: by ``make test`` the same few each time, by ``make test-long`` ten times more."""

from __future__ import annotations

import os

from hypothesis import Phase, settings

LONG = bool(os.environ.get("PACELINE_LONG_TESTS"))
TIMES = 10 if LONG else 1


def draws(cases: int, *, shrinks: bool = True) -> settings:
    """Settings of a test that draws `cases` cases; one whose failures end ranks should not shrink them."""
    phases = tuple(Phase) if shrinks else (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(deadline=None, max_examples=cases * TIMES, derandomize=not LONG, phases=phases)
