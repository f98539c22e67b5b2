"""What one device does in a step, in seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.ddp.options.buckets import CAPACITY, FIRST_CAPACITY
from paceline.planner.hardware import MFU, Device

EQUAL_LAYERS = 24
"""Layers of a model about which only the number of parameters is known."""
CLASSIFIER = 1 / 8
"""Share of the parameters in the last eighth of the layers, if all are equal."""
OPTIMIZER_BYTES = 28
"""Bytes per parameter that a fused AdamW reads (parameter, gradient, two moments) and writes, in float32."""
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
    """The layer whose gradients arrive first comes first."""
    samples: float
    """Samples per device and optimizer step."""
    optimizer_s: float = 0.0
    """Seconds of an optimizer step."""
    other_s: float = 0.0
    """Seconds per micro-batch in the loop's own code and in waiting for data."""
    micro_batches: int = 1
    bucket_bytes: tuple[int, ...] = (FIRST_CAPACITY, CAPACITY)
    """Capacities of the first, second, … bucket; the last one applies to all further buckets."""
    jitter: float | None = None
    """Measured standard deviation of a rank's step time over the steps, relative to the mean; None if unknown."""
    alone: float = 1.0
    """Slowdown of a single rank. It allocates gradients in each step, while several ranks keep them in buckets."""
    is_host_bound: bool = False
    """Whether the hosts barely keep up with the devices, as often with images and half precision."""
    busy_cores: float = 0.0
    """Cores that a rank keeps busy; 0 if it computes on a device of its own."""
    memory: float = math.inf
    """Bytes per second that simple operations read and write."""

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


def equal_layers(
    seconds: float, nbytes: float, samples: float, micro_batches: int = 1, classifier: float = CLASSIFIER
) -> Workload:
    """Return a step of equal layers.

    Args:
        seconds: of a micro-batch, forward and backward.
        nbytes: of all gradients.
        samples: of a micro-batch.
        micro_batches: per optimizer step.
        classifier: share of the bytes in the last layers, an eighth of the model, whose gradients arrive first.
    """
    last = EQUAL_LAYERS // 8
    shares = [classifier / last] * last + [(1 - classifier) / (EQUAL_LAYERS - last)] * (EQUAL_LAYERS - last)
    layers = [Layer(BACKWARD * seconds / EQUAL_LAYERS, round(share * nbytes)) for share in shares]
    return Workload(FORWARD * seconds, layers, samples * micro_batches, micro_batches=micro_batches)


def from_flags(params: float, flops: float, device: Device, precision: str, batch: float) -> Workload:
    """Return a step that was not measured.

    Args:
        params: number of parameters; their gradients have 4 bytes, as with autocast.
        flops: FLOPs of a sample, forward and backward.
        device: the kind of device.
        precision: of computing.
        batch: samples of a device.
    """
    seconds = flops * batch / device.peak(precision) / MFU
    # A part of that time, because the share of the peak counts whole steps.
    optimizer = min(OPTIMIZER_BYTES * params / device.memory, seconds / 2)
    return replace(equal_layers(seconds - optimizer, 4 * params, batch), optimizer_s=optimizer, memory=device.memory)
