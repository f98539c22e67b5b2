"""Checkpoints: saved completely or not at all, verified, read without pickle, restored on any number of ranks."""

from typing import TYPE_CHECKING

from paceline.core import on_first_use as _on_first_use

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
# The launcher needs only :mod:`.step_names`.
__getattr__ = _on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
