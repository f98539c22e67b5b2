"""Promise: slices by speed or cost have the samples and the mean of one process, and all ranks split equally."""

from __future__ import annotations

import warnings
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from insides import split_by_cost, split_by_padded_cost
from paceline import World
from paceline.data import DataLoader, GlobalBatchSampler, GlobalBatchStream
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import DesyncError, UsageError
from paceline.train import TrainConfig, Trainer, predict
from real_data import real_data
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


# -- equal cost --------------------------------------------------------------------------------------------------------


costs_of_a_batch = st.lists(st.one_of(st.integers(0, 50), st.floats(0, 50)), max_size=24)
speeds = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8).map(tuple)


def padded_cost(costs: list[float], share: list[int]) -> float:
    return len(share) * max((costs[place] for place in share), default=0.0)


def summed_cost(costs: list[float], share: list[int]) -> float:
    return sum(costs[place] for place in share)


SPLITS = {"summed": (split_by_cost, summed_cost), "padded": (split_by_padded_cost, padded_cost)}
splits = pytest.mark.parametrize(("split", "cost_of"), SPLITS.values(), ids=SPLITS)


@splits
@given(costs_of_a_batch, st.integers(1, 6), st.integers(0, 3), st.none() | speeds)
@example([0, 1.9e-73], 1, 1, None)
# With such a tiny cost, an excess load was converted to -inf samples.
@example([1.0, 1.0, 1.0, 5e-324], 4, 2, (1.0, 28.0, 55.0, 14.0))
def test_every_sample_is_in_one_share_and_no_share_is_needlessly_empty(
    split: Any, cost_of: Any, costs: list[float], ranks: int, seed: int, by: tuple[float, ...] | None
) -> None:
    ranks = ranks if by is None else len(by)
    earlier_loads = [7.0 * ((seed * rank) % 5) for rank in range(ranks)] if seed else None
    shares, loads = split(costs, ranks, earlier_loads, by)
    assert sorted(place for share in shares for place in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    assert all(shares) or len(costs) < ranks
    begun = earlier_loads or [0.0] * ranks
    expected = [load + cost_of(costs, share) for load, share in zip(begun, shares, strict=True)]
    assert loads == pytest.approx(expected)


def best_load(costs: list[float], ranks: int, cost_of: Any) -> float:
    """Return the largest load of the optimal split."""
    return min(
        max(cost_of(costs, [place for place, owner in enumerate(owners) if owner == rank]) for rank in range(ranks))
        for owners in product(range(ranks), repeat=len(costs))
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_load_keeps_grahams_bound(costs: list[float], ranks: int) -> None:
    _, loads = split_by_cost(costs, ranks)
    best = best_load(costs, ranks, summed_cost)
    assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_global_batches_do_not_change(
    size: int, batch: int, ranks: int, window: int, drop_last: bool, padded: bool
) -> None:
    if drop_last and size < batch:
        return
    costs = [(7 * index) % 11 for index in range(size)]
    options: dict[str, Any] = {"drop_last": drop_last, "seed": 3}
    plain = list(GlobalBatchSampler(size, batch, rank=0, world_size=1, **options))
    samplers = [
        GlobalBatchSampler(
            size, batch, cost=costs, padded=padded, accumulate=window, rank=rank, world_size=ranks, **options
        )
        for rank in range(ranks)
    ]
    for whole, *slices in zip(plain, *samplers, strict=True):
        assert sorted(whole) == sorted(index for part in slices for index in part)
        assert all([index for index in whole if index in part] == part for part in slices), "samples were reordered"


@pytest.mark.parametrize(("consumed", "padded"), [(1, False), (2, True), (5, False)])
def test_resuming_within_a_window_splits_like_the_whole_pass(consumed: int, padded: bool) -> None:
    def sampler() -> GlobalBatchSampler:
        costs = torch.arange(40) % 7
        return GlobalBatchSampler(40, 6, cost=costs, padded=padded, accumulate=3, rank=1, world_size=3)

    whole, resumed = sampler(), sampler()
    batches = list(whole)
    resumed.set_position(consumed)
    assert list(resumed) == batches[consumed:]


def mrpc_lengths() -> list[int]:
    lines = real_data("mrpc", "msr_paraphrase_train.txt").read_text(encoding="utf-8-sig").splitlines()[1:]
    return [len(" ".join(line.split("\t")[3:]).split()) for line in lines]


def waiting(samplers: list[GlobalBatchSampler], lengths: list[int], window: int) -> float:
    """Return how much all ranks wait for the slowest one in an epoch, measured in words."""
    total, loads = 0, [0] * len(samplers)
    slices = list(zip(*samplers, strict=True))
    for number, parts in enumerate(slices, 1):
        loads = [load + sum(lengths[index] for index in part) for load, part in zip(loads, parts, strict=True)]
        if number % window == 0 or number == len(slices):
            total += sum(max(loads) - load for load in loads)
            loads = [0] * len(samplers)
    return total


@pytest.mark.parametrize(("ranks", "batch", "window"), [(2, 16, 1), (4, 8, 4)])
def test_splitting_by_cost_removes_most_waiting_on_real_sentences(ranks: int, batch: int, window: int) -> None:
    lengths = mrpc_lengths()
    even, balanced = (
        waiting(
            [
                GlobalBatchSampler(lengths, batch, rank=rank, world_size=ranks, **options)  # type: ignore[arg-type]
                for rank in range(ranks)
            ],
            lengths,
            window,
        )
        for options in ({}, {"cost": lengths, "accumulate": window})
    )
    assert balanced <= 0.3 * even, f"removed only {1 - balanced / even:.0%}"


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ([1.0, 2.0], "cost has shape (2,) for 3 samples"),
        ([1.0, float("nan"), 2.0], "the cost of sample 1 is nan"),
        (lambda sample: float("inf"), "the cost of sample 0 is inf"),
        (lambda sample: "long", "cost must be one number for each sample"),
        (lambda sample: [1, 2], "cost has shape (3, 2) for 3 samples"),
    ],
)
def test_invalid_costs_are_refused(cost: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        DataLoader(["a", "b", "c"], 2, cost=cost)
    assert message in str(caught.value)


def test_costs_need_a_dataset_and_windows_need_costs() -> None:
    with pytest.raises(UsageError, match="got a number of samples"):
        GlobalBatchSampler(3, 2, cost=len)
    with pytest.raises(UsageError, match="give cost=, or remove accumulate="):
        GlobalBatchSampler(3, 2, accumulate=2)
    with pytest.raises(UsageError, match="padded is for slices of equal cost"):
        DataLoader([1, 2], 2, padded=True)
    with pytest.raises(UsageError, match="need batch_size"):
        DataLoader([1, 2], batch_sampler=GlobalBatchSampler(2, 1), padded=True)
    with pytest.raises(UsageError, match="need batch_size"):
        DataLoader([1, 2], batch_sampler=GlobalBatchSampler(2, 1), cost=[1, 2])
