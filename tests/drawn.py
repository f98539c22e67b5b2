"""How many examples property tests draw: a few fixed ones in ``make test``, ten times more in ``make test-long``."""

from __future__ import annotations

import os

from hypothesis import Phase, settings

LONG = bool(os.environ.get("PACELINE_LONG_TESTS"))
TIMES = 10 if LONG else 1


def draws(cases: int, *, shrinks: bool = True) -> settings:
    """Return settings for a test that draws `cases` examples; do not shrink if a failure ends the ranks."""
    phases = tuple(Phase) if shrinks else (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(deadline=None, max_examples=cases * TIMES, derandomize=not LONG, phases=phases)
