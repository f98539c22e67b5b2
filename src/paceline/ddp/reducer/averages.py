"""Keeps track of the averages that a wrapper has put in ``p.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from paceline.ddp.consistency.module_changes import Trained
from paceline.ddp.reducer.bucket_set import BucketSet
from paceline.ddp.transport.sparse import stored_elements


class Averages:
    """Publishes averages, and distinguishes them from other gradients."""

    left_to_others: Callable[[], Collection[int]] = staticmethod(frozenset)
    """Returns the parameters whose gradients were last averaged by another wrapper, whose step guard checks them."""

    def __init__(self, trained: Trained, buckets: BucketSet) -> None:
        self._trained, self._buckets = trained, buckets
        # Averages that are not bucket views. Weak, so that their memory is freed when the user drops them.
        self._out_of_bucket: dict[int, weakref.ref[Tensor]] = {}

    def publish(self, averages: Sequence[Tensor | None], absent: Collection[int] = ()) -> None:
        """Set ``p.grad`` to the average, or to None for `absent` parameters."""
        self._out_of_bucket = {}
        if absent:
            averages = list(averages)
            for index in absent:
                averages[index] = None
        for parameter, average in zip(self._trained.parameters, averages, strict=True):
            parameter.grad = average

    def remember(self, out_of_bucket: Mapping[int, Tensor]) -> None:
        self._out_of_bucket = {index: weakref.ref(average) for index, average in out_of_bucket.items()}

    def local_gradient(self) -> str | None:
        """Return the name of a parameter whose gradient the wrapper has not averaged; None if there is none."""
        for index, (name, parameter) in enumerate(zip(self._trained.names, self._trained.parameters, strict=True)):
            gradient = parameter.grad
            if gradient is None or self._is_average(index, gradient):
                continue
            # Zeros do not count: torch.distributed.checkpoint sets them so that the optimizer creates its state.
            if bool(stored_elements(gradient).any()):
                return name
        return None

    def _is_average(self, index: int, gradient: Tensor) -> bool:
        if index in self.left_to_others() or self._buckets.is_average(index, gradient):
            return True
        return index in self._out_of_bucket and gradient is self._out_of_bucket[index]()
