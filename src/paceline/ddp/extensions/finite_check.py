"""Finds gradients that contain NaN or Inf, waiting for the device only once per step."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from paceline.core.state.device_streams import is_queued
from paceline.core.torch_internals.tensors import norm_each, stored_elements
from paceline.ddp.options.buckets import Bucket
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Extension


class FiniteCheck(Extension):
    """Looks for NaN and Inf in this rank's gradients, reading them from the buckets.

    Args:
        is_wanted: returns whether the check is on.
    """

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted
        self._checked = Magnitudes()

    def is_active(self) -> bool:
        return self._is_wanted()

    def begin(self, backward: Backward) -> None:
        """Forget magnitudes left over from an earlier backward pass that an exception may have interrupted."""
        self._checked = Magnitudes()

    def bucket_ready(self, backward: Backward, bucket: Bucket) -> None:
        """Check the gradients in `bucket`, which are local until the bucket is launched."""
        self._checked.add_bucket(bucket)

    def has_report(self, backward: Backward) -> bool:
        """Record the parameters with non-finite gradients, including gradients outside the buckets."""
        self._checked.add(backward.out_of_bucket.keys(), list(map(stored_elements, backward.out_of_bucket.values())))
        backward.non_finite = self._checked.found()
        return bool(backward.non_finite)


class Magnitudes:
    """The largest magnitudes of one step's gradients; gradients may be changed or dropped after they were added."""

    def __init__(self) -> None:
        # For each device, the parameters added and the largest magnitude in each gradient.
        self._largest: dict[torch.device, tuple[list[int], list[Tensor]]] = {}

    def add_bucket(self, bucket: Bucket) -> None:
        # On a CPU, reading a value is free, and a finite sum shows that all gradients are finite. On a GPU, reading
        # would make the host wait, so magnitudes are computed for all gradients and read once at the end.
        if is_queued(bucket.flat.device) or not torch.isfinite(bucket.flat.sum()):
            self.add(bucket.indices, bucket.views)

    def add(self, indices: Collection[int], gradients: Collection[Tensor]) -> None:
        """Add the `gradients` of the parameters `indices`; for a sparse gradient, pass its stored values."""
        pairs = [(index, gradient) for index, gradient in zip(indices, gradients, strict=True) if gradient.numel()]
        if not pairs:
            return
        for (index, gradient), largest in zip(pairs, norm_each([gradient for _, gradient in pairs]), strict=True):
            places, norms = self._largest.setdefault(gradient.device, ([], []))
            places.append(index)
            norms.append(largest)

    def found(self) -> list[int]:
        """Return the parameters whose gradient is not finite; waits for each device that holds magnitudes."""
        return [
            index
            for places, norms in self._largest.values()
            for index, is_finite in zip(places, torch.stack(norms).isfinite().tolist(), strict=True)
            if not is_finite
        ]
