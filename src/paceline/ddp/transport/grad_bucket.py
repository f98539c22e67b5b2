"""The bucket as a communication hook sees it: torch's ``GradBucket``, over one of our buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.core.torch_internals.distributed.ddp import GradBucket as TorchGradBucket
from paceline.ddp.options.buckets import Bucket


class GradBucket(TorchGradBucket):
    """A bucket with the interface that hooks know; a subclass, because hooks and annotations ask for torch's class.

    torch makes its own in C++ only, and the class has no constructor, so the state in C++ is missing here. Every method
    is overridden, and instances come from :meth:`of`.
    """

    @classmethod
    def of(cls, bucket: Bucket, parameters: Sequence[Tensor], number: int, *, last: bool) -> GradBucket:
        """Return the `number`-th bucket in the order of launch.

        Args:
            bucket: the reducer's bucket.
            parameters: the reducer's parameters.
            number: index of the bucket, from 0.
            last: whether no bucket follows.
        """
        made = cls.__new__(cls)
        made._bucket, made._buffer, made._number, made._last = bucket, bucket.flat, number, last
        made._parameters = [parameters[index] for index in bucket.indices]
        made._when_waited = []
        return made

    _bucket: Bucket
    _buffer: Tensor
    _parameters: list[Tensor]
    _number: int
    _last: bool
    _when_waited: list[Callable[[], None]]

    def index(self) -> int:
        """Return the bucket's number, in the order of launch."""
        return self._number

    def is_last(self) -> bool:
        """Return whether it is the last one of this backward."""
        return self._last

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket, flat; this rank's own, not divided by anything."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the tensor that :meth:`buffer` and :meth:`gradients` show."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Return, for each parameter, its part of the buffer in the parameter's shape.

        As in torch these views are contiguous; so for a parameter in channels-last memory their elements are in
        another order than the parameter's.
        """
        sizes = [view.numel() for view in self._bucket.views]
        parts = self._buffer.split(sizes)
        return [part.view(view.shape) for part, view in zip(parts, self._bucket.views, strict=True)]

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order in which their gradients lie in the buffer."""
        return list(self._parameters)

    # -- not in torch -----------------------------------------------------------------------------------------------

    def when_waited(self, function: Callable[[], None]) -> None:
        """Call `function` where the bucket is waited for, on the stream and in the thread that does so."""
        self._when_waited.append(function)

    def carry_on(self) -> None:
        """Call the functions that :meth:`when_waited` was given."""
        while self._when_waited:  # one of them may register another
            self._when_waited.pop(0)()
