"""Loaders of datasets and streams: the same batches with any workers, exact positions, and named failures."""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import multiprocessing.queues
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from forked import REAL_END, TIMEOUT_S, Forked, call
from insides import rng_state
from paceline import World
from paceline.data import DataLoader, GlobalBatchSampler, GlobalBatchStream
from paceline.errors import CheckpointMismatch, DataError, UsageError


class Augmented(Dataset[torch.Tensor]):
    """Samples with noise from all three random generators."""

    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class Broken(Augmented):
    def __init__(self, bad: int, kill: bool = False) -> None:
        super().__init__()
        self.bad = bad
        self.kill = kill

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("truncated file")
        return super().__getitem__(index)


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(())


def loader_of(
    dataset: Any = None, rank: int = 0, world_size: int = 1, batch_size: int = 4, **options: Any
) -> DataLoader:
    dataset = Augmented() if dataset is None else dataset
    sampler = GlobalBatchSampler(dataset, batch_size, seed=3, rank=rank, world_size=world_size)
    return DataLoader(dataset, batch_sampler=sampler, **options)


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def step() -> None:
    """Run an optimizer step on an arbitrary parameter."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()


def test_peeking_at_a_batch_does_not_consume_it() -> None:
    """``next(iter(loader))`` before training consumed the first batch, so a Trainer took 5 of 6 steps."""
    loader, expected = loader_of(num_workers=2), list(loader_of())
    for _ in range(2):
        assert equal(list(itertools.islice(loader, 5)), expected[:5])
    seen = []
    for batch in loader:
        seen.append(batch)
        step()
    assert equal(seen, expected)
    next(iter(loader))
    assert loader.progress.epoch == 1
    loader.sampler.set_epoch(1)
    assert len(list(loader)) == 6


def test_a_batch_discarded_by_zip_is_repeated() -> None:
    """zip() discarded a batch of the longer loader, which was lost for that epoch."""
    long, short = loader_of(), loader_of(Augmented(15))
    seen = []
    for _ in range(2):
        for batch, _other in zip(long, short, strict=False):
            seen.append(batch)
            step()
    assert equal(seen, list(loader_of()))
    assert short.progress.epoch == 1


def test_the_same_loader_twice_in_zip_is_refused_by_name() -> None:
    loader = loader_of()
    with pytest.raises(UsageError, match=r"another pass over the same loader or sampler has begun .*iterate once"):
        list(zip(loader, loader, strict=True))


def test_partial_loops_continue_through_the_epoch_and_restart_rewinds() -> None:
    loader = loader_of()
    seen = []
    for _ in range(3):
        for batch in itertools.islice(loader, 2):
            seen.append(batch)
            step()
    assert equal(seen, list(loader_of()))
    next(iter(loader))
    assert (loader.progress.epoch, loader.progress.position) == (1, 1)
    loader.progress.set_epoch(0)
    loader.progress.set_position(1)
    loader.progress.restart()
    assert equal(list(loader), list(loader_of()))


def test_evaluating_on_the_first_batches_uses_the_same_ones_every_time() -> None:
    """Optimizer steps between the passes belong to training, not to evaluation."""
    evaluated, trained = loader_of(), loader_of()
    passes = []
    for _batch in trained:
        step()
        passes.append(list(itertools.islice(evaluated, 2)))
    assert all(equal(one, passes[0]) for one in passes)


def test_a_state_saved_before_the_step_repeats_the_current_batch() -> None:
    """Loops that save and exit at a time limit do so while holding a batch."""
    loader = loader_of()
    for number, _batch in enumerate(loader):
        if number == 3:
            state = loader.state_dict()
            break
        step()
    assert state["position"] == 3
    resumed = loader_of()
    resumed.load_state_dict(state)
    assert equal(list(resumed), list(loader_of())[3:])


def test_leaving_the_loop_inside_a_window_requires_an_explicit_position() -> None:
    loader = loader_of()
    for number, _batch in enumerate(loader, 1):
        if number == 3:
            break
        if number == 2:
            step()
    with pytest.raises(UsageError, match=r"left after batch 3 of epoch 0, 1 batches after .*rewind"):
        next(iter(loader))
    loader.sampler.rewind()
    assert len(list(loader)) == 4
    again = loader_of()
    for number, _batch in enumerate(again, 1):
        if number == 5:
            break
        if number == 2:
            step()
    again.sampler.set_position(5)
    assert len(list(again)) == 1


def test_leaving_the_loop_at_the_last_batch_starts_the_next_epoch() -> None:
    loader = loader_of()
    for _ in loader:
        if loader.at_last:
            break
    assert (loader.progress.epoch, loader.progress.position) == (0, 6)
    assert len(list(loader)) == 6
    assert loader.progress.epoch == 2


@pytest.mark.parametrize(("workers", "drawn"), [(0, 2), (2, 1)])
def test_the_ranks_random_streams_are_unchanged(workers: int, drawn: int) -> None:
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    numpy.random.randn(drawn)  # an odd count keeps the second number of a pair
    before = rng_state()
    list(loader_of(num_workers=workers))
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    assert torch.equal(before["numpy"].pop("keys"), after["numpy"].pop("keys"))
    assert before["numpy"] == after["numpy"]


def test_augmentation_differs_by_batch_epoch_and_rank() -> None:
    loader = loader_of()
    noise = torch.cat([*loader, *loader, *loader_of(rank=1, world_size=2)])[:, 1:]
    assert len(noise.unique(dim=0)) == len(noise)
    assert all(len(noise[:, source].unique()) == len(noise) for source in range(3))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_sample_is_named_with_rank_and_worker(workers: int) -> None:
    bad = 20
    sampler = GlobalBatchSampler(23, 23, shuffle=False, rank=1, world_size=2)
    loader = DataLoader(Broken(bad), batch_sampler=sampler, num_workers=workers)
    where = "rank 1, worker 0" if workers else "rank 1"
    with pytest.raises(DataError, match=rf"{where}: sample {bad} of batch 0 of epoch 0 .*OSError: truncated") as caught:
        list(loader)
    assert "truncated file" in str(caught.value.__cause__)
    assert loader.progress.position == 0
    # Check while the traceback keeps the iterator alive: the garbage collector would close the workers' pipes first.
    assert not [child for child in multiprocessing.active_children() if child.daemon]


# Killed workers leave garbage behind, such as a queue closed under its feeder thread, so each of these tests runs in a
# separate process.


def lost_to_itself() -> str:
    sampler = GlobalBatchSampler(23, 4, shuffle=False, rank=0, world_size=1)
    with pytest.raises(DataError) as caught:
        list(DataLoader(Broken(5, kill=True), batch_sampler=sampler, num_workers=2))
    return str(caught.value)


def lost_to_a_signal(ending: int, elsewhere: bool) -> str:
    def train() -> None:
        for number, _ in enumerate(loader_of(num_workers=2, batch_size=2)):
            if number == 1:
                os.kill(multiprocessing.active_children()[0].pid or 0, ending)
                until = time.monotonic() + 20
                while elsewhere and time.monotonic() < until:
                    time.sleep(0.01)

    with pytest.raises(DataError) as caught:
        train()
    return str(caught.value)


@pytest.mark.parametrize(
    ("ending", "elsewhere", "said", "cause"),
    [
        (signal.SIGKILL, True, "killed by SIGKILL", "memory ran out"),
        (signal.SIGBUS, False, "killed by SIGBUS", "shared memory ran out; enlarge /dev/shm"),
        (signal.SIGSEGV, True, "killed by SIGSEGV", "num_workers=0"),
    ],
)
def test_a_worker_killed_at_any_time_is_named(ending: signal.Signals, elsewhere: bool, said: str, cause: str) -> None:
    """torch raises wherever the main thread is, in the step or the loader, or a batch cannot be opened."""
    message = call(lost_to_a_signal, ending, elsewhere)
    assert re.match(rf"rank 0: DataLoader worker \d \(pid \d+, {said}\) died .*{cause}", message)


def lost_at_the_start() -> str:
    put = multiprocessing.queues.Queue.put

    def slowly(queue: Any, *arguments: Any) -> None:
        put(queue, *arguments)
        time.sleep(0.2)  # gives the worker time to take the batch that kills it

    with patch.object(multiprocessing.queues.Queue, "put", slowly):
        return lost_to_itself()


def test_a_worker_that_dies_before_all_workers_started_is_named() -> None:
    """On a busy machine torch's own error, without rank and worker, was raised."""
    said = call(lost_at_the_start)
    assert re.match(r"rank 0: DataLoader worker 1 \(pid \d+, killed by SIGKILL\) died before batch 0 of epoch 0", said)


