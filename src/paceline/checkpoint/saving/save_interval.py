"""The interval between saves: a number of steps, or a time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from paceline.core.processes import consensus
from paceline.errors import UsageError


class SaveInterval:
    """Decides whether a step is saved, with the same result on all ranks.

    Rank 0's clock counts. Rank 0 is not asked at every step: each answer includes the number of steps until the next
    question, half of those that fit into the time left.

    Args:
        every: steps, or time; None for never.
    """

    def __init__(self, every: int | timedelta | None) -> None:
        self._every = every
        self._began: tuple[float, int] | None = None
        """When the last save was, and after which step."""
        self._ask = 0
        """The step at which rank 0 is asked next."""

    @property
    def is_set(self) -> bool:
        """Whether steps are saved at all."""
        return self._every is not None

    def check(self) -> None:
        """Check the interval.

        Raises:
            UsageError: if it is neither steps nor time, or not positive.
        """
        every = self._every
        if not (every is None or (type(every) is int and every > 0) or _is_time(every)):
            raise UsageError(f"every={every!r} is no number of steps above 0, and no timedelta; give one such as 100")

    def is_due(self, step: int) -> bool:
        """Return whether `step`, which was just completed, is saved. Sometimes a collective."""
        if self._every is None:
            return False
        if isinstance(self._every, int):
            return step % self._every == 0
        if step < self._ask:
            return False
        is_due, self._ask = consensus.decide(consensus.here(), lambda: self._answer(step))
        return bool(is_due)

    def _answer(self, step: int) -> list[Any]:
        assert isinstance(self._every, timedelta)
        now, interval = time.monotonic(), self._every.total_seconds()
        if self._began is None:
            self._began = now, step
            return [False, step + 1]
        began, first = self._began
        if now - began >= interval:
            self._began = now, step
            return [True, step + max(1, int((step - first) / 2))]
        seconds_a_step = (now - began) / max(1, step - first)
        return [False, step + max(1, int((interval - (now - began)) / seconds_a_step / 2))]


def _is_time(every: Any) -> bool:
    return isinstance(every, timedelta) and every > timedelta(0)
