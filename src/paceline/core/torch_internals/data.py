"""The iterators and workers of torch's ``DataLoader``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.data
import torch.utils.data.dataloader


@contextmanager
def hide_worker_info() -> Iterator[None]:
    """Make ``get_worker_info()`` return None in the block, like in the main process."""
    worker: Any = torch.utils.data._utils.worker
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def parts_of(iterator: Any) -> tuple[Any, Any, int]:
    """Return the dataset, the sampler and the number of workers of an iterator of a ``DataLoader``."""
    return iterator._dataset, iterator._index_sampler, iterator._num_workers


def pipes_of(iterator: Any) -> tuple[Any, ...]:
    """Return the workers of an iterator and its connections to them; none of them refers to the dataset."""
    return iterator._workers, iterator._index_queues, iterator._worker_result_queue, iterator._workers_done_event


BatchIterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
"""Base class of the iterators of a ``DataLoader``; its ``__next__`` waits for a batch."""
