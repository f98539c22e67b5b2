from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_data_loader import equal
from torch.utils.data import IterableDataset, get_worker_info

from paceline.core.world import World
from paceline.data import DataLoader, GlobalBatchStream
from paceline.errors import CheckpointMismatch, DataError, UsageError


class Shuffled(IterableDataset[torch.Tensor]):
    """A shuffled stream with noise that splits itself among workers."""

    def __init__(self, size: int = 11, bad: int | None = None) -> None:
        self.size = size
        self.bad = bad

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = random.sample(range(self.size), self.size)
        worker = get_worker_info()
        for place, index in enumerate(order if worker is None else order[worker.id :: worker.num_workers]):
            if place == self.bad:
                raise OSError("truncated file")
            yield torch.tensor([float(index), float(torch.rand(()))])


def loader_of(
    dataset: Any = None,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int = 3,
    drop_last: bool = False,
    **options: Any,
) -> DataLoader:
    dataset = Shuffled() if dataset is None else dataset
    stream = GlobalBatchStream(dataset, batch_size, drop_last=drop_last, rank=rank, world_size=world_size)
    return DataLoader(stream, **options)


def test_two_workers_give_the_same_batches_as_no_workers_in_every_epoch() -> None:
    plain, worked = loader_of(), loader_of(num_workers=2, prefetch_factor=3, persistent_workers=True)
    epochs = []
    for _ in range(3):
        ours = list(worked)
        assert equal(ours, list(plain))
        epochs.append(torch.cat(ours)[:, 0].tolist())
    assert all(sorted(seen) == list(range(11)) for seen in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_ranks_read_the_same_stream_although_their_generators_differ() -> None:
    per_rank = []
    for rank in range(4):
        random.seed(rank), torch.manual_seed(rank)
        per_rank.append(list(loader_of(rank=rank, world_size=4)))
    together = [torch.cat(shares) for shares in zip(*per_rank, strict=True)]
    assert equal(together, list(loader_of()))
    assert per_rank[3][-1].shape == (0, 2)


class SharedEpoch(Shuffled):
    """A stream whose epoch is in shared memory, as in Hugging Face ``datasets``."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        difference = epoch - int(self.epoch)
        time.sleep(0.02)
        self.epoch += difference

    def __iter__(self) -> Iterator[torch.Tensor]:
        random.seed(int(self.epoch))
        return super().__iter__()


def test_workers_setting_a_shared_epoch_concurrently_read_the_same_stream() -> None:
    """Each worker added the difference, so epochs and shuffles differed: samples came twice or never."""
    loader = loader_of(SharedEpoch(), num_workers=2, prefetch_factor=1)
    for _ in range(4):
        assert sorted(torch.cat(list(loader))[:, 0].tolist()) == list(range(11))


class Unseeded(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(os.getpid()).sample(range(40), 40))


def test_differing_worker_streams_are_refused_on_a_single_rank() -> None:
    """An unseeded shuffle differs by worker, so the 40 samples read had duplicates and gaps."""
    loader = loader_of(Unseeded(), num_workers=2)
    with pytest.raises(UsageError, match="Unseeded gave different samples in two workers before batch 1 of epoch 0"):
        list(loader)
    data: Any = Unseeded()
    data.fingerprint = "the same samples, says the user"
    assert sum(map(len, loader_of(data, num_workers=2))) == 40


@pytest.mark.parametrize(("workers", "consumed"), [(2, 1), (0, 4)])
def test_a_resumed_stream_gives_identical_batches(workers: int, consumed: int) -> None:
    whole = loader_of()
    expected = [*whole, *whole]
    first, seen = loader_of(num_workers=workers), []
    for batch in first:
        seen.append(batch)
        assert first.at_last == (len(seen) == 4)
        if len(seen) == consumed:
            break
    resumed = loader_of(num_workers=workers)
    resumed.load_state_dict(first.state_dict())
    seen += list(resumed)
    if consumed < 4:
        seen += list(resumed)
    assert equal(seen, expected)
    assert resumed.progress.epoch == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_sample_is_named_with_rank_and_worker(workers: int) -> None:
    loader = loader_of(Shuffled(bad=7), rank=1, world_size=2, num_workers=workers)
    where = "rank 1, worker 0" if workers else "rank 1"
    with pytest.raises(DataError, match=rf"{where}: sample 7 of the stream \(batch 2 of epoch 0 was due\)"):
        list(loader)


def test_a_stream_that_ended_before_the_position_is_refused() -> None:
    loader = loader_of()
    loader.progress.set_position(9)
    with pytest.raises(CheckpointMismatch, match="Shuffled ended before batch 9 of epoch 0"):
        list(loader)


def test_single_pass_iterables_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="generator is an iterator, which can be read only once"):
        GlobalBatchStream((i for i in range(3)), 2, rank=0, world_size=1)
    with pytest.raises(UsageError, match="int cannot be iterated"):
        GlobalBatchStream(3, 2, rank=0, world_size=1)  # type: ignore[arg-type]


def test_a_single_rank_may_read_a_plain_iterable_data_set() -> None:
    assert equal(list(DataLoader(Shuffled(), batch_size=3)), list(loader_of()))
    with pytest.raises(UsageError, match="no order to shuffle"):
        DataLoader(Shuffled(), batch_size=3, shuffle=True)
    with pytest.raises(UsageError, match=r"give GlobalBatchStream\(dataset, batch_size\)"):
        DataLoader(Shuffled())


@pytest.mark.ranks(2)
def test_several_ranks_may_not_read_a_plain_iterable_data_set(world: World) -> None:
    message = f"rank {world.rank}: Shuffled is an IterableDataset that is not split among 2 ranks"
    with pytest.raises(UsageError, match=message):
        DataLoader(Shuffled(), batch_size=3)
