"""Virtual ranks: a step's gradient is summed in a binary tree over its slices, whatever the number of ranks.

The global batch is cut into V slices. A rank computes V/N of them one after the other, and adds up their gradients as a
binary counter counts: sums of 1, 2, 4, … neighbouring slices wait for their neighbour, so log₂ of the slices are in
memory at once. With the last slice its sum goes into the buckets, and the ranks' sums are added pairwise in the same
tree (:func:`paceline.comm.arithmetic.reduce_into`). Every addition of floating-point numbers has the same two operands
for each N that divides V, so the result has the same bits. V is a power of two, because only then do the slices of a
rank make up a subtree for each such N.

EasyScale (Li et al., SC '23) trains with logical workers in this manner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.state.buckets import Bucket
from paceline.core.state.virtual_ranks import Slices
from paceline.core.torch_internals.tensors import add_each
from paceline.ddp.reducer.backward import Backward
from paceline.ddp.reducer.extension import Extension
from paceline.ddp.slices.statistics import SliceStatistics
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.ddp.reducer.reducer import Reducer
    from paceline.ddp.slices.compute_check import ComputeCheck


Begin = Callable[[int, Sequence[int]], None]
"""Function that begins a slice, as :meth:`VirtualRanks.begin_slice` does."""


def in_order(begin: Begin, batches: Slices, filled: Sequence[int]) -> Iterator[Any]:
    """Yield a rank's slices of a step one after the other, those in `filled`, or the first where none has samples."""
    for number in filled or [0]:
        begin(number, filled)
        yield batches.seeded(number)