def dropped_in_a_cycle() -> list[int]:
    gc.collect()
    gc.disable()
    alive = []
    for persistent, reads_all in ((True, True), (True, False), (False, False)):
        holder: Any = argparse.Namespace()
        holder.loader = loader_of(num_workers=2, prefetch_factor=1, persistent_workers=persistent)
        holder.batches = iter(holder.loader)
        holder.itself = holder
        seen = list(holder.batches) if reads_all else next(holder.batches)
        assert len(seen)
        del holder
        gc.collect()
        alive.append(len(multiprocessing.active_children()))
    return alive


def test_workers_of_a_loader_dropped_in_a_reference_cycle_exit() -> None:
    """The garbage collector had closed their pipes: the rank blocked for 20 s, and the workers lived on."""
    assert call(dropped_in_a_cycle) == [0, 0, 0]


def test_sampler_set_epoch_and_batch_size_work_as_in_torch() -> None:
    """``loader.sampler.set_epoch(epoch)`` is in every tutorial, even if the sampler is unused."""
    plain = DataLoader(torch.arange(20), batch_size=8, shuffle=True, drop_last=True)
    ours = DataLoader(torch.arange(20), batch_size=8, shuffle=True, drop_last=True)
    assert (ours.batch_size, ours.drop_last) == (8, True)
    for epoch in range(3):
        ours.sampler.set_epoch(epoch)
        assert equal(list(ours), list(plain))
    ours.sampler.set_epoch(0)
    again = DataLoader(torch.arange(20), batch_size=8, shuffle=True, drop_last=True)
    assert equal(list(ours), list(again))
    given = DataLoader(torch.arange(20), batch_sampler=GlobalBatchSampler(20, 5, rank=1, world_size=2))
    assert given.batch_size == 5
    assert given.sampler is given.batch_sampler
    with pytest.raises(ValueError, match="batch_size"):
        given.batch_size = 3


