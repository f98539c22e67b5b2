"""Bucket views: the gradients of one bucket as users see them, and whether users still refer to them.

``p.grad`` is a view of a bucket, which the next backward overwrites. With torch's default every gradient has memory of
its own, so a reference that is kept across steps keeps its values. To give that without a copy in every step, reference
counts are looked at before a bucket is written to: of the views, because a user may keep ``p.grad`` itself, and
that of their storage, because he may keep something made from it (``p.grad.detach()``, a slice, a NumPy array).

Decision 0012 says why.
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
    """The views of one bucket, over a separate storage whose reference count shows users alone.

    Args:
        flat: the bucket's memory.
        parameters: the parameters whose gradients lie in it, one after the other.
    """

    views: list[Tensor]
    """For each parameter, its gradient. Users get these very tensors, and may point one to other memory
    (``p.grad.data = …``); see :meth:`restore_moved`."""
    addresses: list[int]
    """Address of each gradient in the bucket."""

    def __init__(self, flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        # A second storage over the same memory: works, futures and hooks refer to that of `flat`, so they do not count.
        self._memory = torch.utils.dlpack.from_dlpack(flat.view(torch.uint8)).view(flat.dtype)
        # torch hands this one object to Python code that asks any tensor over the memory for its storage.
        self.storage = self._memory.untyped_storage()
        self._parameters = parameters
        self.views = self._make_views()
        self.addresses = list(map(_address, self.views))
        # All later counts are compared with the count of now, when no user has seen the memory.
        self._references_alone = self._references()
        # The parts of that count, which :class:`AllBucketViews` compares for all buckets at once.
        self.address, self.uses_alone = address_of(self.storage), count_uses(self.storage)
        self.handles_alone = next(map(sys.getrefcount, map(_storage, [self])))

    def restore_moved(self) -> list[int]:
        """Replace views that a user has pointed to other memory by new ones; returns their places."""
        addresses = list(map(_address, self.views))
        if addresses == self.addresses:
            return []
        moved = [place for place, address in enumerate(addresses) if address != self.addresses[place]]
        made = self._make_views()
        for place in moved:
            self.views[place] = made[place]
        return moved

    def is_referenced(self, lists: int, others: Collection[int] = ()) -> bool:
        """Return whether a user keeps a gradient that ``p.grad`` no longer shows; call :meth:`restore_moved` before.

        Where ``p.grad`` still is the view, backward accumulates into it for all who refer to it, with torch as here.

        Args:
            lists: the number of our lists that hold each view.
            others: places of gradients that are not taken from ``p.grad`` now, so that it counts as a user.
        """
        if self._references() != self._references_alone:  # others than our own views refer to the memory
            return True
        counts, alone = list(map(sys.getrefcount, self.views)), _BASE_COUNT + lists
        if max(counts) <= alone:
            return False
        suspects = [place for place, count in enumerate(counts) if count > alone]
        return any(place in others or self._parameters[place].grad is not self.views[place] for place in suspects)

    def is_in_use(self) -> bool:
        """Return whether a user still refers to the memory, after our own views were dropped."""
        return self._references() > self._references_alone - len(self.addresses)

    def _references(self) -> int:
        """Count the tensors that refer to the memory, and the Python objects that refer to its storage."""
        return count_uses(self.storage) + sys.getrefcount(self.storage)

    def _make_views(self) -> list[Tensor]:
        # Detached, because autograd refuses p.grad.detach_() on views that it knows.
        return [view.detach() for view in views_of(self._memory, self._parameters)]


class AllBucketViews:
    """The views of all buckets of a wrapper, looked at in one go.

    Args:
        parts: the views of each bucket, in the order of buckets.
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
        """Return whether no view has moved and no user refers to a gradient of any bucket; it is true in most steps.

        Then :meth:`BucketViews.restore_moved` has no effect, and :meth:`BucketViews.is_referenced` returns False.
        """
        # Loops in C, without a line of Python for each parameter: this runs in every step.
        return (
            list(map(_address, self._views)) == self._addresses
            and list(map(count_each, self._memories)) == self._uses
            and list(map(sys.getrefcount, map(_storage, self._parts))) == self._handles
            and max(map(sys.getrefcount, self._views), default=0) <= self._alone
        )


def shared(gradients: Mapping[int, Tensor]) -> list[int]:
    """Return the keys of `gradients` with other references to them or to their memory."""
    tensors = list(gradients.values())
    counts = list(map(sys.getrefcount, tensors))
    alone = _BASE_COUNT + 2  # the mapping and the list
    return [
        index
        for index, tensor, count in zip(gradients, tensors, counts, strict=True)
        if count > alone or count_uses(tensor.untyped_storage()) > _UNSHARED_COUNT
    ]


# Measured rather than written down, because counts differ between versions of Python and torch.
_one = [torch.empty(1)]
_BASE_COUNT = next(map(sys.getrefcount, _one)) - 1
"""The count that ``map(sys.getrefcount, …)`` gives for a tensor, less the lists that hold it."""
_UNSHARED_COUNT = count_uses(_one[0].untyped_storage())
"""The use count of the memory of a tensor that shares it with no other."""
