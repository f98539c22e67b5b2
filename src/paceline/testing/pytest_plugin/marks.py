"""Reads and checks the ``ranks`` marker of a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.option_rules import choice, positive
from paceline.errors import UsageError

TIMEOUT_S = 60.0
BACKENDS = ("paceline", "gloo", "nccl")
FORM = "write @pytest.mark.ranks(2) or @pytest.mark.ranks(1, 2, 4, timeout=30, backend='gloo')"


@dataclass(frozen=True)
class RanksMark:
    """The checked arguments of a test's marker."""

    counts: tuple[int, ...]
    """Numbers of ranks; the test runs once for each."""
    timeout: float = TIMEOUT_S
    """Seconds that the test may take once all ranks have started."""
    backend: str | None = None
    """Backend of the process group; None for the default of ``paceline.init()``."""

    @classmethod
    def of(cls, counts: tuple[Any, ...], options: Mapping[str, Any]) -> RanksMark:
        """Return the marker with these arguments, or raise a :class:`UsageError`."""
        unknown = options.keys() - {"timeout", "backend"}
        if unknown:
            raise UsageError(f"the ranks marker has no argument {', '.join(sorted(unknown))}; {FORM}")
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise UsageError(f"the ranks marker got {counts}, not one or more whole numbers above 0; {FORM}")
        if len(set(counts)) < len(counts):
            raise UsageError(f"the ranks marker got {counts}; give each number only once")
        mark = cls(counts, **options)
        positive("the ranks marker's timeout", mark.timeout)
        if mark.backend is not None:
            choice("the ranks marker's backend", mark.backend, BACKENDS)
        return mark
