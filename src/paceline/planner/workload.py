"""What one device does in a step, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.ddp.options.buckets import CAPACITY, FIRST_CAPACITY

EQUAL_LAYERS = 24
"""Layers of a model about which only the number of parameters is known."""
FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a step's FLOPs."""


@dataclass(frozen=True)
class Layer:
    """Parameters whose gradients arrive together."""

    backward_s: float
    nbytes: int
    """Bytes of its gradients."""


@dataclass(frozen=True)
class Workload:
    """The step of one device that does not communicate."""

    forward_s: float
    """Seconds of one forward."""
    layers: Sequence[Layer]
    """In the order in which their gradients arrive."""
    samples: float
    """Samples per device and optimizer step."""
    optimizer_s: float = 0.0
    """Seconds of an optimizer step, and of saves."""
    other_s: float = 0.0
    """Seconds per micro-batch in the loop's own code and in waiting for data."""
    micro_batches: int = 1
    bucket_bytes: tuple[int, ...] = (FIRST_CAPACITY, CAPACITY)
    """Capacities of the first, second, … bucket; the last one applies to all further buckets."""
    jitter: float | None = None
    """Measured standard deviation of a rank's step time over the steps, relative to the mean; None if unknown."""
    busy_cores: float = 0.0
    """Cores that a rank keeps busy; 0 if it computes on a device of its own."""

    @property
    def backward_s(self) -> float:
        """Seconds of one backward."""
        return sum(layer.backward_s for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.micro_batches * (self.forward_s + self.backward_s + self.other_s) + self.optimizer_s


def equal_layers(seconds: float, nbytes: float, samples: float, micro_batches: int = 1) -> Workload:
    """Return a step of equal layers, whose micro-batches take `seconds` and have `samples` each."""
    layer = Layer(BACKWARD * seconds / EQUAL_LAYERS, round(nbytes / EQUAL_LAYERS))
    return Workload(FORWARD * seconds, (layer,) * EQUAL_LAYERS, samples * micro_batches, micro_batches=micro_batches)
