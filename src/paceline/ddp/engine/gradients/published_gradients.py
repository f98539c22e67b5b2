"""The gradients that a wrapper has shown in ``p.grad``, and which of those there now are its averages."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from paceline.ddp.engine.gradients.bucket_set import BucketSet
from paceline.ddp.engine.parameters.shared_parameters import Share, Sharing
from paceline.ddp.transport.scattered_gradients import ScatteredGradient
from paceline.ddp.transport.sparse import stored_elements


class PublishedGradients:
    """Shows averages, and tells them from other gradients.

    Args:
        names: of the parameters.
        parameters: whose ``grad`` is set and looked at.
        storage: their buckets.
        sharing: which of them other wrappers have, too.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], storage: BucketSet, sharing: Sharing
    ) -> None:
        self._names, self._parameters, self._storage, self._sharing = names, parameters, storage, sharing
        # Averages that are no bucket's view; weak, as a gradient's memory goes when the user drops it.
        self._apart: dict[int, weakref.ref[Tensor]] = {}

    def publish(
        self, averages: Sequence[Tensor], apart: Mapping[int, Tensor], absent: Sequence[int], share: Share
    ) -> None:
        """Set ``p.grad`` to the average, to the one that came `apart`, or to None where it is `absent`."""
        self.remember(apart)
        special: dict[int, Tensor | None] = {**apart, **dict.fromkeys(absent)}
        if self._sharing:
            common = self._sharing.common
            ours = {index: averages[index] for index in common - self._storage.unbucketed}
            self._sharing.show({index: special.pop(index, ours.get(index)) for index in common}, share)
            left_out = common | self._storage.unbucketed | special.keys()
        else:
            left_out = self._storage.unbucketed | special.keys()
        if left_out:
            shown = {index: average for index, average in enumerate(averages) if index not in left_out}
            for index, average in shown.items():
                self._parameters[index].grad = average
        else:
            for parameter, average in zip(self._parameters, averages, strict=True):
                parameter.grad = average
        for index, gradient in special.items():
            self._parameters[index].grad = gradient

    def publish_all(self, averages: Sequence[Tensor]) -> None:
        """Set ``p.grad`` of each parameter to its average, where all have one and no other wrapper has any of them."""
        self._apart = {}
        for parameter, average in zip(self._parameters, averages, strict=True):
            parameter.grad = average

    def remember(self, apart: Mapping[int, Tensor]) -> None:
        """Remember that these are the averages that are no bucket's view."""
        self._apart = {index: weakref.ref(average) for index, average in apart.items()}

    def local_gradient(self) -> str | None:
        """The name of a parameter whose gradient the wrapper has not averaged; None if there is none.

        Zeros do not count: torch sets them itself, to have an optimizer make its state.

        Raises:
            UsageError: for the stand-in of an earlier backward's gradient.
        """
        for index, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True)):
            gradient = parameter.grad
            if gradient is None or self._is_average(index, gradient):
                continue
            if isinstance(gradient, ScatteredGradient):
                gradient.memory()  # raises for one of an earlier backward
            elif bool(stored_elements(gradient).any()):
                return name
        return None

    def _is_average(self, index: int, gradient: Tensor) -> bool:
        if index in self._sharing.left_to_others or self._storage.is_average(index, gradient):
            return True
        return index in self._apart and gradient is self._apart[index]()
