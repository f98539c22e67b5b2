"""The order in which the buckets of a compressor go through their stages, on a stream of their own.

A stage ends with a collective, which is waited for before the next stage. Every hook call begins a bucket and takes the
earlier ones a stage further, without waiting in between where the device queues its operations::

    hook for bucket 0      1                   2                        at the end
         first 0     first 1, second 0   first 2, second 1, end of 0    second 2, end of 1 and 2

All of it is done where the hook is called, or where the bucket is waited for, never in a callback: so the order of
collectives is the same on every rank, on any backend, and no tensor is used on a stream that no one knows of. In
torch's DDP, which says nothing before it waits, a bucket goes through all stages in its own hook call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.core.state.device_streams import SideStream, is_queued

Stages: TypeAlias = Generator[Any, None, Tensor]
"""Yields each collective that it launches, is run on when that has been waited for, and returns the bucket's buffer."""


class Promise(torch.futures.Future[Tensor]):
    """The future of a bucket's buffer. To wait for it is to carry the bucket to its end."""

    def __init__(self, device: torch.device, finish: Callable[[], None]) -> None:
        super().__init__(devices=None if device.type == "cpu" else [device])
        self._finish = finish

    def wait(self) -> Tensor:
        """Carry the bucket to its end; returns its buffer."""
        self._finish()
        return super().wait()


class Reduction:
    """One bucket on its way through the stages; the first is done at once.

    Args:
        stages: its stages; none has begun.
        collectives: how many collectives they launch.
        side: the stream on which they run.
        device: that of the bucket.
        finish: carries a reduction to its end.
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
        # The collectives that are still to be launched, and the one under way.
        self._to_launch = collectives - 1
        with side.entered():
            self._work = next(stages)

    @property
    def launches(self) -> bool:
        """Whether its next stage launches a collective, which all ranks have to do in the same order."""
        return self._to_launch > 0

    @property
    def is_ready(self) -> bool:
        """Whether its next stage can be done without waiting."""
        done: bool = self._work.is_completed()
        return done

    @torch.no_grad()
    def advance(self) -> None:
        """Wait for the collective under way, and do the next stage."""
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
        except Exception as error:
            self.is_finished, self._to_launch = True, 0
            self.future.set_exception(error)  # type: ignore[arg-type]


class Pipeline:
    """Takes the buckets of one compressor through their stages; each stage launches `collectives`."""

    def __init__(self, collectives: int) -> None:
        self._collectives = collectives
        # In the order of their buckets.
        self._under_way: list[Reduction] = []
        self._sides: dict[torch.device, SideStream] = {}

    def enter(self, bucket: Any, device: torch.device, stages: Stages) -> Promise:
        """Begin with a ``GradBucket`` on `device`, and go on with the earlier ones."""
        if bucket.index() == 0:
            self._under_way.clear()  # of a backward that was ended by an exception
        if device not in self._sides:
            self._sides[device] = SideStream(device)
        reduction = Reduction(stages, self._collectives, self._sides[device], device, self._finish)
        # Finished ones are there where somebody has waited for the last bucket inside his hook.
        earlier = [other for other in self._under_way if not other.is_finished]
        for other in earlier:
            if is_queued(device) or other.launches or other.is_ready:
                other.advance()
        self._under_way = [*(other for other in earlier if not other.is_finished), reduction]
        when_waited = getattr(bucket, "when_waited", None)
        if when_waited is not None and not is_queued(device):
            when_waited(partial(self._finish, reduction))
        elif when_waited is None or bucket.is_last():
            # torch's DDP waits for futures without asking us, and a hook may send its last bucket elsewhere.
            for other in self._under_way:
                self._finish(other)
        return reduction.future

    def _finish(self, reduction: Reduction) -> None:
        """Carry one to its end, once every collective of all is launched, in the order of buckets."""
        for other in self._under_way:
            while other.launches:
                other.advance()
        while not reduction.is_finished:
            reduction.advance()
