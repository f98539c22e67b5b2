"""The ``ranks`` marker of a test, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError

TIMEOUT_S = 60.0
BACKENDS = ("paceline", "gloo", "nccl")
FORM = "write @pytest.mark.ranks(2) or @pytest.mark.ranks(1, 2, 4, timeout=30, backend='gloo')"


@dataclass(frozen=True)
class RanksMark:
    """The arguments of a test's marker, checked."""

    counts: tuple[int, ...]
    """Numbers of ranks; the test runs once for each."""
    timeout: float = TIMEOUT_S
    """Seconds that the ranks may take, from the moment at which all of them have come."""
    backend: str | None = None
    """Backend of the process group; None for the default of ``paceline.init``."""
    hosts: int = 1
    """Number of hosts that this one plays; the ranks are dealt to them in blocks."""

    @classmethod
    def of(cls, counts: tuple[Any, ...], options: Mapping[str, Any]) -> RanksMark:
        """Return the marker with these arguments, checked."""
        unknown = options.keys() - {"timeout", "backend", "hosts"}
        if unknown:
            raise UsageError(f"the ranks marker knows no {', '.join(sorted(unknown))}; {FORM}")
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise UsageError(f"the ranks marker got {counts}, not one or more whole numbers above 0; {FORM}")
        if len(set(counts)) < len(counts):
            raise UsageError(f"the ranks marker got {counts}, where a number comes twice; give each once")
        mark = cls(counts, **options)
        mark._check()
        return mark

    def _check(self) -> None:
        number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not number or not 0 < self.timeout < 1e7:
            raise UsageError(f"the ranks marker got timeout={self.timeout!r}; give seconds above 0")
        if self.backend is not None and self.backend not in BACKENDS:
            raise UsageError(
                f"the ranks marker got backend={self.backend!r}, which is none of {', '.join(map(repr, BACKENDS))}"
            )
        if type(self.hosts) is not int or self.hosts < 1:
            raise UsageError(f"the ranks marker got hosts={self.hosts!r}; give a whole number above 0")
        if any(count % self.hosts for count in self.counts):
            raise UsageError(
                f"the ranks marker got hosts={self.hosts}, among which {self.counts} ranks cannot be dealt evenly"
            )
