"""Promise: slices by speed or cost have the samples and the mean of one process, and all ranks split equally."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.world import World
from paceline.data import DataLoader, GlobalBatchStream
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import DesyncError
from paceline.train import TrainConfig, Trainer, predict
from trainings import Stream
from twins import Pools


class Samples(torch.utils.data.Dataset[Any]):
    """Sequences of uneven length with their indices."""

    def __init__(self, count: int = 46) -> None:
        generator = torch.Generator().manual_seed(5)
        self.parts = [
            torch.randn(1 + 5 * index % 9, 4, dtype=torch.float64, generator=generator) for index in range(count)
        ]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.parts[index]


def length_of(sample: tuple[int, Tensor]) -> int:
    return len(sample[1])


def make_model() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double())
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def loss_of(model: nn.Module, batch: list[tuple[int, Tensor]], reduction: str) -> Tensor:
    losses = torch.stack([model(sample).square().mean() for _, sample in batch])
    return losses.sum() if reduction == "sum" else losses.mean() * len(losses)


def train_batch(model: DistributedDataParallel, batch: Any, reduction: str = "sum") -> None:
    if batch is None:
        if model.do_sync:
            model.sync_gradients()
        return
    with model.weight(len(batch)):
        loss_of(model, batch, reduction).backward()


def train(
    world: World, window: int, reduction: str, options: dict[str, Any], samples: int = 46, stream: bool = False
) -> tuple[Any, list[Any]]:
    """Train for two epochs in batches of 8 with a short last one; return weights and samples."""
    model, optimizer = make_model()
    if stream:
        loader = DataLoader(GlobalBatchStream(Stream(Samples()), 8, **options), collate_fn=list, num_workers=1)
    else:
        loader = DataLoader(Samples(samples), 8, shuffle=True, collate_fn=list, **options)
    taken = []
    warnings.filterwarnings("ignore", "rank . *.*an empty batch cannot be made", UserWarning)
    for _ in range(2):
        for batch in accumulate(model, loader, window):
            taken.append([index for index, _ in batch or ()])
            train_batch(model, batch, reduction)
            if model.do_sync:
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()], taken


@pytest.mark.parametrize(
    ("ranks", "window", "reduction", "options"),
    [
        (4, 4, "mean", {"speed": [3, 1, 1, 0.5]}),
        (4, 4, "sum", {"speed": [3, 1, 1, 0.5], "cost": length_of, "accumulate": 4}),
        (2, 2, "mean", {"cost": length_of, "padded": True, "accumulate": 2}),
        (2, 1, "sum", {"speed": [2, 1], "cost": length_of, "padded": True, "num_workers": 1}),
    ],
)
def test_training_equals_one_process_with_each_sample_once(
    pools: Pools, ranks: int, window: int, reduction: str, options: dict[str, Any]
) -> None:
    expected, whole = pools.run(1, train, window, "sum", {})[0]
    results = pools.run(ranks, train, window, reduction, options)
    for parameters, _ in results:
        torch.testing.assert_close(parameters, expected, rtol=1e-11, atol=1e-13)
    for batch, *slices in zip(whole, *(taken for _, taken in results), strict=True):
        assert Counter(batch) == Counter(index for part in slices for index in part)
        assert all(slices), "a rank has no sample"
    counts = [sum(map(len, taken)) for _, taken in results]
    assert len(set(counts)) > 1
    if "padded" not in options:  # with padding, one rank gets the few expensive samples
        assert counts[0] > counts[-1] * 1.5, counts


def test_stream_is_split_by_speed(pools: Pools) -> None:
    expected, whole = pools.run(1, train, 1, "sum", {}, 46, True)[0]
    results = pools.run(2, train, 1, "sum", {"speed": [2, 1]}, 46, True)
    assert [len(batch) for batch in results[0][1]] == [5, 5, 5, 5, 5, 4] * 2
    for parameters, _ in results:
        torch.testing.assert_close(parameters, expected, rtol=1e-11, atol=1e-13)
    for batch, *slices in zip(whole, *(taken for _, taken in results), strict=True):
        assert batch == [index for part in slices for index in part]


def test_fastest_ranks_take_a_last_batch_too_short_for_all(pools: Pools) -> None:
    expected, _ = pools.run(1, train, 1, "sum", {}, 11)[0]
    results = pools.run(4, train, 1, "sum", {"speed": [1, 3, 2, 1]}, 11)
    assert [[len(batch) for batch in taken] for _, taken in results] == [[1, 1] * 2, [4, 1] * 2, [2, 1] * 2, [1, 0] * 2]
    for parameters, _ in results:
        torch.testing.assert_close(parameters, expected, rtol=1e-11, atol=1e-13)


# -- mistakes --------------------------------------------------------------------------------------------------------


def train_with_different_splits(world: World, options: list[dict[str, Any]]) -> str:
    model, _ = make_model()
    try:
        for batch in DataLoader(Samples(), 8, collate_fn=list, **options[world.rank]):
            train_batch(model, batch)
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([{"speed": [1, 2]}, {"speed": [1, 3]}], "speed="),
        ([{}, {"speed": [1, 1]}], "speed="),
        ([{"cost": [1 + (index + rank) % 3 for index in range(46)]} for rank in range(2)], "order"),
    ],
)
def test_ranks_that_split_differently_are_refused_before_a_step(
    pools: Pools, options: list[dict[str, Any]], expected: str
) -> None:
    assert all(expected in message for message in pools.run(2, train_with_different_splits, options))


def train_without_weights(world: World, options: dict[str, Any]) -> list[str]:
    """Return the warnings of training without weights."""
    model, optimizer = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in DataLoader(Samples(), 8, collate_fn=list, **options):
            loss_of(model, batch, "mean").backward()
            optimizer.step()
    # Since Python 3.12, forking a worker in a process with threads gives a warning.
    return [str(warning.message) for warning in caught if not issubclass(warning.category, DeprecationWarning)]


@pytest.mark.parametrize("options", [{"speed": [2, 1]}, {"cost": length_of, "num_workers": 1}])
def test_missing_weights_are_reported_once(pools: Pools, options: dict[str, Any]) -> None:
    first, second = pools.run(2, train_without_weights, options)
    assert len(first) == 1
    assert "model.weight(len(batch))" in first[0]
    assert second == []
    assert pools.run(1, train_without_weights, {"cost": length_of}) == [[]], "a single process needs no weights"


# -- with the Trainer ------------------------------------------------------------------------------------------------


def train_with_trainer(world: World, speed: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Linear(4, 1).double())
    data = torch.utils.data.TensorDataset(
        torch.randn(46, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(data, 8, shuffle=True, speed=speed)
    trainer = Trainer(module, optimizer, summed, loader, TrainConfig(epochs=2, accumulate=2))
    trainer.fit()
    rows = predict(trainer.model, DataLoader(data, 8, speed=speed))
    stream = predict(trainer.model, DataLoader(GlobalBatchStream(Stream(data), 8, speed=speed)))
    torch.testing.assert_close(stream, rows, rtol=0, atol=0)
    return [parameter.detach().clone() for parameter in module.parameters()], rows


def summed(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def test_trainer_and_predict_support_slices_by_speed(pools: Pools) -> None:
    expected, rows = pools.run(1, train_with_trainer, None)[0]
    for parameters, rank_rows in pools.run(2, train_with_trainer, [1, 3]):
        torch.testing.assert_close(parameters, expected, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(rank_rows, rows, rtol=1e-11, atol=1e-13)
