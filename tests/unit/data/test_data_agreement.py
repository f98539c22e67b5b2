"""Ranks with different data, or a different order, are reported by name before the first step.

Each rank slices its own view of the global batch. With a different order, seed or shard, some samples were silently
used twice and others never.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler
from torch.utils.data import DataLoader as TorchLoader

from insides import outline_digest
from paceline import World, set_seed
from paceline.data import DataLoader, GlobalBatchSampler, GlobalBatchStream
from paceline.ddp import DistributedDataParallel
from paceline.errors import CheckpointMismatch, DesyncError, UsageError
from paceline.train import Evaluation, TrainConfig, Trainer
from twins import Pools

SAMPLES = 16


class Files(Dataset[Any]):
    """A dataset of file names."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        self.cache[index] = self.names[index]
        return torch.tensor([float(self.names[index].rpartition("/")[2])])


class Labeled(Files):
    """Files whose labels are numbered in set order, which depends on the rank's hash seed."""

    def __init__(self, rank: int) -> None:
        super().__init__([str(index) for index in range(SAMPLES)])
        classes = ["cat", "dog", "mouse"] if rank == 0 else ["mouse", "cat", "dog"]
        self.classes = {label: at for at, label in enumerate(classes)}


class RankDependent(IterableDataset[Any]):
    """A stream that is not the same on every rank."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank = how, rank

    def __iter__(self) -> Any:
        if self.how == "split by rank":
            return iter(torch.arange(16.0).view(-1, 1)[self.rank :: 2])
        return iter(torch.randperm(16, generator=torch.Generator().manual_seed(self.rank)).float().view(-1, 1))


def rank_dependent(how: str) -> tuple[Callable[[int], Any], str]:
    said = r"as the digest of the stream's samples; usually the dataset splits itself by rank"
    return lambda rank: DataLoader(GlobalBatchStream(RankDependent(how, rank), 4)), said


def points(size: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(float(size)).view(-1, 1))


def weighted(rank: int, **options: Any) -> DataLoader:
    def order(epoch: int) -> list[int]:
        return list(WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False, **options))

    return DataLoader(points(), batch_sampler=GlobalBatchSampler(points(), 4, order=order))


def own_generator(rank: int) -> DataLoader:
    return weighted(rank, generator=torch.Generator().manual_seed(rank))


SEEDS = "rank 0 has 0, rank 1 has 1 as the loader's seed"
DISAGREEMENTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "seed": (lambda rank: DataLoader(points(), 4, True, seed=rank), SEEDS),
    "seed of a sampler in torch's loader": (
        lambda rank: TorchLoader(points(), batch_sampler=GlobalBatchSampler(points(), 4, seed=rank)),
        SEEDS,
    ),
    "order": (own_generator, r"as the digest of the epoch's order; usually order= draws from a generator"),
    "length": (lambda rank: DataLoader(points(SAMPLES + rank), 4), r"rank 0 has 16, rank 1 has 17 samples in the data"),
    "batch size": (lambda rank: DataLoader(points(), 4 + rank), "as the global batch size"),
    "shuffle": (lambda rank: DataLoader(points(), 4, bool(rank)), "digest of the epoch's order"),
    "drop_last": (lambda rank: DataLoader(points(), 4, drop_last=bool(rank)), "as drop_last"),
    "shard of tensors": (
        lambda rank: DataLoader(TensorDataset(torch.arange(32.0).view(-1, 1)[rank::2]), 4),
        "as the digest of the dataset; usually the script has split it by rank",
    ),
    "concatenation": (
        lambda rank: DataLoader(ConcatDataset([points(), Subset(points(32), range(rank, 32, 2))]), 4),
        "as the digest of the dataset",
    ),
    "files": (
        lambda rank: DataLoader(Files([f"/data/{index}" for index in range(rank, 32, 2)]), 4),
        "as the digest of the dataset",
    ),
    "labels in set order": (lambda rank: DataLoader(Labeled(rank), 4), "as the digest of the dataset"),
    "stream split by rank": rank_dependent("split by rank"),
    "stream with a shuffle of its own": rank_dependent("its own shuffle"),
    "a batch ahead": (lambda rank: ahead(DataLoader(points(), 4), 1 - rank), "2, rank 1 has 1 batches taken from the"),
    "epoch": (lambda rank: moved(DataLoader(points(), 4), rank), "as the loader's epoch"),
    "slices": (lambda rank: DataLoader(Files(["1", "2"] * 8), 4).in_slices(2 << rank), "digest of the epoch's order"),
}


def ahead(loader: DataLoader, batches: int) -> DataLoader:
    loader.sampler.set_position(batches)
    return loader


def moved(loader: DataLoader, epoch: int) -> DataLoader:
    loader.sampler.set_epoch(epoch)
    return loader


def train(loader: Any, epochs: int = 1) -> list[float]:
    """Train in a plain loop; return this rank's samples."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[float] = []
    for _ in range(epochs):
        for batch in loader:
            x = batch[0] if isinstance(batch, list | tuple) else batch
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            seen += x.flatten().tolist()
    return seen


