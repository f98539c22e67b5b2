"""Users' hooks of an optimizer, for an optimizer that builds its state dict itself."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def before_state_dict(optimizer: Optimizer) -> None:
    """Call the hooks that are called before the state is taken."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def after_state_dict(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the `state` that was taken, after the hooks."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        state = hook(optimizer, state) or state
    return state


def before_load(optimizer: Optimizer, state: Any) -> Any:
    """Return the `state` to load, after the hooks."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state = hook(optimizer, state) or state
    return state


def after_load(optimizer: Optimizer) -> None:
    """Call the hooks that are called when a state has been loaded."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
