"""The gradients of one bucket as users see them, and whether users still refer to them.

``p.grad`` is a view of a bucket, which the next backward overwrites. With torch's default every gradient has memory of
its own, so a reference that is kept across steps keeps its values. To give that without a copy in every step, reference
counts are looked at before a bucket is written to: of the views, as a user may keep ``p.grad`` itself, and of their
storage, as he may keep something made from it (``p.grad.detach()``, a slice, a NumPy array).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from paceline.core.state.buckets import views_of
from paceline.core.torch_internals.tensors import address_of, count_each, count_uses

_address, _storage = Tensor.data_ptr, attrgetter("storage")


class StandIn(Tensor):
    """Shown in ``p.grad`` for a gradient that this rank has only in part, in place of a view of the bucket."""

    def stand_for(self, view: Tensor | None) -> None:
        """Stand for the part of a bucket in `view`, from now on; None for nothing any more."""
        raise NotImplementedError

    def hold_memory(self) -> None:
        """Keep the memory that it stands for, which the bucket is about to leave."""
        raise NotImplementedError

    def lies_in(self, view: Tensor) -> bool:
        """Whether it stands for the part of a bucket in `view`."""
        raise NotImplementedError

    def memory(self) -> Tensor:
        """Return the part of a bucket that it stands for.

        Raises:
            UsageError: if another backward has come since.
        """
        raise NotImplementedError


class Window:
    """Views of a bucket's memory, in a storage of their own, so that no one but their users is counted.

    Args:
        flat: the bucket's memory.
        parameters: whose gradients lie in it, one after the other.
    """

    views: list[Tensor]
    """For each parameter, its gradient. Users get these very tensors, and may point one to other memory
    (``p.grad.data = …``); see :meth:`mend`."""
    addresses: list[int]
    """Where each gradient lies."""

    def __init__(self, flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        # Communication, and hooks, see `flat`, whose storage counts other references.
        self._memory = torch.utils.dlpack.from_dlpack(flat.view(torch.uint8)).view(flat.dtype)
        # The one handle of the memory that Python code gets from any tensor in it.
        self.storage = self._memory.untyped_storage()
        self._parameters = parameters
        self.views = self._made_views()
        self.addresses = list(map(_address, self.views))
        self._references_alone = self._references()
        # The same in parts, for a question about many windows.
        self.address, self.uses_alone = address_of(self.storage), count_uses(self.storage)
        self.handles_alone = next(map(sys.getrefcount, map(_storage, [self])))

    def is_untouched(self, lists: int) -> bool:
        """Whether :meth:`mend` would find nothing to do, and :meth:`is_kept` would answer no, as in most steps."""
        return (
            list(map(_address, self.views)) == self.addresses
            and self.is_memory_untouched()
            and max(map(sys.getrefcount, self.views)) <= _IN_NO_LIST + lists
        )

    def mend(self) -> list[int]:
        """Make again the views that a user has pointed to other memory; returns their places."""
        addresses = list(map(_address, self.views))
        if addresses == self.addresses:
            return []
        moved = [place for place, address in enumerate(addresses) if address != self.addresses[place]]
        made = self._made_views()
        for place in moved:
            self.views[place] = made[place]
        return moved

    def is_kept(self, lists: int, others: Collection[int] = ()) -> bool:
        """Whether a user refers to a gradient that is no parameter's any more; ask after :meth:`mend`.

        Where ``p.grad`` still is the view, backward accumulates into it, with torch as here, for all who refer to it.

        Args:
            lists: how many lists of ours hold each view.
            others: places of gradients that are not taken from ``p.grad`` now, so that it counts as a user, too.
        """
        if not self.is_memory_untouched():
            return True
        counts, alone = list(map(sys.getrefcount, self.views)), _IN_NO_LIST + lists
        if max(counts) <= alone:
            return False
        suspects = [place for place, count in enumerate(counts) if count > alone]
        return any(place in others or self._parameters[place].grad is not self.views[place] for place in suspects)

    def is_in_use(self) -> bool:
        """Whether a user still refers to the memory of a window whose own views were dropped."""
        return self._references() > self._references_alone - len(self.addresses)

    def is_memory_untouched(self) -> bool:
        """Whether no one refers to the memory but for the views that we hold."""
        return self._references() == self._references_alone

    def _references(self) -> int:
        """How many tensors refer to the memory, and how many Python objects to its handle."""
        return count_uses(self.storage) + sys.getrefcount(self.storage)

    def _made_views(self) -> list[Tensor]:
        # Detached, as autograd lets no one call detach_() on views that it knows.
        return [view.detach() for view in views_of(self._memory, self._parameters)]


class AllWindows:
    """All windows of a wrapper, looked at in one go.

    Args:
        windows: in the order of buckets.
        views: those of all windows, in any order.
        addresses: where these lie.
        lists: how many lists of ours hold each view.
    """

    def __init__(self, windows: Sequence[Window], views: list[Tensor], addresses: list[int], lists: int) -> None:
        self._views, self._addresses, self._alone = views, addresses, _IN_NO_LIST + lists
        self._windows = windows
        self._memories = [window.address for window in windows]
        self._uses = [window.uses_alone for window in windows]
        self._handles = [window.handles_alone for window in windows]

    def are_untouched(self) -> bool:
        """Whether :meth:`Window.is_untouched` holds for all of them."""
        return (
            list(map(_address, self._views)) == self._addresses
            and list(map(count_each, self._memories)) == self._uses
            and list(map(sys.getrefcount, map(_storage, self._windows))) == self._handles
            and max(map(sys.getrefcount, self._views), default=0) <= self._alone
        )


def shared(gradients: Mapping[int, Tensor]) -> list[int]:
    """The keys of those `gradients` to which, or to whose memory, somebody else refers, too."""
    tensors = list(gradients.values())
    counts = list(map(sys.getrefcount, tensors))
    alone = _IN_NO_LIST + 2  # the mapping and the list
    return [
        index
        for index, tensor, count in zip(gradients, tensors, counts, strict=True)
        if count > alone or count_uses(tensor.untyped_storage()) > _OF_ONE_TENSOR
    ]


_one = [torch.empty(1)]
_IN_NO_LIST = next(map(sys.getrefcount, _one)) - 1
"""The count that ``map(sys.getrefcount, …)`` gives for a tensor, less the lists that hold it."""
_OF_ONE_TENSOR = count_uses(_one[0].untyped_storage())
"""The count for the memory of a tensor with which no one shares it."""
