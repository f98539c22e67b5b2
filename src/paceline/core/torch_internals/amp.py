"""Detects gradients that ``torch.amp.GradScaler`` has changed without raising their version counters."""

from __future__ import annotations

import gc

from torch.amp.grad_scaler import GradScaler, OptState


def have_unscaled() -> bool:
    """Whether an optimizer's gradients are unscaled but it has not stepped yet. Searches all Python objects."""
    scalers = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), GradScaler)]
    states = [state for scaler in scalers for state in scaler._per_optimizer_states.values()]
    return any(state["stage"] is not OptState.READY for state in states)