def test_moving_the_position_inside_the_loop_is_refused() -> None:
    loader = loader_of()
    batches = iter(loader)
    next(batches)
    loader.progress.advance()
    with pytest.raises(UsageError, match="moved from epoch 0, batch 1 to epoch 0, batch 2 during a pass"):
        next(batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "batch_sampler must be a GlobalBatchSampler, not nothing"),
        ({"batch_sampler": [[0]]}, "not a list"),
        ({"batch_size": 2, "sampler": [0]}, "takes no sampler="),
        ({"batch_size": 2, "generator": None}, "takes no generator="),
        ({"shuffle": True}, "need batch_size"),
        ({"batch_size": 2, "batch_sampler": GlobalBatchSampler(23, 2, rank=0, world_size=1)}, "give it only there"),
        ({"batch_sampler": GlobalBatchSampler(9, 2, rank=0, world_size=1)}, "for 9 samples but the dataset has 23"),
    ],
)
def test_incompatible_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DataLoader(Augmented(), **options)


@pytest.mark.slow
def test_accelerate_cannot_split_the_slices_again() -> None:
    """On two ranks, its loader gave rank 0 no batches and rank 1 half of the samples, without a message."""
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(UsageError, match=r"accelerator.prepare\(\) was given a paceline.data.DataLoader"):
        accelerate.Accelerator(cpu=True).prepare(loader_of(TensorDataset(torch.arange(8))))


def test_numpy_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    loader = loader_of(TensorDataset(torch.arange(8)), collate_fn=len)
    assert list(loader) == [4, 4]


ALIVE_AT_EXIT = """
import torch
from paceline.data import DataLoader
data = torch.utils.data.TensorDataset(torch.arange(10.))
"""
LIVE = {
    "in a generator": "it = (row for row in DataLoader(data, batch_size=2, num_workers=2)); next(it)",
    "kept": "loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True); list(loader)",
    "error": "it = iter(DataLoader(data, batch_size=2, num_workers=2)); next(it); raise SystemExit(3)",
}


@pytest.mark.slow
@pytest.mark.parametrize("live", LIVE)
def test_an_iterator_alive_at_exit_prints_nothing_and_does_not_block(tmp_path: Path, live: str) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    program = Forked(["-c", ALIVE_AT_EXIT + LIVE[live]], tmp_path, {**os.environ, REAL_END: "1"}, out, err)
    assert program.wait(TIMEOUT_S) == (3 if live == "error" else 0)
    # nanobind's messages come from Triton, which ships with torch 2.15 for CUDA and is loaded in the fork server.
    said = re.sub(r"nanobind: leaked .*?refleaks\.html\n?", "", err.read_text(), flags=re.DOTALL)
    assert (out.read_text(), said) == ("", "")


# -- streams -----------------------------------------------------------------------------------------------------------


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


def stream_loader(dataset: Any = None, rank: int = 0, world_size: int = 1, **options: Any) -> DataLoader:
    dataset = Shuffled() if dataset is None else dataset
    return DataLoader(GlobalBatchStream(dataset, 3, rank=rank, world_size=world_size), **options)


