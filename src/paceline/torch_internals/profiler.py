"""Tells whether torch's profiler is running, which has no public name."""

from __future__ import annotations

import torch.autograd.profiler as profiler


def is_profiling() -> bool:
    """Return whether a ``torch.profiler.profile`` or ``torch.autograd.profiler.profile`` block is open."""
    return profiler._is_profiler_enabled
