"""All buckets of a wrapper: the position of each parameter's gradient, and the launch order."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.core.torch_internals.tensors import copy_each
from paceline.ddp.options.buckets import Bucket, assign
from paceline.ddp.reducer.gradient_views import AllBucketViews, BucketViews, shared
from paceline.ddp.transport.channel import Channel

_LISTS = 2
"""Number of internal lists that hold each view: one in its bucket, and one in the bucket set."""


class BucketSet:
    """Buckets for `parameters`, initially assigned in reverse order, which is roughly the order in backward.

    Args:
        names: the parameters' names.
        parameters: in the module's order.
        capacities: size in bytes of the first, second, … bucket; see :func:`paceline.ddp.options.buckets.assign`.
        channel: allocates the buckets.
        unbucketed: indices of parameters that are not assigned to a bucket.
        reduce_dtype: dtype of the buckets of real parameters; None for each parameter's own.
        tail: number of extra elements after the gradients of the last bucket, if it holds real numbers; see
            :mod:`.digest`.
    """

    views: list[Tensor]
    """For each parameter, its bucket view; an empty tensor for an unbucketed parameter."""
    unbucketed: frozenset[int]
    """Parameters that are not assigned to a bucket."""
    owned: list[list[nn.Parameter]]
    """The parameters of each bucket."""
    rest: list[nn.Parameter]
    """The parameters of all buckets but the last, and the unbucketed ones. If a parameter in this list has a gradient
    after the last bucket has been filled, the gradient is not in any bucket."""
    has_tail: bool
    """Whether the last bucket has a tail after its gradients."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        capacities: Sequence[int],
        channel: Channel,
        unbucketed: frozenset[int] = frozenset(),
        reduce_dtype: torch.dtype | None = None,
        tail: int = 0,
    ) -> None:
        self.unbucketed = unbucketed
        self._tail = tail
        self._names, self._parameters, self._capacities, self._channel = names, parameters, capacities, channel
        self._reduce_dtype = reduce_dtype
        # Averages that are not bucket views, and their addresses. Weak, so that averages dropped by the user are freed.
        self._copies: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # Numbers of buckets that publish copies because a user has kept gradients, with the latest copies' memory.
        self._shown_copies: dict[int, list[StorageWeakRef]] = {}
        # Old bucket memory that users still reference, with the views that count these references.
        self._left_to_users: list[tuple[Tensor, BucketViews]] = []
        self.buckets: list[Bucket] = []
        self._bucket_views: list[BucketViews] = []
        self.assign_in(range(len(parameters) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def layout(self) -> list[list[int]]:
        """Parameter indices of every bucket, in the order of launch."""
        return [bucket.indices for bucket in self.buckets]

    def assign_in(self, order: Sequence[int]) -> None:
        """Rebuild the buckets for parameters whose gradients arrive in `order`."""
        kinds = [self._kind(index) for index in range(len(self._parameters))]
        inside = [index for index in order if index not in self.unbucketed]
        sizes = [p.numel() * dtype.itemsize for p, (dtype, _) in zip(self._parameters, kinds, strict=True)]
        self._use(assign(sizes, kinds, inside, self._capacities))

    def use_parameters(self, names: Sequence[str], parameters: Sequence[nn.Parameter], outside: frozenset[int]) -> None:
        """Rebuild the buckets for other parameters; gradients that users still reference stay in the old memory."""
        previous = list(zip(self.buckets, self._bucket_views, strict=True))
        self.buckets, self._bucket_views = [], []
        self._names, self._parameters, self.unbucketed = names, parameters, outside
        self._copies = {}
        self.assign_in(range(len(parameters) - 1, -1, -1))
        for bucket, old_views in previous:
            self._leave(bucket.memory, old_views)
        self._free_unused()

    def named_layout(self) -> list[list[str]]:
        return [[self._names[index] for index in indices] for indices in self.layout]

    def use_named(self, layout: list[list[str]]) -> bool:
        """Rebuild the buckets according to `layout` and return True, unless it has other parameters."""
        index_of = {name: index for index, name in enumerate(self._names) if index not in self.unbucketed}
        if sorted(name for names in layout for name in names) != sorted(index_of):
            return False
        indices = [[index_of[name] for name in names] for names in layout]
        if any(len({self._kind(index) for index in part}) != 1 for part in indices):
            return False
        self._use(indices)
        return True

    def _use(self, layout: list[list[int]]) -> None:
        """Allocate buckets for `layout`, and move gradients over from the old ones."""
        previous = list(zip(self.buckets, self._bucket_views, strict=True))
        # The old memory is freed below, once gradients have moved, so for a moment old and new buckets both exist.
        self.buckets = [self._allocate(indices, is_last=indices is layout[-1]) for indices in layout]
        for bucket in self.buckets[-1:]:
            bucket.is_last = True
        self.has_tail = bool(self.buckets) and self.buckets[-1].tail.numel() > 0
        self.owned = [[self._parameters[index] for index in indices] for indices in self.layout]
        self.rest = [parameter for owned in self.owned[:-1] for parameter in owned]
        self.rest += [self._parameters[index] for index in self.unbucketed]
        self._shown_copies.clear()
        self.views = [torch.empty(0, device="cpu")] * len(self._parameters)
        self._addresses = [0] * len(self._parameters)
        self._bucket_views = [self._open(bucket) for bucket in self.buckets]
        self._all = AllBucketViews(self._bucket_views, self.views, self._addresses, _LISTS)
        for bucket, old_views in previous:
            self._move_gradients(bucket)
            self._leave(bucket.memory, old_views)
        self._free_unused()

    def _allocate(self, indices: list[int], *, is_last: bool) -> Bucket:
        dtype, _ = self._kind(indices[0])
        # A digest is encoded as real numbers; a complex bucket would need another encoding.
        tail = self._tail if is_last and dtype.is_floating_point else 0
        return Bucket.allocate(indices, self._parameters, self._channel.allocate, dtype, tail)

    def _move_gradients(self, bucket: Bucket) -> None:
        """Move gradients from a bucket of the previous layout into the current buckets."""
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            if self._parameters[index].grad is view:
                self._parameters[index].grad = self.views[index].copy_(view)

    def _open(self, bucket: Bucket) -> BucketViews:
        """Create the bucket views that users see."""
        opened = BucketViews(bucket.flat, [self._parameters[index] for index in bucket.indices])
        bucket.views = opened.views
        for index, view, address in zip(bucket.indices, opened.views, opened.addresses, strict=True):
            self.views[index], self._addresses[index] = view, address
        return opened

    def _leave(self, memory: Tensor, views: BucketViews) -> None:
        """Leave a bucket's memory to users who still reference it, until the last reference is gone."""
        views.views.clear()  # drop our own references, which would be mistaken for users' references
        self._left_to_users.append((memory, views))

    def _free_unused(self) -> None:
        """Free old memory that users no longer reference."""
        for memory, views in self._left_to_users:
            if not views.is_in_use():
                self._channel.free(memory)
        self._left_to_users = [(memory, views) for memory, views in self._left_to_users if views.is_in_use()]

    def is_untouched(self) -> bool:
        """Return whether :meth:`make_writable` would leave every bucket unchanged; one check covers all buckets."""
        # Unbucketed parameters share one empty tensor as their view, whose reference count is meaningless.
        return not (self._shown_copies or self.unbucketed) and self._all.are_untouched()

    def make_writable(self, number: int, elsewhere: Collection[int] = ()) -> None:
        """Make sure that writing to bucket `number` does not change a gradient that a user keeps.

        If a user references a gradient from this bucket, the user keeps the memory and the bucket gets new memory. From
        then on, the bucket publishes copies as long as a user keeps one. Gradients of the parameters in `elsewhere`,
        which another wrapper averages now, also count as kept.
        """
        bucket, views = self.buckets[number], self._bucket_views[number]
        for place in views.restore_moved():
            self.views[bucket.indices[place]] = views.views[place]
        if number in self._shown_copies:
            # Otherwise, every such step would allocate a new bucket, and one small gradient could keep a whole old one
            # alive.
            if not all(memory.expired() for memory in self._shown_copies[number]):
                return
            del self._shown_copies[number]
        others = {place for place, index in enumerate(bucket.indices) if index in elsewhere} if elsewhere else ()
        if views.is_referenced(_LISTS, others):
            self._leave(bucket.memory, views)
            fresh = self._allocate(bucket.indices, is_last=bucket is self.buckets[-1])
            bucket.memory, bucket.flat, bucket.tail = fresh.memory, fresh.flat, fresh.tail
            self._bucket_views[number] = self._open(bucket)
            self._all = AllBucketViews(self._bucket_views, self.views, self._addresses, _LISTS)
            self._shown_copies[number] = []

    def averages(self, saved: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the tensors to publish as gradients: each parameter's bucket view, or a copy in other memory.

        A parameter gets a copy if its dtype differs from the view's, or if users keep gradients. An unbucketed
        parameter gets an empty tensor.

        Args:
            saved: gradients that existed before backward. If one is referenced elsewhere (for example, because it is
                part of a flat buffer), the average is written into it.
        """
        if self._left_to_users:
            self._free_unused()
        self._copies = {}
        if self._reduce_dtype is None and not (self._shown_copies or saved):
            return self.views
        shown = list(self.views)
        if self._reduce_dtype is not None:
            self._cast(shown)
        for index in shared(saved):
            if _can_be_written(saved[index]):
                shown[index] = saved[index].copy_(shown[index])
        for number, memories in self._shown_copies.items():
            indices = self.buckets[number].indices
            for index in indices:
                if shown[index] is self.views[index]:
                    shown[index] = self.views[index].clone()
            # Storages rather than tensors, because a user may keep only a slice or a NumPy array.
            memories[:] = [StorageWeakRef(shown[index].untyped_storage()) for index in indices]
        self._copies = {
            index: (weakref.ref(gradient), gradient.data_ptr())
            for index, gradient in enumerate(shown)
            if gradient is not self.views[index]
        }
        return shown

    def _cast(self, shown: list[Tensor]) -> None:
        """Replace views with copies in the parameters' dtypes, each in separate memory, because users may keep one."""
        for bucket in self.buckets:
            pairs = [(index, self._parameters[index].dtype) for index in bucket.indices]
            for dtype in {dtype for _, dtype in pairs} - {bucket.flat.dtype}:
                indices = [index for index, original in pairs if original is dtype]
                views = [self.views[index] for index in indices]
                copies = [torch.empty_like(view, dtype=dtype) for view in views]
                copy_each(copies, views)  # a single kernel on a GPU
                for index, copied in zip(indices, copies, strict=True):
                    shown[index] = copied

    def is_average(self, index: int, gradient: Tensor) -> bool:
        """Return whether `gradient` is in the memory where :meth:`averages` has put the parameter's average."""
        if gradient.layout is not torch.strided or index in self.unbucketed:
            return False
        # Compare addresses, because p.grad may be another tensor over the same memory (p.grad.detach()).
        if index not in self._copies:
            return gradient.data_ptr() == self._addresses[index]
        shown, address = self._copies[index]
        return gradient is shown() and gradient.data_ptr() == address

    def _kind(self, index: int) -> tuple[torch.dtype, torch.device]:
        parameter = self._parameters[index]
        dtype = self._reduce_dtype if self._reduce_dtype and parameter.is_floating_point() else parameter.dtype
        return dtype, parameter.device


def _can_be_written(gradient: Tensor) -> bool:
    """Return whether `gradient` can be written to: it is neither part of a graph nor an expanded tensor."""
    expanded = any(stride == 0 and extent > 1 for stride, extent in zip(gradient.stride(), gradient.shape, strict=True))
    return not gradient.requires_grad and not expanded
