"""All buckets of a wrapper: where each parameter's gradient lies, and in which order buckets are launched."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.buckets import Bucket, assign
from paceline.ddp.channel import Channel
from paceline.errors import CheckpointMismatch


class BucketSet:
    """Buckets for `parameters`, first assigned in reverse order, which is about that of backward.

    Args:
        names: the parameters' names.
        parameters: in the module's order.
        capacities: bytes of the first, second, … bucket; see :func:`paceline.buckets.assign`.
        channel: allocates the buckets.
        outside: indices of parameters that get no place in a bucket.
        reduce_dtype: of the buckets of real parameters; None for each parameter's own.
    """

    views: list[Tensor]
    """For each parameter, its place in a bucket, shaped like its gradient; empty for those outside."""
    outside: frozenset[int]
    """Parameters that have no place in a bucket."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        capacities: Sequence[int],
        channel: Channel,
        outside: frozenset[int] = frozenset(),
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.outside = outside
        self._names, self._parameters, self._capacities, self._channel = names, parameters, capacities, channel
        self._reduce_dtype = reduce_dtype
        self._cast: dict[int, weakref.ref[Tensor]] = {}
        self.buckets: list[Bucket] = []
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
        """Make the buckets anew for parameters that arrive in `order`."""
        kinds = [self._kind(index) for index in range(len(self._parameters))]
        inside = [index for index in order if index not in self.outside]
        sizes = [p.numel() * dtype.itemsize for p, (dtype, _) in zip(self._parameters, kinds, strict=True)]
        self._use(assign(sizes, kinds, inside, self._capacities))

    def use_parameters(self, names: Sequence[str], parameters: Sequence[nn.Parameter], outside: frozenset[int]) -> None:
        """Make the buckets anew for other parameters; gradients that lie in the old ones move along."""
        self._names, self._parameters, self.outside = names, parameters, outside
        self._cast = {}
        self.assign_in(range(len(parameters) - 1, -1, -1))

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
        inside = sorted(name for index, name in enumerate(self._names) if index not in self.outside)
        if held != inside or any(len({self._kind(index) for index in part}) != 1 for part in indices):
            raise CheckpointMismatch(
                f"the bucket layout holds {len(held)} parameters in a way that does not fit this model of "
                f"{len(self._names)}; load it into the model it was saved from"
            )
        self._use(indices)

    def _use(self, layout: list[list[int]]) -> None:
        """Allocate buckets for `layout`; gradients that lie in the old ones move along."""
        before = self.buckets
        old = {id(view) for bucket in before for view in bucket.views}
        self.buckets = [
            Bucket.allocate(indices, self._parameters, self._channel.allocate, self._kind(indices[0])[0])
            for indices in layout
        ]
        self.views = [torch.empty(0)] * len(self._parameters)
        for bucket in self.buckets:
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                self.views[index] = view
                gradient = self._parameters[index].grad
                if gradient is not None and id(gradient) in old:
                    self._parameters[index].grad = view.copy_(gradient)

        for bucket in before:
            self._channel.free(bucket.flat)

    def averages(self) -> Sequence[Tensor]:
        """What to show as each parameter's gradient: its view, or a copy in its own dtype if the view has another."""
        if self._reduce_dtype is None:
            return self.views
        shown = [view.to(p.dtype) for view, p in zip(self.views, self._parameters, strict=True)]
        # Weak, as a gradient's memory goes when the user drops it.
        self._cast = {
            index: weakref.ref(gradient) for index, gradient in enumerate(shown) if gradient is not self.views[index]
        }
        return shown

    def is_average(self, index: int, gradient: Tensor) -> bool:
        """Whether `gradient` is what :meth:`averages` gave for the parameter."""
        shown = self._cast[index]() if index in self._cast else self.views[index]
        return gradient is shown

    def _kind(self, index: int) -> tuple[torch.dtype, torch.device]:
        parameter = self._parameters[index]
        dtype = self._reduce_dtype if self._reduce_dtype and parameter.is_floating_point() else parameter.dtype
        return dtype, parameter.device
