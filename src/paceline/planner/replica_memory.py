"""The memory of a replica, and the smallest change that makes it fit on a device."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.ddp.buckets import CAPACITY

NO_FIT = "needs FSDP2"
CHECKPOINTED = 8
"""Activation checkpointing is assumed to divide activations by this."""


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
            parts: the divisor of the activations.
        """
        bucket = min(self.gradients, CAPACITY) if ranks > 1 else 0.0
        state = self.state / ranks if is_sharded else self.state
        return self.weights + self.gradients + state + bucket + self.activations / parts

    def remedy(self, ranks: int, capacity: float) -> str:
        """Return the smallest change that makes the replica fit in `capacity` bytes; empty if it fits."""
        splits = [2**power for power in range(1, int(self.samples).bit_length())]
        smaller = [(split, f"{split} micro-batches") for split in splits]
        checkpointed = [(CHECKPOINTED * max(splits, default=1), "checkpointed activations")]
        for changes in ([(1, "")], smaller, checkpointed):
            for is_sharded in (False, True):
                for parts, change in changes:
                    if self.total(ranks, is_sharded=is_sharded, parts=parts) <= capacity:
                        return ", ".join(filter(None, ("sharded optimizer" * is_sharded, change)))
        return NO_FIT
