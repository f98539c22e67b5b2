"""Bucket views: the gradients of one bucket as users see them, and checks for references that users keep.

``p.grad`` is a view of a bucket, which the next backward overwrites. By default, torch gives every gradient its own
memory, so a reference kept across steps keeps its values. To give the same guarantee without a copy in every step,
reference counts are checked before a bucket is written: the counts of the views, because a user may keep ``p.grad``
itself, and the count of their storage, because a user may keep something derived from it (``p.grad.detach()``, a slice,
a NumPy array).

Decision 0012 gives the reasons.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from paceline.core.state.flat_views import views_of
from paceline.core.torch_internals.tensors import address_of, count_each, count_uses

_address, _storage = Tensor.data_ptr, attrgetter("storage")


class BucketViews:
    """The views of one bucket, over a separate storage that only the views and users reference.

    Args:
        flat: the bucket's memory.
        parameters: the parameters whose gradients are in it, in order.
    """

    views: list[Tensor]
    """The gradient of each parameter. Users get these tensors themselves, and may point one to other memory
    (``p.grad.data = …``); see :meth:`restore_moved`."""
    addresses: list[int]
    """Address of each gradient in the bucket."""

    def __init__(self, flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        # A second storage over the same memory. Works, futures and hooks hold `flat`'s storage, so they do not count.
        self._memory = torch.utils.dlpack.from_dlpack(flat.view(torch.uint8)).view(flat.dtype)
        # torch returns this same object to any Python code that asks one of these tensors for its storage.
        self.storage = self._memory.untyped_storage()
        self._start = flat.data_ptr()
        self._parameters = parameters
        self.views = self._make_views()
        self.addresses = list(map(_address, self.views))
        # The baseline for all later counts, taken before any user has seen the memory.
        self._references_alone = self._references()
        # The parts of the baseline, which :class:`AllBucketViews` compares for all buckets at once.
        self.address, self.uses_alone = address_of(self.storage), count_uses(self.storage)
        self.handles_alone = next(map(sys.getrefcount, map(_storage, [self])))

    def restore_moved(self) -> list[int]:
        """Replace views that a user has pointed to other memory; returns their indices."""
        addresses = list(map(_address, self.views))
        if addresses == self.addresses:
            return []
        moved = [place for place, address in enumerate(addresses) if address != self.addresses[place]]
        fresh = self._make_views()
        for place in moved:
            self.views[place] = fresh[place]
        return moved

    def is_referenced(self, lists: int, others: Collection[int] = ()) -> bool:
        """Return whether a user keeps a gradient that is no longer in ``p.grad``; call :meth:`restore_moved` first.

        While ``p.grad`` is still the view, backward accumulates into it, and every reference to it sees the change, as
        in torch.

        Args:
            lists: the number of our lists that hold each view.
            others: indices of gradients that stay in ``p.grad``, which then counts as a user.
        """
        # `share_memory_()` moves the storage of the views, which then belongs to the user.
        has_moved = self._memory.data_ptr() != self._start
        if has_moved or self._references() != self._references_alone:  # not only our own views reference the memory
            return True
        counts, unshared = list(map(sys.getrefcount, self.views)), _BASE_COUNT + lists
        if max(counts) <= unshared:
            return False
        suspects = [place for place, count in enumerate(counts) if count > unshared]
        return any(place in others or self._parameters[place].grad is not self.views[place] for place in suspects)

    def is_in_use(self) -> bool:
        """Return whether a user still references the memory after our own views were dropped."""
        return self._references() > self._references_alone - len(self.addresses)

    def _references(self) -> int:
        """Count the tensors that use the memory, and the Python objects that reference its storage."""
        return count_uses(self.storage) + sys.getrefcount(self.storage)

    def _make_views(self) -> list[Tensor]:
        # Detached, because autograd refuses p.grad.detach_() on views that it knows.
        return [view.detach() for view in views_of(self._memory, self._parameters)]


class AllBucketViews:
    """The views of all buckets of a wrapper, checked together.

    Args:
        parts: the views of each bucket, in bucket order.
        views: the same tensors in one list, in any order.
        addresses: the address of each.
        lists: the number of our lists that hold each view.
    """

    def __init__(self, parts: Sequence[BucketViews], views: list[Tensor], addresses: list[int], lists: int) -> None:
        self._views, self._addresses, self._alone = views, addresses, _BASE_COUNT + lists
        self._parts = parts
        self._memories = [part.address for part in parts]
        self._uses = [part.uses_alone for part in parts]
        self._handles = [part.handles_alone for part in parts]

    def are_untouched(self) -> bool:
        """Return whether no view has moved and no user references a gradient of any bucket; true in most steps.

        If true, :meth:`BucketViews.restore_moved` has no effect, and :meth:`BucketViews.is_referenced` returns False.
        """
        # Loops in C rather than in Python, because this runs in every step.
        return (
            list(map(_address, self._views)) == self._addresses
            and list(map(count_each, self._memories)) == self._uses
            and list(map(sys.getrefcount, map(_storage, self._parts))) == self._handles
            and max(map(sys.getrefcount, self._views), default=0) <= self._alone
        )


def shared(gradients: Mapping[int, Tensor]) -> list[int]:
    """Return the keys of the `gradients` that are referenced elsewhere, directly or through their memory."""
    tensors = list(gradients.values())
    counts = list(map(sys.getrefcount, tensors))
    unshared = _BASE_COUNT + 2  # the mapping and the list
    return [
        index
        for index, tensor, count in zip(gradients, tensors, counts, strict=True)
        if count > unshared
        or count_uses(tensor.untyped_storage()) > _UNSHARED_COUNT
        or (tensor.is_cpu and tensor.is_shared())  # maybe with another process
    ]


# Measured rather than hard-coded, because counts differ between versions of Python and torch.
_one = [torch.empty(1, device="cpu")]
_BASE_COUNT = next(map(sys.getrefcount, _one)) - 1
"""The count that ``map(sys.getrefcount, …)`` gives for a tensor, minus the lists that hold it."""
_UNSHARED_COUNT = count_uses(_one[0].untyped_storage())
"""The use count of a storage that only one tensor uses."""
