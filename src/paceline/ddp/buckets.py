"""Buckets: flat tensors that hold the gradients of neighboring parameters, which are reduced together.

Parameters are assigned to buckets based on plain values only, so every rank computes the same assignment. Bucketing and
its overlap with backward follow Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020.

After a step, ``p.grad`` is a view of a bucket, and so the average needs no copy. Decision 0012 gives the reasons.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.core.flat_views import views_of
from paceline.core.torch_internals import address_of, copy_each, count_each, count_uses, has_nonzero
from paceline.ddp.channel import Channel

MIB = 2**20
FIRST_CAPACITY = MIB
"""Bytes of the first bucket to launch: small, so that communication starts early in backward."""
CAPACITY = 25 * MIB
"""Bytes of every other bucket. Measured through shared memory on two cores, with models of 3 to 17 million parameters:
the differences between 1, 4, 25 and 100 MiB are below the noise (benchmarks/results, step-time-variants)."""


def assign(
    sizes: Sequence[int], kinds: Sequence[Hashable], order: Sequence[int], capacities: Sequence[int]
) -> list[list[int]]:
    """Split the parameters in `order` into buckets, each with one dtype on one device.

    Args:
        sizes: bytes of each parameter's gradient.
        kinds: (dtype, device) of each parameter; a bucket cannot mix them.
        order: indices of all parameters in the expected order of arrival during backward.
        capacities: bytes of the first, second, … bucket; the last value applies to all further buckets. A bucket is
            closed by the parameter that fills it, so it may exceed its capacity by one parameter.

    Returns:
        The parameter indices of each bucket. Buckets are in the order that they fill up and are launched.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index in order:
        # A bucket is one flat tensor, so it has one dtype and one device.
        kind = kinds[index]
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(index)
        filled[kind] = filled.get(kind, 0) + sizes[index]
        # The number of closed buckets is this bucket's position in the launch order, because closed buckets launch
        # first.
        if filled[kind] >= capacities[min(len(buckets), len(capacities) - 1)]:
            buckets.append(open_buckets.pop(kind))
            del filled[kind]
    position = {index: place for place, index in enumerate(order)}
    return buckets + sorted(open_buckets.values(), key=lambda bucket: position[bucket[-1]])


def default_capacities(total: int) -> tuple[int, ...]:
    """Return the capacities for `total` bytes of gradients, which share one bucket if they fit."""
    return (CAPACITY,) if total <= CAPACITY else (FIRST_CAPACITY, CAPACITY)


def arrival_order(observed: Sequence[int], count: int) -> list[int]:
    """Return all `count` parameters in `observed` order of arrival; unobserved ones come last, in reverse order.

    If a parameter arrived several times (reentrant checkpointing), its last arrival counts.
    """
    last = {index: place for place, index in enumerate(observed)}
    arrived = sorted(last, key=last.__getitem__)
    return arrived + [index for index in reversed(range(count)) if index not in last]


@dataclass(frozen=True)
class Overlap:
    """Timeline of one backward pass: seconds from its start, with one entry per bucket in launch order."""

    full: tuple[float, ...]
    """Arrival time of the bucket's last gradient."""
    begin: tuple[float, ...]
    """Start of its all-reduce."""
    end: tuple[float, ...]
    """End of its all-reduce."""

    @property
    def exposed(self) -> float:
        """Seconds that the backward pass waits for communication at its end."""
        return max(0.0, self.end[-1] - self.full[-1])


def overlap(backward: Sequence[float], reduce: Sequence[float], launch_when_full: bool = True) -> Overlap:
    """Return the timeline of a backward pass whose buckets are reduced one after another.

    Args:
        backward: seconds that backward takes to fill each bucket, in launch order; must not be empty.
        reduce: seconds of each bucket's all-reduce, assumed not to slow down backward (as with a network card).
        launch_when_full: whether each bucket is launched as soon as it is full, rather than all after backward.
    """
    full = tuple(accumulate(backward))
    begin: list[float] = []
    end: list[float] = []
    for filled, seconds in zip(full, reduce, strict=True):
        begin.append(max(filled if launch_when_full else full[-1], end[-1] if end else 0.0))
        end.append(begin[-1] + seconds)
    return Overlap(full, tuple(begin), tuple(end))


NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass
class Bucket:
    """A flat gradient buffer with a view for each parameter's gradient."""

    indices: list[int]
    """The parameters, by index in the reducer."""
    flat: Tensor
    """All gradients, one after another, without gaps."""
    views: list[Tensor] = field(default_factory=list)
    """Views of ``flat`` for each parameter's gradient: same shape, and same strides if those are dense."""
    largest: int = 0
    """Number of elements in the largest gradient."""
    is_last: bool = False
    """Whether this bucket is launched last."""
    prescale: float = 1.0
    """Factor applied to gradients when they are copied in; unless it is 1, the bucket holds means instead of sums."""
    is_averaged: bool = False
    """Whether the collective computes means instead of sums."""
    memory: Tensor = field(default=NOTHING)
    """The whole allocation: ``flat`` followed by the tail."""
    tail: Tensor = field(default=NOTHING)
    """Additional elements after the gradients that are reduced along with them."""

    @property
    def holds_means(self) -> bool:
        """Whether the bucket holds means instead of sums after the collective."""
        # Finishers divide half precision before the sum, which may overflow.
        return self.prescale != 1.0 or self.is_averaged or self.flat.dtype is torch.float16

    @classmethod
    def allocate(
        cls,
        indices: list[int],
        parameters: Sequence[Tensor],
        allocate: Callable[..., Tensor] = torch.zeros,
        dtype: torch.dtype | None = None,
        tail: int = 0,
    ) -> Bucket:
        """Return a zeroed bucket for `parameters` at `indices`, which share a device; `dtype` defaults to theirs.

        ``allocate(numel, dtype=…, device=…)`` provides the memory, including room for `tail` additional elements.
        """
        members = [parameters[index] for index in indices]
        total = sum(parameter.numel() for parameter in members)
        memory = allocate(total + tail, dtype=dtype or members[0].dtype, device=members[0].device)
        flat = memory[:total]
        largest = max((parameter.numel() for parameter in members), default=0)
        return cls(indices, flat, views_of(flat, members), largest, memory=memory, tail=memory[total:])


_address, _storage = Tensor.data_ptr, attrgetter("storage")


