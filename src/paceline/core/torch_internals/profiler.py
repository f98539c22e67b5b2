"""Tells whether torch's profiler is running and when it starts; torch has no public API for this."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.autograd.profiler as profiler


def is_profiling() -> bool:
    """Return whether a ``torch.profiler.profile`` or ``torch.autograd.profiler.profile`` block is open."""
    return profiler._is_profiler_enabled


@contextmanager
def before_profiling(call: Callable[[], None]) -> Iterator[None]:
    """In the block, call `call` whenever a torch profiler is about to start or warm up."""
    original: Any = profiler.profile._prepare_trace

    @functools.wraps(original)
    def prepare(self: Any) -> None:
        call()
        original(self)

    profiler.profile._prepare_trace = prepare  # type: ignore[method-assign]
    try:
        yield
    finally:
        profiler.profile._prepare_trace = original  # type: ignore[method-assign]
