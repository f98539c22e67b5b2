"""All buckets of a wrapper: where each parameter's gradient lies, and in which order buckets are launched."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.core.state.buckets import Bucket, assign
from paceline.core.torch_internals.tensors import copy_each
from paceline.ddp.reducer.gradient_views import AllWindows, StandIn, Window, shared
from paceline.ddp.transport.channel import Channel
from paceline.ddp.transport.finisher import NO_STAND_INS
from paceline.errors import CheckpointMismatch

_LISTS = 2
"""Lists that hold each view: its window's and the bucket set's."""


class BucketSet:
    """Buckets for `parameters`, first assigned in reverse order, which is about that of backward.

    Args:
        names: the parameters' names.
        parameters: in the module's order.
        capacities: bytes of the first, second, … bucket; see :func:`paceline.core.state.buckets.assign`.
        channel: allocates the buckets.
        unbucketed: indices of parameters that get no place in a bucket.
        reduce_dtype: of the buckets of real parameters; None for each parameter's own.
        tail: elements behind the gradients of the last bucket, if these are real numbers; see :mod:`.digest`.
    """

    views: list[Tensor]
    """For each parameter, its place in a bucket, shaped like its gradient; empty for those without one."""
    unbucketed: frozenset[int]
    """Parameters that have no place in a bucket."""
    owned: list[list[nn.Parameter]]
    """The parameters of each bucket."""
    rest: list[nn.Parameter]
    """The parameters of all buckets but the last, and those without a bucket. When the last bucket has been filled, a
    gradient of one of them is in no bucket."""
    has_tail: bool
    """Whether something else travels behind the gradients of the last bucket."""

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
        # Averages that are no bucket's view, and their addresses. Weak, as a gradient's memory goes when the user
        # drops it.
        self._copies: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # By bucket whose gradients a user has kept: the memory of the copies that it showed last.
        self._keepers: dict[int, list[StorageWeakRef]] = {}
        # Memory that was a bucket's, and to which a user may still refer.
        self._left: list[tuple[Tensor, Window]] = []
        self.buckets: list[Bucket] = []
        self._windows: list[Window] = []
        self.assign_in(range(len(parameters) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def layout(self) -> list[list[int]]:
        """Parameter indices of every bucket, in the order of launch."""
        return [bucket.indices for bucket in self.buckets]

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in self.buckets)

    def assign_in(self, order: Sequence[int]) -> None:
        """Make the buckets again for parameters that arrive in `order`."""
        kinds = [self._kind(index) for index in range(len(self._parameters))]
        inside = [index for index in order if index not in self.unbucketed]
        sizes = [p.numel() * dtype.itemsize for p, (dtype, _) in zip(self._parameters, kinds, strict=True)]
        self._use(assign(sizes, kinds, inside, self._capacities))

    def use_parameters(self, names: Sequence[str], parameters: Sequence[nn.Parameter], outside: frozenset[int]) -> None:
        """Make the buckets again for other parameters; gradients stay in the old memory while they are used."""
        before = list(zip(self.buckets, self._windows, strict=True))
        for parameter in self._parameters:
            if isinstance(parameter.grad, StandIn):
                parameter.grad.hold_memory()
        self.buckets, self._windows = [], []
        self._names, self._parameters, self.unbucketed = names, parameters, outside
        self._copies = {}
        self.assign_in(range(len(parameters) - 1, -1, -1))
        for bucket, window in before:
            self._leave(bucket.memory, window)
        self._free_unused()

    def named_layout(self) -> list[list[str]]:
        """The layout with names for indices."""
        return [[self._names[index] for index in indices] for indices in self.layout]

    def use_named(self, layout: list[list[str]]) -> None:
        """Take over the layout that :meth:`named_layout` gave.

        Raises:
            CheckpointMismatch: if it does not hold every parameter exactly once, in buckets of one dtype each.
        """
        held = sorted(name for names in layout for name in names)
        for name in held:
            if name not in self._names:
                raise CheckpointMismatch(
                    f"the bucket layout names {name!r}, which this model does not train; load it into the model it "
                    "was saved from"
                )
        index_of = {name: index for index, name in enumerate(self._names)}
        indices = [[index_of[name] for name in names] for names in layout]
        inside = sorted(name for index, name in enumerate(self._names) if index not in self.unbucketed)
        if held != inside or any(len({self._kind(index) for index in part}) != 1 for part in indices):
            raise CheckpointMismatch(
                f"the bucket layout holds {len(held)} parameters in a way that does not fit this model of "
                f"{len(self._names)}; load it into the model it was saved from"
            )
        self._use(indices)

    def _use(self, layout: list[list[int]]) -> None:
        """Allocate buckets for `layout`; gradients that lie in the old ones move along."""
        before = list(zip(self.buckets, self._windows, strict=True))
        self.buckets = [self._allocate(indices, is_last=indices is layout[-1]) for indices in layout]
        for bucket in self.buckets[-1:]:
            bucket.is_last = True
        self.has_tail = bool(self.buckets) and self.buckets[-1].tail.numel() > 0
        self.refresh()
        self._keepers.clear()
        self.views, self._addresses = [torch.empty(0)] * len(self._parameters), [0] * len(self._parameters)
        self._windows = [self._open(bucket) for bucket in self.buckets]
        self._all = AllWindows(self._windows, self.views, self._addresses, _LISTS)
        for bucket, window in before:
            self._move_gradients(bucket)
            self._leave(bucket.memory, window)
        self._free_unused()

    def refresh(self) -> None:
        """Look at the parameters anew, some of which have been replaced in their list."""
        self.owned = [[self._parameters[index] for index in indices] for indices in self.layout]
        self.rest = [parameter for owned in self.owned[:-1] for parameter in owned]
        self.rest += [self._parameters[index] for index in self.unbucketed]

    def _allocate(self, indices: list[int], *, is_last: bool) -> Bucket:
        dtype, _ = self._kind(indices[0])
        tail = self._tail if is_last and dtype.is_floating_point else 0
        return Bucket.allocate(indices, self._parameters, self._channel.allocate, dtype, tail)

    def _move_gradients(self, bucket: Bucket) -> None:
        """Take gradients that lie in a bucket of another layout along into the present ones."""
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            gradient = self._parameters[index].grad
            if gradient is view:
                self._parameters[index].grad = self.views[index].copy_(view)
            elif isinstance(gradient, StandIn) and gradient.lies_in(view):
                gradient.stand_for(self.views[index].copy_(view))

    def _open(self, bucket: Bucket) -> Window:
        """Let users see the bucket's memory."""
        window = Window(bucket.flat, [self._parameters[index] for index in bucket.indices])
        bucket.views = window.views
        for index, view, address in zip(bucket.indices, window.views, window.addresses, strict=True):
            self.views[index], self._addresses[index] = view, address
        return window

    def _leave(self, memory: Tensor, window: Window) -> None:
        """Leave a bucket's memory to the users who refer to it; the last one gives it back."""
        window.views.clear()
        self._left.append((memory, window))

    def _free_unused(self) -> None:
        """Take back memory that users had, and use no more."""
        for memory, window in self._left:
            if not window.is_in_use():
                self._channel.free(memory)
        self._left = [(memory, window) for memory, window in self._left if window.is_in_use()]

    def is_untouched(self) -> bool:
        """Whether :meth:`claim` would find nothing to do in any bucket, asked for all of them at once."""
        return not (self._keepers or self.unbucketed) and self._all.are_untouched()

    def claim(self, number: int, elsewhere: Collection[int] = ()) -> None:
        """Make sure that nothing which a user keeps changes when bucket `number` is written to.

        If somebody refers to a gradient that it showed, the memory is left to him and the bucket gets other memory.
        From then on it shows copies, for as long as somebody keeps these. Gradients of the parameters `elsewhere`,
        which another wrapper averages now, are not ours either.
        """
        bucket, window = self.buckets[number], self._windows[number]
        if number not in self._keepers and window.is_untouched(_LISTS):
            return
        for place in window.mend():
            self.views[bucket.indices[place]] = window.views[place]
        if number in self._keepers:
            if not all(memory.expired() for memory in self._keepers[number]):
                return
            del self._keepers[number]
        others = {place for place, index in enumerate(bucket.indices) if index in elsewhere} if elsewhere else ()
        if window.is_kept(_LISTS, others):
            self._leave(bucket.memory, window)
            fresh = self._allocate(bucket.indices, is_last=bucket is self.buckets[-1])
            bucket.memory, bucket.flat, bucket.tail = fresh.memory, fresh.flat, fresh.tail
            self._windows[number] = self._open(bucket)
            self._all = AllWindows(self._windows, self.views, self._addresses, _LISTS)
            self._keepers[number] = []

    def averages(self, held: Mapping[int, Tensor], stand_ins: Mapping[int, Tensor] = NO_STAND_INS) -> list[Tensor]:
        """Return the tensors to publish as gradients: each parameter's view, or a copy outside of the bucket's memory.

        For a parameter without a place in a bucket it is an empty tensor.

        A copy where the view has another dtype than the parameter, and where users keep gradients. What was there
        before backward (`held`) becomes the average itself if anybody refers to it, such as a flat buffer. `stand_ins`,
        by parameter, take the place of averages that this rank has only in part.
        """
        if self._left:
            self._free_unused()
        self._copies = {}
        if self._reduce_dtype is None and not (self._keepers or held or stand_ins):
            return self.views
        shown = list(self.views)
        if self._reduce_dtype is not None:
            self._cast(shown, stand_ins)
        for index in shared(held):
            if index not in stand_ins and _can_be_written(held[index]):
                shown[index] = held[index].copy_(shown[index])
        for number, keepers in self._keepers.items():
            indices = self.buckets[number].indices
            for index in indices:
                if shown[index] is self.views[index]:
                    shown[index] = self.views[index].clone()
            keepers[:] = [StorageWeakRef(shown[index].untyped_storage()) for index in indices]
        self._copies = {
            index: (weakref.ref(gradient), gradient.data_ptr())
            for index, gradient in enumerate(shown)
            if gradient is not self.views[index]
        }
        for index, stand_in in stand_ins.items():
            shown[index] = stand_in
        return shown

    def _cast(self, shown: list[Tensor], left_out: Collection[int]) -> None:
        """Put copies in the parameters' dtypes in place of views; each has memory of its own, as users may keep it."""
        for bucket in self.buckets:
            pairs = [(index, self._parameters[index].dtype) for index in bucket.indices if index not in left_out]
            for dtype in {dtype for _, dtype in pairs} - {bucket.flat.dtype}:
                indices = [index for index, own in pairs if own is dtype]
                views = [self.views[index] for index in indices]
                copies = [torch.empty_like(view, dtype=dtype) for view in views]
                copy_each(copies, views)  # one kernel on a GPU
                for index, copied in zip(indices, copies, strict=True):
                    shown[index] = copied

    def is_average(self, index: int, gradient: Tensor) -> bool:
        """Whether `gradient` lies where :meth:`averages` has put the parameter's average."""
        if gradient.layout is not torch.strided or index in self.unbucketed:
            return False
        if isinstance(gradient, StandIn):
            return gradient.lies_in(self.views[index])
        if index not in self._copies:
            return gradient.data_ptr() == self._addresses[index]
        shown, address = self._copies[index]
        return gradient is shown() and gradient.data_ptr() == address

    def _kind(self, index: int) -> tuple[torch.dtype, torch.device]:
        parameter = self._parameters[index]
        dtype = self._reduce_dtype if self._reduce_dtype and parameter.is_floating_point() else parameter.dtype
        return dtype, parameter.device


def _can_be_written(gradient: Tensor) -> bool:
    """Whether values can be put into `gradient`: not into a part of a graph, nor where elements share their memory."""
    expanded = any(stride == 0 and extent > 1 for stride, extent in zip(gradient.stride(), gradient.shape, strict=True))
    return not gradient.requires_grad and not expanded