class BucketViews:
    """The gradients of one bucket as users see them, over a separate storage that only the views and users reference.

    ``p.grad`` is such a view, which the next backward overwrites. By default, torch gives every gradient its own
    memory, so a reference kept across steps keeps its values. To give the same guarantee without a copy in every step,
    reference counts are checked before a bucket is written: the counts of the views, because a user may keep ``p.grad``
    itself, and the count of their storage, because a user may keep something derived from it (``p.grad.detach()``, a
    slice, a NumPy array).

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
        self.memory = torch.utils.dlpack.from_dlpack(flat.view(torch.uint8)).view(flat.dtype)
        # torch returns this same object to any Python code that asks one of these tensors for its storage.
        self.storage = self.memory.untyped_storage()
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
        has_moved = self.memory.data_ptr() != self._start
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
        return [view.detach() for view in views_of(self.memory, self._parameters)]


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


_LISTS = 2
"""Number of internal lists that hold each view: one in its bucket, and one in the bucket set."""


class BucketSet:
    """Buckets for `parameters`, initially assigned in reverse order, which is roughly the order in backward.

    Also publishes averages in ``p.grad``, and distinguishes them from other gradients.

    Args:
        names: the parameters' names.
        parameters: in the module's order.
        capacities: size in bytes of the first, second, … bucket; see :func:`paceline.ddp.buckets.assign`.
        channel: allocates the buckets.
        unbucketed: indices of parameters that are not assigned to a bucket.
        reduce_dtype: dtype of the buckets of real parameters; None for each parameter's own.
        tail: number of extra elements after the gradients of the last bucket, if it holds real numbers; see
            :class:`.StatusDigest`.
        merges: whether gradients that fit in one bucket of :data:`CAPACITY` share it. A small first bucket is only
            worth its launch if another one follows.
    """

    parameters: Sequence[nn.Parameter]
    """The parameters, in the module's order."""
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
        *,
        merges: bool = False,
    ) -> None:
        self.unbucketed = unbucketed
        self._tail, self._merges = tail, merges
        self._names, self.parameters, self._capacities, self._channel = names, parameters, capacities, channel
        self._reduce_dtype = reduce_dtype
        # Copies of bucket views that were published instead, and their addresses, and averages of gradients outside the
        # buckets. Weak, so that averages dropped by the user are freed. All four are empty in an ordinary step.
        self.copies: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.out_of_bucket: dict[int, weakref.ref[Tensor]] = {}
        # Numbers of buckets that publish copies because a user has kept gradients, with the latest copies' memory.
        self.shown_copies: dict[int, list[StorageWeakRef]] = {}
        # Old bucket memory that users still reference, with the views that count these references.
        self.left_to_users: list[tuple[Tensor, BucketViews]] = []
        self.buckets: list[Bucket] = []
        self.bucket_views: list[BucketViews] = []
        self.assign_in(range(len(parameters) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def casts(self) -> bool:
        """Whether gradients are summed in another dtype than that of their parameters."""
        return self._reduce_dtype is not None

    @property
    def layout(self) -> list[list[int]]:
        """Parameter indices of every bucket, in the order of launch."""
        return [bucket.indices for bucket in self.buckets]

    def assign_in(self, order: Sequence[int]) -> None:
        """Rebuild the buckets for parameters whose gradients arrive in `order`."""
        kinds = [self._kind(index) for index in range(len(self.parameters))]
        inside = [index for index in order if index not in self.unbucketed]
        sizes = [p.numel() * dtype.itemsize for p, (dtype, _) in zip(self.parameters, kinds, strict=True)]
        total = sum(sizes[index] for index in inside)
        self._use(assign(sizes, kinds, inside, default_capacities(total) if self._merges else self._capacities))

    def use_parameters(self, names: Sequence[str], parameters: Sequence[nn.Parameter], outside: frozenset[int]) -> None:
        """Rebuild the buckets for other parameters; gradients that users still reference stay in the old memory."""
        previous = list(zip(self.buckets, self.bucket_views, strict=True))
        self.buckets, self.bucket_views = [], []
        self._names, self.parameters, self.unbucketed = names, parameters, outside
        self.copies, self.out_of_bucket = {}, {}
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
        previous = list(zip(self.buckets, self.bucket_views, strict=True))
        # The old memory is freed below, once gradients have moved, so for a moment old and new buckets both exist.
        self.buckets = [self._allocate(indices, is_last=indices is layout[-1]) for indices in layout]
        for bucket in self.buckets[-1:]:
            bucket.is_last = True
        self.has_tail = bool(self.buckets) and self.buckets[-1].tail.numel() > 0
        self.owned = [[self.parameters[index] for index in indices] for indices in self.layout]
        self.rest = [parameter for owned in self.owned[:-1] for parameter in owned]
        self.rest += [self.parameters[index] for index in self.unbucketed]
        self.shown_copies.clear()
        self.views = [torch.empty(0, device="cpu")] * len(self.parameters)
        self._addresses = [0] * len(self.parameters)
        self.bucket_views = [self._open(bucket) for bucket in self.buckets]
        self.all_views = AllBucketViews(self.bucket_views, self.views, self._addresses, _LISTS)
        for bucket, old_views in previous:
            self._move_gradients(bucket)
            self._leave(bucket.memory, old_views)
        self._free_unused()

    def _allocate(self, indices: list[int], *, is_last: bool) -> Bucket:
        dtype, _ = self._kind(indices[0])
        # A digest is encoded as real numbers; a complex bucket would need another encoding.
        tail = self._tail if is_last and dtype.is_floating_point else 0
        return Bucket.allocate(indices, self.parameters, self._channel.allocate, dtype, tail)

    def _move_gradients(self, bucket: Bucket) -> None:
        """Move gradients from a bucket of the previous layout into the current buckets."""
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            if self.parameters[index].grad is view:
                self.parameters[index].grad = self.views[index].copy_(view)

    def _open(self, bucket: Bucket) -> BucketViews:
        """Create the bucket views that users see."""
        opened = BucketViews(bucket.flat, [self.parameters[index] for index in bucket.indices])
        bucket.views = opened.views
        for index, view, address in zip(bucket.indices, opened.views, opened.addresses, strict=True):
            self.views[index], self._addresses[index] = view, address
        return opened

    def _leave(self, memory: Tensor, views: BucketViews) -> None:
        """Leave a bucket's memory to users who still reference it, until the last reference is gone."""
        views.views.clear()  # drop our own references, which would be mistaken for users' references
        self.left_to_users.append((memory, views))

    def _free_unused(self) -> None:
        """Free old memory that users no longer reference."""
        for memory, views in self.left_to_users:
            if not views.is_in_use():
                self._channel.free(memory)
        self.left_to_users = [(memory, views) for memory, views in self.left_to_users if views.is_in_use()]

    def is_untouched(self) -> bool:
        """Return whether :meth:`make_writable` would leave every bucket unchanged; one check covers all buckets."""
        # Unbucketed parameters share one empty tensor as their view, whose reference count is meaningless.
        return not (self.shown_copies or self.unbucketed) and self.all_views.are_untouched()

    def make_writable(self, number: int, elsewhere: Collection[int] = ()) -> None:
        """Make sure that writing to bucket `number` does not change a gradient that a user keeps.

        If a user references a gradient from this bucket, the user keeps the memory and the bucket gets new memory. From
        then on, the bucket publishes copies as long as a user keeps one. Gradients of the parameters in `elsewhere`,
        which another wrapper averages now, also count as kept.
        """
        bucket, views = self.buckets[number], self.bucket_views[number]
        for place in views.restore_moved():
            self.views[bucket.indices[place]] = views.views[place]
        if number in self.shown_copies:
            # Otherwise, every such step would allocate a new bucket, and one small gradient could keep a whole old one
            # alive.
            if not all(memory.expired() for memory in self.shown_copies[number]):
                return
            del self.shown_copies[number]
        others = {place for place, index in enumerate(bucket.indices) if index in elsewhere} if elsewhere else ()
        if views.is_referenced(_LISTS, others):
            self._leave(bucket.memory, views)
            fresh = self._allocate(bucket.indices, is_last=bucket is self.buckets[-1])
            bucket.memory, bucket.flat, bucket.tail = fresh.memory, fresh.flat, fresh.tail
            self.bucket_views[number] = self._open(bucket)
            self.all_views = AllBucketViews(self.bucket_views, self.views, self._addresses, _LISTS)
            self.shown_copies[number] = []

    def averages(self, saved: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the tensors to publish as gradients: each parameter's bucket view, or a copy in other memory.

        A parameter gets a copy if its dtype differs from the view's, or if users keep gradients. An unbucketed
        parameter gets an empty tensor.

        Args:
            saved: gradients that existed before backward. If one is referenced elsewhere (for example, because it is
                part of a flat buffer), the average is written into it.
        """
        if self.left_to_users:
            self._free_unused()
        self.copies = {}
        if self._reduce_dtype is None and not (self.shown_copies or saved):
            return self.views
        shown = list(self.views)
        if self._reduce_dtype is not None:
            self._cast(shown)
        for index in shared(saved):
            if _can_be_written(saved[index]):
                shown[index] = saved[index].copy_(shown[index])
        for number, memories in self.shown_copies.items():
            indices = self.buckets[number].indices
            for index in indices:
                if shown[index] is self.views[index]:
                    shown[index] = self.views[index].clone()
            # Storages rather than tensors, because a user may keep only a slice or a NumPy array.
            memories[:] = [StorageWeakRef(shown[index].untyped_storage()) for index in indices]
        self.copies = {
            index: (weakref.ref(gradient), gradient.data_ptr())
            for index, gradient in enumerate(shown)
            if gradient is not self.views[index]
        }
        return shown

    def _cast(self, shown: list[Tensor]) -> None:
        """Replace views with copies in the parameters' dtypes, each in separate memory, because users may keep one."""
        for bucket in self.buckets:
            pairs = [(index, self.parameters[index].dtype) for index in bucket.indices]
            for dtype in {dtype for _, dtype in pairs} - {bucket.flat.dtype}:
                indices = [index for index, original in pairs if original is dtype]
                views = [self.views[index] for index in indices]
                copies = [torch.empty_like(view, dtype=dtype) for view in views]
                copy_each(copies, views)  # a single kernel on a GPU
                for index, copied in zip(indices, copies, strict=True):
                    shown[index] = copied

    def publish(self, averages: Sequence[Tensor | None], absent: Collection[int] = ()) -> None:
        """Set ``p.grad`` to the average, or to None for `absent` parameters."""
        self.out_of_bucket = {}
        if absent:
            averages = list(averages)
            for index in absent:
                averages[index] = None
        for parameter, average in zip(self.parameters, averages, strict=True):
            parameter.grad = average

    def remember(self, out_of_bucket: Mapping[int, Tensor]) -> None:
        """Count these published tensors, which are not in bucket memory, as averages."""
        self.out_of_bucket = {index: weakref.ref(average) for index, average in out_of_bucket.items()}

    def local_gradient(self, others: Collection[int]) -> str | None:
        """Return the name of a parameter whose gradient was not averaged, except of parameters in `others`, or None."""
        for index, (name, parameter) in enumerate(zip(self._names, self.parameters, strict=True)):
            gradient = parameter.grad
            if gradient is None or index in others or self._is_average(index, gradient):
                continue
            # Zeros do not count: torch.distributed.checkpoint sets them so that the optimizer creates its state.
            if has_nonzero(gradient):
                return name
        return None

    def _is_average(self, index: int, gradient: Tensor) -> bool:
        if index in self.out_of_bucket and gradient is self.out_of_bucket[index]():
            return True
        if gradient.layout is not torch.strided or index in self.unbucketed:
            return False
        # Compare addresses, because p.grad may be another tensor over the same memory (p.grad.detach()).
        if index not in self.copies:
            return gradient.data_ptr() == self._addresses[index]
        shown, address = self.copies[index]
        return gradient is shown() and gradient.data_ptr() == address

    def _kind(self, index: int) -> tuple[torch.dtype, torch.device]:
        parameter = self.parameters[index]
        dtype = self._reduce_dtype if self._reduce_dtype and parameter.is_floating_point() else parameter.dtype
        return dtype, parameter.device


def _can_be_written(gradient: Tensor) -> bool:
    """Return whether `gradient` can be written to: it is neither part of a graph nor an expanded tensor."""
    expanded = any(stride == 0 and extent > 1 for stride, extent in zip(gradient.stride(), gradient.shape, strict=True))
    return not gradient.requires_grad and not expanded
