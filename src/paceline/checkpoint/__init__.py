"""Checkpoints that are whole or absent: verified, readable without pickle, for any number of ranks.

Rooms, each above those that it imports:

    checkpointer
    recovery
    loading · saving · steps
    captures
    objects · storage
    format
"""

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.loading.load_weights import load_weights
from paceline.errors import CheckpointWarning

__all__ = ["CheckpointWarning", "Checkpointer", "load_weights"]
