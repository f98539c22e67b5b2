"""The bucket as a communication hook sees it: torch's ``GradBucket``, over one of our buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.core.state.buckets import Bucket
from paceline.core.torch_internals.distributed.ddp import GradBucket as TorchGradBucket


class GradBucket(TorchGradBucket):
    """A bucket as hooks know it. A subclass, as hooks and their annotations ask for torch's class.

    torch's can be made in C++ only and has no constructor, so none of its state is there: every method of it is
    overridden here, and instances come from :meth:`of`.
    """

    @classmethod
    def of(cls, bucket: Bucket, parameters: Sequence[Tensor], at: int, *, last: bool) -> GradBucket:
        """Bucket number `at` in the order of launch; `parameters` are the reducer's, `last` whether none follows."""
        made = cls.__new__(cls)
        made._bucket, made._buffer, made._at, made._last = bucket, bucket.flat, at, last
        made._parameters = [parameters[index] for index in bucket.indices]
        made._when_waited = []
        return made

    _bucket: Bucket
    _buffer: Tensor
    _parameters: list[Tensor]
    _at: int
    _last: bool
    _when_waited: list[Callable[[], None]]

    def index(self) -> int:
        """The bucket's number, in the order of launch."""
        return self._at

    def is_last(self) -> bool:
        """Whether it is the last one of this backward."""
        return self._last

    def buffer(self) -> Tensor:
        """All gradients of the bucket, flat; this rank's own, not divided by anything."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Let `tensor` be what :meth:`buffer` and :meth:`gradients` show."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """For each parameter, its part of the buffer in the parameter's shape.

        As in torch these views are contiguous; so for a parameter in channels-last memory their elements are in
        another order than the parameter's.
        """
        sizes = [view.numel() for view in self._bucket.views]
        parts = self._buffer.split(sizes)
        return [part.view(view.shape) for part, view in zip(parts, self._bucket.views, strict=True)]

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order in which their gradients lie in the buffer."""
        return list(self._parameters)

    # -- not in torch -----------------------------------------------------------------------------------------------

    def when_waited(self, function: Callable[[], None]) -> None:
        """Have `function` called where the bucket is waited for, on the stream and in the thread that does so."""
        self._when_waited.append(function)

    def carry_on(self) -> None:
        """Call what :meth:`when_waited` was given."""
        while self._when_waited:
            self._when_waited.pop(0)()
