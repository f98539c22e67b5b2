"""Checkpoints: saved completely or not at all, verified, read without pickle, restored on any number of ranks."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.checkpoint.checkpointer import Checkpointer
    from paceline.checkpoint.weights import load_weights
    from paceline.errors import CheckpointWarning

__all__ = ["CheckpointWarning", "Checkpointer", "load_weights"]
_HOMES = {
    "CheckpointWarning": "paceline.errors",
    "Checkpointer": "paceline.checkpoint.checkpointer",
    "load_weights": "paceline.checkpoint.weights",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because the launcher needs only :mod:`.step_names`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