class VirtualRanks(Extension):
    """Adds up the gradients of this rank's slices.

    Args:
        reducer: averages the wrapper's gradients.
        count: the number of virtual ranks, a multiple of the number of ranks.
        statistics: adds up the running statistics of the same slices.
    """

    def __init__(self, reducer: Reducer, count: int, statistics: SliceStatistics) -> None:
        self._reducer, self.count, self.statistics = reducer, count, statistics
        self._check_dtypes()
        self.slices = count // reducer.channel.size
        """Slices that this rank computes in a step."""
        self.number = 0
        """The slice under way."""
        self._filled: Sequence[int] = ()
        """The slices of the step that have samples."""
        self._is_last = False
        """Whether a backward is expected to be synchronized now."""
        self._sums: list[tuple[int, dict[int, Tensor]]] = []
        """Sums that wait for their neighbour: their number of slices, and the gradients by parameter; the last is the
        smallest."""
        self._known: dict[int, Tensor] | None = None
        """Gradients of the last slice, by parameter, where it is computed again only to synchronize them."""
        self._undo: Callable[[], None] = _nothing
        """Undoes what the forward of such a slice has changed."""
        self.compute_check: ComputeCheck | None = None
        """Computes slices twice, where that was asked for."""

    def begin_slice(self, number: int, filled: Sequence[int]) -> None:
        """Begin slice `number` of this rank's, counted from 0, of which those in `filled` have samples.

        Raises:
            UsageError: if a gradient was kept from the step before, or has no dense form.
        """
        ledger, trained = self._reducer.ledger, self._reducer.trained
        is_first = number in filled[:1] or not filled
        self.statistics.begin_slice(number, is_first=is_first)
        if is_first:
            self._forget()
            self._check_no_gradients()
            ledger.forget_dropped(trained.parameters, in_backward=False)
            self.number = 0
        for _ in range(self.number, number):  # the slice before, and empty ones between
            self._add(self._take())
            ledger.gradients_are_set_aside = True
        self.number, self._filled = number, filled
        self._is_last = number in filled[-1:] or not filled

    def begin_again(self, undo: Callable[[], None]) -> None:
        """Begin this rank's only slice once more, with the gradients that it has left, to synchronize these.

        `undo` is called between its forward and its synchronized backward.
        """
        self._known, self._undo, self._is_last = self._take(), undo, True
        self.statistics.begin_repeat()

    def begin(self, backward: Backward) -> None:
        """Refuse a step that has not come to its last slice, or shares parameters with another wrapper."""
        rank = self._reducer.channel.rank
        if not self._is_last:
            raise UsageError(
                f"rank {rank}: with virtual_ranks={self.count} gradients are synchronized once in a step, with the "
                f"last of {self.slices} slices on each rank; loop over paceline.accumulate(model, loader)"
            )
        if backward.is_shared:
            raise UsageError(
                f"rank {rank}: virtual_ranks={self.count} cannot sum gradients of parameters that another wrapper has, "
                "too; wrap a module that holds both"
            )
        if self._known is not None:
            self._undo()

    def bucket_ready(self, backward: Backward, bucket: Bucket) -> None:
        """Add the sums of the earlier slices, the smallest first."""
        if self._known is not None:
            self._replace(self._known, backward, bucket)
        for _, sums in reversed(self._sums):
            found = [place for place, index in enumerate(bucket.indices) if index in sums]
            earlier = [sums.pop(bucket.indices[place]) for place in found]
            present = {bucket.indices[place] for place in found}
            backward.absent = [index for index in backward.absent if index not in present]
            if len(found) == len(bucket.views):
                add_each(bucket.views, earlier)
                continue
            for place, gradient in zip(found, earlier, strict=True):
                bucket.views[place].add_(gradient)
            for place in set(range(len(bucket.views))) - set(found):
                bucket.views[place].add_(0.0)  # as on a rank that has no gradient, which makes 0.0 of -0.0
        if len(self._filled) < self.slices:  # empty slices count as zeros, as on a rank that has no other
            bucket.flat.add_(0.0)

    def has_report(self, backward: Backward) -> bool:
        """Count each slice with samples once, so that the sum becomes their mean; a user's own weights stay."""
        self._reducer.ledger.weigh_unweighted(len(self._filled))
        if self._known is not None:  # a late gradient is known, too
            backward.out_of_bucket, backward.late = {}, ()
        self._is_last = False
        return False

    def abort(self, backward: Backward) -> None:
        """Forget the slices of a step that an exception ended; it begins again with its first slice."""
        self._forget()

    def parameters_changed(self) -> None:
        """Forget sums, which belong to the parameters before."""
        self._forget()
        self._check_dtypes()

    def _forget(self) -> None:
        self._sums.clear()
        self._is_last, self._known, self._undo = False, None, _nothing
        self._reducer.ledger.gradients_are_set_aside = False

    def _check_dtypes(self) -> None:
        for name, view in zip(self._reducer.trained.names, self._reducer.buckets.views, strict=True):
            if view.dtype is torch.float16:
                raise UsageError(
                    f"parameter {name!r} is float16, whose gradients are divided by the number of ranks before they "
                    f"are summed; give reduce_dtype=torch.float32 with virtual_ranks={self.count}"
                )

    def _check_no_gradients(self) -> None:
        for name, parameter in zip(self._reducer.trained.names, self._reducer.trained.parameters, strict=True):
            if parameter.grad is not None:
                if bool(parameter.grad.any()):
                    raise UsageError(
                        f"rank {self._reducer.channel.rank}: parameter {name!r} has a gradient as a step begins, which "
                        "every slice would count again; call optimizer.zero_grad() after each step"
                    )
                parameter.grad = None

    def _take(self) -> dict[int, Tensor]:
        """Take the slice's gradients from the parameters, in the dtype of their buckets."""
        trained, taken = self._reducer.trained, {}
        for index, parameter in enumerate(trained.parameters):
            if (gradient := parameter.grad) is None:
                continue
            if gradient.layout is not torch.strided:
                raise UsageError(
                    f"rank {self._reducer.channel.rank}: parameter {trained.names[index]!r} has a {gradient.layout} "
                    f"gradient, which virtual_ranks={self.count} cannot sum in a tree; use a layer with dense gradients"
                )
            taken[index] = gradient.to(self._reducer.buckets.views[index].dtype)
            parameter.grad = None
        return taken

    def _replace(self, gradients: dict[int, Tensor], backward: Backward, bucket: Bucket) -> None:
        """Replace the gradients in a bucket."""
        backward.absent = [index for index in backward.absent if index not in gradients]
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            if index in gradients:
                view.copy_(gradients[index])
            else:
                view.zero_()

    def _add(self, gradients: dict[int, Tensor]) -> None:
        size = 1
        while self._sums and self._sums[-1][0] == size:
            _, earlier = self._sums.pop()
            gradients = _sum(earlier, gradients)
            size *= 2
        self._sums.append((size, gradients))


def _nothing() -> None:
    """Undo nothing."""


def _sum(left: dict[int, Tensor], right: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the sum of two slices' gradients, in the memory of `left`; a missing one counts as zero."""
    both = left.keys() & right.keys()
    if both:
        add_each([left[index] for index in both], [right[index] for index in both])
    for one in (left, right):
        for index in one.keys() - both:
            left[index] = one[index].add_(0.0)  # as where a rank has no gradient, which makes 0.0 of -0.0
    return left
