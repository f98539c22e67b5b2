"""The memory of a replica, and the smallest change that makes it fit on a device."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.ddp.buckets import CAPACITY

NO_FIT = "needs FSDP2"


@dataclass(frozen=True)
class ReplicaMemory:
    """Bytes of a replica."""

    weights: float
    gradients: float
    state: float
    """Of the optimizer."""
    activations: float = 0.0
    """And whatever else a step needs; 0 if unknown."""
    samples: float = 1.0
    """Samples of a micro-batch."""

    def total(self, ranks: int, *, is_sharded: bool = False, parts: int = 1) -> float:
        """Return the bytes on a device.

        Args:
            ranks: the number of ranks.
            is_sharded: whether the ranks divide the optimizer's state.
            parts: number of micro-batches that replace one.
        """
        bucket = min(self.gradients, CAPACITY) if ranks > 1 else 0.0
        state = self.state / ranks if is_sharded else self.state
        return self.weights + self.gradients + state + bucket + self.activations / parts

    def remedy(self, ranks: int, capacity: float) -> str:
        """Return the smallest change that makes the replica fit in `capacity` bytes; empty if it fits."""
        if self.total(ranks) <= capacity:
            return ""
        if self.total(ranks, is_sharded=True) <= capacity:
            return "sharded optimizer"
        parts = 2
        while parts <= self.samples:
            if self.total(ranks, parts=parts) <= capacity:
                return f"accumulate {parts} batches"
            parts *= 2
        # Without activations, weights, gradients and state have to fit.
        state = self.total(ranks, is_sharded=True) - self.activations
        return "checkpoint activations" if state <= capacity / 2 else NO_FIT
