"""Tells whether torch's profiler is running, and when it begins, which have no public names."""

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
    """Call `call` in the block whenever a profiler of torch is about to begin, or to warm up."""
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
