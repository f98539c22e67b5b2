"""Averages that a backward has shown before it read the other ranks' control blocks, and what these change in them.

In the usual step they change nothing. Where a rank reports a gradient that is in no bucket, the average becomes whole
only when the blocks are read. If it was used before, the step would go on with something else than the average.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from paceline.core.torch_internals.amp import have_unscaled
from paceline.ddp.engine.gradients.bucket_set import BucketSet
from paceline.errors import UsageError


class EarlyAverages:
    """Averages as they were shown in ``p.grad``, and whether they were changed or used since.

    Args:
        rank: this one.
        names: of the parameters.
        parameters: whose ``grad`` has been set.
        storage: their buckets.
        shown: the averages, one for each parameter.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        storage: BucketSet,
        shown: Sequence[Tensor],
    ) -> None:
        self._rank, self._names, self._parameters, self._storage, self._shown = rank, names, parameters, storage, shown
        # The views of a bucket have one version counter, as they have one memory.
        self._versions = [bucket.views[0]._version for bucket in storage.buckets]
        # What is shown in other memory: in another dtype, or because a user has kept an earlier gradient.
        self._copies = {
            index: shown[index]._version
            for index in (range(len(shown)) if shown is not storage.views else ())
            if shown[index] is not storage.views[index]
        }
        self._updates = sum(parameter._version for parameter in parameters)

    def find_used(self, unfinished: Collection[int]) -> UsageError | None:
        """Return the error if an average that was not final yet was used or changed."""
        if not unfinished:
            return None
        everything = sum(parameter._version for parameter in self._parameters) != self._updates or have_unscaled()
        used = [index for index in sorted(unfinished) if everything or self._was_changed(index)]
        return self._error(used[0]) if used else None

    def complete(self, late: Collection[int], apart: Mapping[int, Tensor]) -> None:
        """Show the final averages of `late` gradients, and those that came `apart` from the buckets.

        A gradient that was dropped meanwhile stays so.
        """
        for index in {*late, *apart}:
            parameter = self._parameters[index]
            if parameter.grad is None and index not in self._storage.unbucketed:
                continue
            if index in apart:
                parameter.grad = apart[index]
            elif index in self._copies:
                self._shown[index].copy_(self._storage.views[index])

    def _was_changed(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        if index in self._storage.unbucketed or gradient is None:
            return False
        return gradient is not self._shown[index] or gradient._version != self._version_of(index)

    def _version_of(self, index: int) -> int:
        if index in self._copies:
            return self._copies[index]
        pairs = zip(self._storage.buckets, self._versions, strict=True)
        return next(version for bucket, version in pairs if index in bucket.indices)

    def _error(self, index: int) -> UsageError:
        return UsageError(
            f"rank {self._rank}: the gradient of {self._names[index]!r} was changed or used before it was whole, as a "
            "part of it came after its bucket was reduced, which ranks beside GPUs learn at the optimizer step; look "
            "at gradients through the wrapper before they are changed (paceline.clip_grad_norm_(model, …), "
            "model.parameters()), which waits for all of them"
        )