either_loader = pytest.mark.parametrize("make", [loader_of, stream_loader], ids=["dataset", "stream"])


@either_loader
@pytest.mark.parametrize("persistent", [False, True])
def test_two_workers_give_the_same_batches_as_no_workers_in_every_epoch(make: Any, persistent: bool) -> None:
    plain = make(collate_fn=noisy_collate)
    worked = make(collate_fn=noisy_collate, num_workers=2, prefetch_factor=4, persistent_workers=persistent)
    epochs = []
    for _ in range(3):
        ours = list(worked)
        assert equal(ours, list(plain))
        epochs.append(torch.cat(ours)[:, 0].floor().tolist())
    assert all(sorted(seen) == list(range(len(epochs[0]))) for seen in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@either_loader
@pytest.mark.parametrize(("workers", "is_finished"), [(2, False), (0, True)])
def test_a_resumed_pass_gives_identical_batches(make: Any, workers: int, is_finished: bool) -> None:
    whole = make()
    expected = [*whole, *whole]
    first, seen = make(num_workers=workers), []
    for batch in first:
        seen.append(batch)
        assert first.at_last == (len(seen) == len(expected) // 2)
        if first.at_last or not is_finished:
            break
    resumed = make(num_workers=workers)
    resumed.load_state_dict(first.state_dict())
    torch.manual_seed(99)
    while len(seen) < len(expected):
        seen += list(resumed)
    assert equal(seen, expected)
    assert resumed.progress.epoch == 2


def test_ranks_read_the_same_stream_although_their_generators_differ() -> None:
    per_rank = []
    for rank in range(4):
        random.seed(rank), torch.manual_seed(rank)
        per_rank.append(list(stream_loader(rank=rank, world_size=4)))
    together = [torch.cat(shares) for shares in zip(*per_rank, strict=True)]
    assert equal(together, list(stream_loader()))
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
    loader = stream_loader(SharedEpoch(), num_workers=2, prefetch_factor=1)
    for _ in range(4):
        assert sorted(torch.cat(list(loader))[:, 0].tolist()) == list(range(11))


class Unseeded(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(os.getpid()).sample(range(40), 40))


def test_differing_worker_streams_are_refused_on_a_single_rank() -> None:
    """An unseeded shuffle differs by worker, so the 40 samples read had duplicates and gaps."""
    loader = stream_loader(Unseeded(), num_workers=2)
    with pytest.raises(UsageError, match="Unseeded gave different samples in two workers before batch 1 of epoch 0"):
        list(loader)
    data: Any = Unseeded()
    data.fingerprint = "the same samples, says the user"
    assert sum(map(len, stream_loader(data, num_workers=2))) == 40


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_sample_of_a_stream_is_named(workers: int) -> None:
    loader = stream_loader(Shuffled(bad=7), rank=1, world_size=2, num_workers=workers)
    where = "rank 1, worker 0" if workers else "rank 1"
    with pytest.raises(DataError, match=rf"{where}: sample 7 of the stream \(batch 2 of epoch 0 was due\)"):
        list(loader)


def test_a_stream_that_ended_before_the_position_is_refused() -> None:
    loader = stream_loader()
    loader.progress.set_position(9)
    with pytest.raises(CheckpointMismatch, match="Shuffled ended before batch 9 of epoch 0"):
        list(loader)


def test_single_pass_iterables_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="generator is an iterator, which can be read only once"):
        GlobalBatchStream((i for i in range(3)), 2, rank=0, world_size=1)
    with pytest.raises(UsageError, match="int cannot be iterated"):
        GlobalBatchStream(3, 2, rank=0, world_size=1)  # type: ignore[arg-type]


def test_a_single_rank_may_read_a_plain_iterable_data_set() -> None:
    assert equal(list(DataLoader(Shuffled(), batch_size=3)), list(stream_loader()))
    with pytest.raises(UsageError, match="no order to shuffle"):
        DataLoader(Shuffled(), batch_size=3, shuffle=True)
    with pytest.raises(UsageError, match=r"give GlobalBatchStream\(dataset, batch_size\)"):
        DataLoader(Shuffled())
    with pytest.raises(UsageError, match="cannot shuffle a GlobalBatchStream"):
        DataLoader(GlobalBatchStream(Shuffled(), 3), shuffle=True)


@pytest.mark.ranks(2)
def test_several_ranks_may_not_read_a_plain_iterable_data_set(world: World) -> None:
    message = f"rank {world.rank}: Shuffled is an IterableDataset that is not split among 2 ranks"
    with pytest.raises(UsageError, match=message):
        DataLoader(Shuffled(), batch_size=3)
