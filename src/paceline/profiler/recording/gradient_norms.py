"""Gradient norms of one rank, for the gradient noise scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EVERY, SEEN = (4, 16), 48
"""Steps between two measurements, in the first ``SEEN`` steps and later. Each costs two passes over the gradients."""


def are_due(step: int) -> bool:
    """Return whether to measure a step."""
    return step % EVERY[step >= SEEN] == 0


class GradientNorms:
    """Norms of the buckets of a step. They are kept as tensors, because a device computes asynchronously."""

    def __init__(self) -> None:
        self._local: list[tuple[Tensor, float]] = []
        self._averaged: list[Tensor] = []

    def launched(self, flat: Tensor, factor: float) -> None:
        """Compute the norm of a bucket that holds `factor` times the mean gradient over this rank's samples."""
        if factor:  # 0 on a rank without samples
            self._local.append((torch.linalg.vector_norm(flat), factor))

    def averaged(self, flat: Tensor) -> None:
        """Compute the norm of a bucket of averaged gradients."""
        self._averaged.append(torch.linalg.vector_norm(flat))

    def squared(self) -> tuple[float, float] | None:
        """Return the squared norms of this rank's gradient and of the average; None unless both exist and are finite.

        Waits for the device.
        """
        if not (self._local and self._averaged):
            return None
        local = math.fsum((float(norm) / factor) ** 2 for norm, factor in self._local)
        averaged = math.fsum(float(norm) ** 2 for norm in self._averaged)
        return (local, averaged) if math.isfinite(local + averaged) else None
