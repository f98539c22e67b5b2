"""Spans: named stretches of time on a rank, recorded only while somebody asks for them.

Recorded are ``launch``, a bucket being handed to communication, and ``wait``, backward's end waiting for it. Labels are
the words of the design, so that traces, messages and docs speak of the same things.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """One stretch of time: ``start`` and ``end`` in seconds of ``time.perf_counter``."""

    label: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass
class Recorder:
    """Collects spans while ``on``; costs one attribute look-up a span while off."""

    on: bool = False
    spans: list[Span] = field(default_factory=list)

    def span(self, label: str) -> AbstractContextManager[None]:
        """Record the block under `label` if recording is on."""
        return self._timed(label) if self.on else _OFF

    @contextmanager
    def _timed(self, label: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(label, start, time.perf_counter()))


_OFF: AbstractContextManager[None] = nullcontext()
