"""Communication hook that sends only the largest elements of gradients.

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017. With error feedback, it converges
like SGD: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from paceline.compression.compressor import Compressor
from paceline.compression.pipeline import Gradients, Stages
from paceline.errors import UsageError


class TopK(Compressor):
    """Sends the elements of largest magnitude in each bucket, and keeps the others for the next step.

    Every rank sums the ranks' elements in rank order and divides by N. Each element goes to each of the other ranks as
    its value and a 4-byte index, so a float32 bucket sends ``fraction`` × N times the bytes of an all-reduce.

    Args:
        fraction: the fraction of each bucket's elements to send, > 0 and <= 1; at least one element is sent.

    Raises:
        UsageError: if the fraction is outside this range.
    """

    def __init__(self, model: nn.Module, fraction: float = 0.01) -> None:
        super().__init__(model)
        if not 0 < fraction <= 1:
            raise UsageError(f"TopK(fraction={fraction}): give a fraction greater than 0 and at most 1")
        self.fraction = fraction

    def reduce(self, gradients: Gradients) -> Stages:
        """Gather the largest elements of every rank."""
        self._residuals.add_to(gradients)
        flat = gradients.flat
        count = min(flat.numel(), max(1, math.ceil(self.fraction * flat.numel())))
        indices = flat.abs().topk(count, sorted=False).indices
        message = pack(flat[indices], indices)
        flat.index_fill_(0, indices, 0)  # sent, so they leave no residual
        work, gathered = self._all_gather(message)
        yield work
        mean = torch.zeros_like(flat)
        for part in gathered:
            values, places = unpack(part, flat.dtype)
            mean.index_add_(0, places, values)  # each part has an index at most once, so sums are in rank order
        return self._finish(gradients, mean.div_(self.size))


def pack(values: Tensor, indices: Tensor) -> Tensor:
    """Return the values, then their indices as int32, all as bytes."""
    return torch.cat([values.view(torch.uint8), indices.to(torch.int32).view(torch.uint8)])


def unpack(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the arguments that were passed to :func:`pack`, with the indices as int64."""
    count = message.numel() // (dtype.itemsize + 4)
    values, indices = message.split([count * dtype.itemsize, count * 4])
    # Cloned, because a view with another dtype must start at a multiple of its element size, and a part may not.
    return values.clone().view(dtype), indices.clone().view(torch.int32).long()
