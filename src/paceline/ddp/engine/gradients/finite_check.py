"""Finds gradients that hold NaN or Inf, and asks the device for it once in a step."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from paceline.core.state.buckets import Bucket
from paceline.core.state.device_streams import is_queued
from paceline.core.torch_internals.tensors import norm_each


class FiniteCheck:
    """The check of one step's gradients; they may be changed or dropped after they were added."""

    def __init__(self) -> None:
        # By device: the parameters that were added, and the largest magnitude in the gradient of each.
        self._largest: dict[torch.device, tuple[list[int], list[Tensor]]] = {}

    def add_bucket(self, bucket: Bucket) -> None:
        """Add the gradients in `bucket`."""
        # Where the host reads for nothing, one sum tells that there is nothing to find.
        if is_queued(bucket.flat.device) or not torch.isfinite(bucket.flat.sum()):
            self.add(bucket.indices, bucket.views)

    def add(self, indices: Collection[int], gradients: Collection[Tensor]) -> None:
        """Add `gradients`, of the parameters `indices`; of a sparse one, the values that it stores."""
        pairs = [(index, gradient) for index, gradient in zip(indices, gradients, strict=True) if gradient.numel()]
        reals = [as_real(gradient) if gradient.is_complex() else gradient for _, gradient in pairs]
        if not reals:
            return
        for (index, gradient), largest in zip(pairs, norm_each(reals), strict=True):
            places, norms = self._largest.setdefault(gradient.device, ([], []))
            places.append(index)
            norms.append(largest)

    def found(self) -> list[int]:
        """Return the parameters whose gradient is not finite; waits for the device, unless nothing was added."""
        return [
            index
            for places, norms in self._largest.values()
            for index, is_finite in zip(places, torch.stack(norms).isfinite().tolist(), strict=True)
            if not is_finite
        ]


def as_real(gradient: Tensor) -> Tensor:
    """Return the real numbers of a complex gradient, which autograd may leave conjugated without computing it."""
    return torch.view_as_real(gradient.resolve_conj())
