"""Loss and metrics of a classifier of images, as sums over a batch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""Images, (n, channels, rows, columns), and labels, (n,)."""
METRICS = ("accuracy", "test_loss")


def summed_loss(model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> tuple[Tensor, float]:
    """Return the summed cross-entropy of a batch, and its number of samples."""
    images, labels = _on_device_of(model, batch)
    loss = F.cross_entropy(model(images), labels, reduction="sum", label_smoothing=label_smoothing)
    return loss, len(labels)


def summed_metrics(model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
    """Count how many of a batch are right, and sum their loss; see :data:`METRICS`."""
    images, labels = _on_device_of(model, batch)
    logits = model(images)
    right = (logits.argmax(1) == labels).sum()
    return {"accuracy": right, "test_loss": F.cross_entropy(logits, labels, reduction="sum")}, len(labels)


def _on_device_of(model: nn.Module, batch: Batch) -> list[Tensor]:
    device = next(model.parameters()).device
    return [part.to(device) for part in batch]
