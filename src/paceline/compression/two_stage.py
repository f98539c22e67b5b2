"""Two collectives for each bucket, the second made from the first one's result, without waiting in between.

Both are launched where the hook is called, never from a callback: so their order is the same on every rank, on any
backend. The second of a bucket is launched when the hook is called for the next bucket, by which time the first has
usually come back; that of the last bucket right away::

    hook for bucket 0      1              2 (last)
         first 0     first 1, second 0    first 2, second 1, second 2
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compression.compressor import Compressor, after
from paceline.compression.gradients import Gradients

Second = Callable[[], tuple[Any, Callable[[], Tensor]]]
"""Launches the second collective; returns its work, and what gives the bucket its mean when that is finished."""


class TwoStage(Compressor):
    """A compressor whose :meth:`first` launches a collective, and returns its work and the second stage."""

    def __init__(self, model: nn.Module, process_group: Any = None) -> None:
        super().__init__(model, process_group)
        self._waiting: deque[tuple[Any, Second, torch.futures.Future[Tensor]]] = deque()

    @abstractmethod
    def first(self, gradients: Gradients) -> tuple[Any, Second]:
        """Launch the first collective."""

    def reduce(self, gradients: Gradients) -> torch.futures.Future[Tensor]:
        """Launch this bucket's first collective, and the second of the one before."""
        bucket = gradients.bucket
        if bucket.index() == 0:
            self._waiting.clear()  # of a backward that was ended by an exception
        device = gradients.flat.device
        future: torch.futures.Future[Tensor]
        future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        self._waiting.append((*self.first(gradients), future))
        while len(self._waiting) > (0 if bucket.is_last() else 1):
            self._launch_second(*self._waiting.popleft())
        return future

    def _launch_second(self, work: Any, second: Second, future: torch.futures.Future[Tensor]) -> None:
        work.wait()
        work, finish = second()

        def settle(done: Any) -> None:
            try:
                future.set_result(done.value())
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        after(work, finish).then(settle)
