"""Places in a rank's shared memory for copies of tensors that it shows. Results are written to the original tensors."""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from paceline.comm.shm.arena import Arena
from paceline.comm.shm.engine import Operation

SMALL_BYTES = 32 * 1024
"""Largest tensor that each rank reduces by itself, because dividing the work would save less than a signal costs.

A place has this size, or a multiple of it for a larger tensor.
"""


class Places:
    """The places of one rank in one group, reused once no rank is reading them."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._used: deque[tuple[Tensor, Operation]] = deque()
        """Places in use with their operations, oldest first; operations finish in this order."""
        self._lock = threading.Lock()
        """Held while taking a place."""

    def take(self, nbytes: int) -> Tensor:
        """Return a place of at least `nbytes`, as bytes."""
        with self._lock:
            while self._used and self._used[0][1].finished:
                place, _ = self._used.popleft()
                if place.numel() >= nbytes:
                    return place
                self._arena.free(place)
        return self._arena.allocate(max(1, -(-nbytes // SMALL_BYTES)) * SMALL_BYTES, torch.uint8)

    def keep(self, place: Tensor, operation: Operation) -> None:
        """Keep a place unchanged until `operation`, the latest one, is finished."""
        # No lock is needed: if two threads append out of order, a place is reused a little later, never too early.
        self._used.append((place, operation))