def error_of(function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(*arguments)
    except (DesyncError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def disagree(world: World, kind: str) -> str:
    return error_of(train, DISAGREEMENTS[kind][0](world.rank))


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_differing_data_raises_on_every_rank_in_the_first_step(pools: Pools, kind: str) -> None:
    errors = pools.run(2, disagree, kind)
    assert errors[0] == errors[1]
    assert errors[0].startswith("DesyncError: ranks differ in their data: rank 0 has ")
    assert re.search(DISAGREEMENTS[kind][1], errors[0])


def train_weighted(world: World) -> list[float]:
    set_seed(3)  # generators differ by rank from here
    return train(weighted(world.rank), 2)


def test_an_order_drawn_from_the_global_generators_is_the_same_on_every_rank(pools: Pools) -> None:
    """``order=lambda epoch: list(WeightedRandomSampler(…))``, which a refusal recommends, visited 12 of 16 samples."""
    seen = [sample for samples in pools.run(2, train_weighted) for sample in samples]
    assert sorted(seen) == sorted([float(index) for index in range(SAMPLES)] * 2)


def batches_of_torch(world: World, kind: str) -> Any:
    """Return the batches of a script written without ranks in mind, or of a correct one."""
    data, seeded = points(), torch.Generator().manual_seed(5)
    if kind == "constant":
        return [[torch.ones(2, 1)]] * 2
    if kind == "torch's sampler":
        sampler: Any = torch.utils.data.DistributedSampler(data, world.size, world.rank)
        return TorchLoader(data, 4, sampler=sampler)
    if kind == "our loader":
        return DataLoader(TensorDataset(torch.tensor([[1.0], [2.0]] * 8)), 4)
    return TorchLoader(data, 4, shuffle=True, generator=seeded)


def warned(world: World, kind: str) -> list[str]:
    model = DistributedDataParallel(nn.Linear(1, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for (x,) in batches_of_torch(world, kind):
                model(x).sum().backward()
    return [f"{Path(warning.filename).name}: {warning.message}" for warning in caught]


@pytest.mark.parametrize("kind", ["torch's loader", "constant", "torch's sampler", "our loader"])
def test_reading_the_same_samples_on_every_rank_warns_once(pools: Pools, kind: str) -> None:
    """With torch's DataLoader on every rank, a common pitfall, N ranks silently did the work of one."""
    on_rank_0, on_rank_1 = pools.run(2, warned, kind)
    assert on_rank_1 == []
    if kind == "torch's loader":
        (message,) = on_rank_0
        assert message.startswith("test_data_agreement.py: the inputs of the first forward are the same on all 2 ranks")
    else:
        assert on_rank_0 == []


def peek_on_rank_0(world: World) -> tuple[list[float], int]:
    loader = DataLoader(points(), 4, True, seed=5, num_workers=1)
    others = DataLoader(points(), 4, seed=world.rank)  # used on rank 0 only
    if world.rank == 0:
        next(iter(loader))
        next(iter(others))
    model = DistributedDataParallel(nn.Linear(1, 1))
    seen: list[float] = []
    for epoch in range(2):
        for number, (x,) in enumerate(loader):
            model(x).sum().backward()
            seen += x.flatten().tolist()
            if world.rank == 0 and number == epoch:
                next(iter(others))
    return seen, loader.progress.epoch


def test_peeking_at_a_batch_on_one_rank_has_no_side_effects(pools: Pools) -> None:
    """Peeking neither waits for other ranks nor moves the position, and a loader used on one rank is not compared."""
    results = pools.run(2, peek_on_rank_0)
    assert sorted(sample for seen, _ in results for sample in seen) == sorted([*range(SAMPLES)] * 2)
    assert [epoch for _, epoch in results] == [2, 2]


class Growing(Dataset[Any]):
    def __init__(self) -> None:
        self.values = list(range(6))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.values[index])])


def train_on_more(world: World, grown: int) -> list[list[float]]:
    data = Growing()
    loader = DataLoader(data, 4, True)
    seen = [train(loader)]
    data.values += range(6, 6 + grown)
    assert len(loader) == -(-len(data) // 4)
    state = loader.state_dict()
    seen.append(train(loader))
    data.values[:] = data.values[:3]
    seen.append(train(loader))
    with pytest.raises(CheckpointMismatch, match="size was"):
        loader.load_state_dict(state)
    data.values += range(3, 6 + grown)
    loader.load_state_dict(state)
    seen.append(train(loader))
    return seen


def test_a_data_set_that_changed_size_is_read_completely_in_the_next_epoch(pools: Pools) -> None:
    """The loader kept the initial length, so new samples were never read."""
    epochs = zip(*pools.run(2, train_on_more, 5), strict=True)
    read = [sorted(sample for share in shares for sample in share) for shares in epochs]
    assert read == [[*range(6)], [*range(11)], [*range(3)], [*range(11)]]


def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    return model(batch[0]).sum(), len(batch[0])


def measured(module: nn.Module, batch: Any) -> tuple[dict[str, torch.Tensor], int]:
    return {"mean": batch[0].sum()}, len(batch[0])


def through_trainer(world: World) -> str:
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shard = TensorDataset(torch.arange(32.0).view(-1, 1)[world.rank :: 2])
    evaluation = Evaluation(DataLoader(shard, 4), measured, ("mean",))
    config = TrainConfig(epochs=1)
    return error_of(lambda: Trainer(model, optimizer, summed, DataLoader(points(), 4), config, evaluation).fit())


def test_the_trainer_compares_the_data_set_of_its_evaluation(pools: Pools) -> None:
    """Without a backward pass, an evaluation must compare the data itself."""
    for error in pools.run(2, through_trainer):
        assert "as the digest of the dataset" in error


def test_the_digest_detects_different_shards_but_allows_rank_dependent_state() -> None:
    names = [f"/here/{index}" for index in range(8)]
    moved_folder = Files([name.replace("here", "there") for name in names])
    assert outline_digest(Files(names)) == outline_digest(moved_folder)
    filled = Files(names)
    for index in (0, 1):
        filled[index]
    assert outline_digest(Files(names)) == outline_digest(filled)
    assert outline_digest(Files(names)) != outline_digest(Files(names[::-1]))
