"""Runs users' state dict hooks, for an optimizer that builds its state dict itself."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def before_state_dict(optimizer: Optimizer) -> None:
    """Run the ``state_dict`` pre-hooks."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def after_state_dict(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` after the ``state_dict`` post-hooks."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        state = hook(optimizer, state) or state
    return state


def before_load(optimizer: Optimizer, state: Any) -> Any:
    """Return the `state` to load after the ``load_state_dict`` pre-hooks."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state = hook(optimizer, state) or state
    return state


def after_load(optimizer: Optimizer) -> None:
    """Run the ``load_state_dict`` post-hooks."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
