"""Keeps track of the averages that a wrapper has put in ``p.grad``, and of whether they are final.

With GPUs, averages are published before the other ranks' control blocks have been read. Usually the blocks do not
affect the averages. If a rank reports a gradient outside the buckets, however, its average is complete only after the
blocks are read. Code that used the average earlier used a wrong value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

from torch import Tensor

from paceline.core.torch_internals import has_nonzero, have_unscaled
from paceline.ddp.buckets import BucketSet
from paceline.ddp.module_changes import Trained
from paceline.errors import UsageError

_version_of: Callable[[Tensor], int] = attrgetter("_version")


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
            # Zeros do not count: torch.distributed.checkpoint sets them so that the optimizer creates its state.
            if gradient is not None and not self._is_average(index, gradient) and has_nonzero(gradient):
                return name
        return None

    def _is_average(self, index: int, gradient: Tensor) -> bool:
        if index in self.left_to_others() or self._buckets.is_average(index, gradient):
            return True
        return index in self._out_of_bucket and gradient is self._out_of_bucket[index]()


class EarlyAverages:
    """Averages as first published in ``p.grad``, with a check of whether they have been changed or used since.

    Args:
        rank: this rank.
        trained: the parameters, whose ``grad`` has been set.
        buckets: their buckets.
        shown: the averages as first published, one for each parameter.
    """

    def __init__(self, rank: int, trained: Trained, buckets: BucketSet, shown: Sequence[Tensor]) -> None:
        self._rank, self._names, self._parameters = rank, trained.names, trained.parameters
        self._buckets, self._shown = buckets, shown
        # The views of a bucket share one version counter, because they are views of one tensor.
        self._versions = [bucket.views[0]._version for bucket in buckets.buckets]
        # Averages outside the buckets: they have another dtype, or a user kept an earlier gradient.
        self._copies = {
            index: shown[index]._version
            for index in (range(len(shown)) if shown is not buckets.views else ())
            if shown[index] is not buckets.views[index]
        }
        # An optimizer step increments the versions of parameters, but not of gradients.
        self._updates = sum(map(_version_of, self._parameters))

    def find_used(self, unfinished: Collection[int]) -> UsageError | None:
        """Return an error if one of the `unfinished` averages was used or changed before it was final."""
        if not unfinished:
            return None
        # A GradScaler unscales gradients without incrementing their versions, so afterwards all gradients count as
        # used.
        all_used = sum(map(_version_of, self._parameters)) != self._updates or have_unscaled()
        used = [index for index in sorted(unfinished) if all_used or self._was_changed(index)]
        return self._error(used[0]) if used else None

    def complete(self, late: Collection[int], out_of_bucket: Mapping[int, Tensor]) -> None:
        """Publish the final averages of `late` and `out_of_bucket` gradients.

        A gradient that the user has dropped since stays None.
        """
        for index in {*late, *out_of_bucket}:
            parameter = self._parameters[index]
            # An unbucketed parameter's gradient is None until now, so None does not mean that the user dropped it.
            if parameter.grad is None and index not in self._buckets.unbucketed:
                continue
            if index in out_of_bucket:
                parameter.grad = out_of_bucket[index]
            elif index in self._copies:
                self._shown[index].copy_(self._buckets.views[index])

    def _was_changed(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        if index in self._buckets.unbucketed or gradient is None:
            return False
        return gradient is not self._shown[index] or gradient._version != self._version_of(index)

    def _version_of(self, index: int) -> int:
        if index in self._copies:
            return self._copies[index]
        pairs = zip(self._buckets.buckets, self._versions, strict=True)
        return next(version for bucket, version in pairs if index in bucket.indices)

    def _error(self, index: int) -> UsageError:
        return UsageError(
            f"rank {self._rank}: the gradient of {self._names[index]!r} was changed or used before its "
            "last part was added, which arrived after its bucket was reduced; call model.parameters() on "
            "the wrapper before changing them, as in clip_grad_norm_(model.parameters(), 1.0): this waits for all parts"
        )
