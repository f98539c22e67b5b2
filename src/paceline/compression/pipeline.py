"""The stages of a compressor's buckets, their order, and the stream that they run on.

Every stage but the last launches a collective, and the next stage waits for it. Every hook call begins a bucket and
advances the earlier ones by one stage, without waiting in between if the device queues its operations::

    hook for bucket 0      1                   2                        at the end
         first 0     first 1, second 0   first 2, second 1, end of 0    second 2, end of 1 and 2

Everything runs in a hook call or in the wait for a bucket, never in a callback. So with any backend, the order of
collectives is the same on every rank, and no tensor is used on a stream that the allocator does not know. torch's DDP
does not report when it waits, so there a bucket passes through all stages in its hook call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.core.device_streams import SideStream, is_queued
from paceline.core.flat_views import shaped_like
from paceline.errors import UsageError


@dataclass
class Gradients:
    """A bucket's gradients as flat real numbers, of at least single precision, and each parameter's part of them."""

    flat: Tensor
    """The bucket's memory, which the hook may overwrite, if its dtype is float32 or float64; otherwise a copy."""
    names: list[str]
    views: list[Tensor]
    """Views of `flat` with each parameter's shape and strides; for a complex parameter, with a last dimension of 2."""
    bucket: Any

    @classmethod
    def of(cls, bucket: Any, names: Mapping[int, str]) -> Gradients:
        """Read a ``GradBucket``; `names` maps the ``id`` of each parameter to its name."""
        parameters = bucket.parameters()
        if any(id(parameter) not in names for parameter in parameters):
            raise UsageError(
                "the communication hook got a gradient of a parameter that its state does not know; create the state "
                "from the model that it is registered with"
            )
        flat = _reals(bucket.buffer())
        if flat.dtype not in (torch.float32, torch.float64):  # half precision would round small residuals away
            flat = flat.float()
        return cls(flat, [names[id(parameter)] for parameter in parameters], views_of(flat, parameters), bucket)

    @property
    def bytes_uncompressed(self) -> int:
        """Size of the bucket without compression, in bytes."""
        return int(self.bucket.buffer().nbytes)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Split `flat`, a tensor like :attr:`flat`, into one view per parameter."""
        return views_of(flat, self.bucket.parameters())

    def write(self, mean: Tensor) -> Tensor:
        """Write `mean`, a tensor like :attr:`flat`, into the bucket; returns the bucket's buffer."""
        buffer: Tensor = self.bucket.buffer()
        _reals(buffer).copy_(mean)
        return buffer


def views_of(flat: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Split `flat`, which holds the parameters' values as real numbers, into one view per parameter."""
    complex_flat = torch.view_as_complex(flat.view(-1, 2)) if any(p.is_complex() for p in parameters) else flat
    pieces = complex_flat.split([parameter.numel() for parameter in parameters])
    shaped = [shaped_like(parameter, piece) for parameter, piece in zip(parameters, pieces, strict=True)]
    return [torch.view_as_real(view) if view.is_complex() else view for view in shaped]


def _reals(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


Stages: TypeAlias = Generator[Any, None, Tensor]
"""Generator that yields each collective it launches, resumes when it has finished, and returns the bucket's buffer."""


class Promise(torch.futures.Future[Tensor]):
    """The future of a bucket's buffer. Waiting for it completes the bucket."""

    def __init__(self, device: torch.device, finish: Callable[[], None]) -> None:
        super().__init__(devices=None if device.type == "cpu" else [device])
        self._finish = finish

    def wait(self) -> Tensor:
        """Complete the bucket; returns its buffer."""
        self._finish()
        return super().wait()


class Reduction:
    """One bucket passing through its stages; the constructor runs the first stage.

    Args:
        stages: the bucket's stages, none of them started.
        collectives: the number of collectives that the stages launch.
        side: the stream that runs the stages.
        device: the bucket's device.
        finish: function that completes a reduction.
    """

    def __init__(
        self,
        stages: Stages,
        collectives: int,
        side: SideStream,
        device: torch.device,
        finish: Callable[[Reduction], None],
    ) -> None:
        self._stages, self._side = stages, side
        self.future = Promise(device, partial(finish, self))
        self.is_finished = False
        self._to_launch = collectives - 1
        """Number of collectives not launched yet."""
        with side.entered():
            self._work = next(stages)

    @property
    def launches(self) -> bool:
        """Whether the next stage launches a collective; the order of collectives must be the same on all ranks."""
        return self._to_launch > 0

    @property
    def is_ready(self) -> bool:
        """Whether the next stage can run without waiting."""
        is_completed: bool = self._work.is_completed()
        return is_completed

    @torch.no_grad()
    def advance(self) -> None:
        """Wait for the collective under way, and run the next stage."""
        try:
            with self._side.entered():
                self._work.wait()
                try:
                    self._work = next(self._stages)
                except StopIteration as end:
                    self.is_finished = True
                    self.future.set_result(end.value)
                else:
                    self._to_launch -= 1
        # The wrapper raises the error when it waits for the bucket, as for any other hook.
        except Exception as error:
            self.is_finished, self._to_launch = True, 0
            self.future.set_exception(error)  # type: ignore[arg-type]


class Pipeline:
    """Takes one compressor's buckets through their stages, which launch `collectives` collectives per bucket."""

    def __init__(self, collectives: int) -> None:
        self._collectives = collectives
        self._under_way: list[Reduction] = []
        """Unfinished reductions, in the order of their buckets."""
        self._sides: dict[torch.device, SideStream] = {}

    def enter(self, bucket: Any, device: torch.device, stages: Stages) -> Promise:
        """Start a ``GradBucket`` on `device`, and advance the earlier buckets."""
        if bucket.index() == 0:
            self._under_way.clear()  # left over from a backward pass that raised an exception
        if device not in self._sides:
            self._sides[device] = SideStream(device)
        reduction = Reduction(stages, self._collectives, self._sides[device], device, self._finish)
        # Some are finished if a hook around this one has waited for its bucket.
        earlier = [other for other in self._under_way if not other.is_finished]
        for other in earlier:
            # A reduction whose next stage launches a collective advances here on every rank, even if it has to wait:
            # whether it is ready may differ between ranks, but the order of collectives must not.
            if is_queued(device) or other.launches or other.is_ready:
                other.advance()
        self._under_way = [*(other for other in earlier if not other.is_finished), reduction]
        when_waited = getattr(bucket, "when_waited", None)
        if when_waited is not None and not is_queued(device):
            when_waited(partial(self._finish, reduction))
        elif when_waited is None or bucket.is_last():
            # torch's DDP does not call our wait(), and a hook around this one may handle its last bucket differently.
            for other in self._under_way:
                self._finish(other)
        return reduction.future

    def _finish(self, reduction: Reduction) -> None:
        """Complete a reduction, after all reductions have launched their collectives in bucket order."""
        for other in self._under_way:
            while other.launches:
                other.advance()
        while not reduction.is_finished:
            reduction.advance()
