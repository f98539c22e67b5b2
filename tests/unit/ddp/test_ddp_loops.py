"""Building blocks of training loops: accumulation, clipping, metrics over all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from deep import Deep
from paceline import World
from paceline.data import GlobalBatchSampler
from paceline.ddp import DistributedDataParallel, accumulate, gather_for_metrics, mean_over_ranks
from paceline.errors import UsageError
from twins import Pools

# -- accumulate --------------------------------------------------------------------------------------------------------


class AnnouncesLast:
    """A loader that announces its last batch and must not be read ahead."""

    def __init__(self, count: int) -> None:
        self.count, self.given, self.at_last = count, 0, False

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.count):
            self.given, self.at_last = batch + 1, batch == self.count - 1
            yield batch


def check_windows(world: World) -> None:
    model = DistributedDataParallel(Deep())
    for count, every, expected in (
        (5, 2, [False, True, False, True, True]),
        (4, 2, [False, True, False, True]),
        (3, 1, [True, True, True]),
        (2, 5, [False, True]),
        (0, 3, []),
    ):
        assert [model.do_sync for _ in accumulate(model, iter(range(count)), every)] == expected
        reports, seen = AnnouncesLast(count), []
        for batch in accumulate(model, reports, every):
            assert reports.given == batch + 1
            seen.append(model.do_sync)
        assert seen == expected
        assert model.do_sync
    for _ in accumulate(model, range(4), every=4):
        assert not model.require_backward_grad_sync
        break
    assert model.do_sync
    with pytest.raises(UsageError, match=r"accumulate\(every=0\)"):
        next(accumulate(model, [1], every=0))
    with model.no_sync():
        with model.no_sync():
            pass
        assert not model.do_sync
    assert model.do_sync


def test_accumulate_synchronizes_the_last_batch_of_each_window(pools: Pools) -> None:
    pools.run(1, check_windows)
    pools.run(2, check_windows)


class Counted:
    """Batches whose number may differ from the reported length, like a progress bar around a resumed loader."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length, self.given = count, length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for number in range(1, self.count + 1):
            self.given = number
            yield number


def test_sized_loaders_are_not_read_ahead(pools: Pools) -> None:
    # A progress bar around the loader was read one batch ahead, so a resumed run skipped a batch.
    assert pools.run(1, check_sized_loaders) == [None]


def check_sized_loaders(world: World) -> None:
    model = DistributedDataParallel(Deep())
    expected = [False, True, False, True, True]
    batches, seen = Counted(5, 5), []
    for batch in accumulate(model, batches, 2):
        assert batches.given == batch
        seen.append(model.do_sync)
    assert seen == expected
    assert [model.do_sync for _ in accumulate(model, iter(Counted(5, 99)), 2)] == expected
    assert [model.do_sync for _ in accumulate(model, TorchLoader(range(5)), 2)] == expected
    # A length that is too large but leaves no window open; and a guessed length, which does not count.
    assert [model.do_sync for _ in accumulate(model, Counted(4, 5), 2)] == expected[:4]
    assert [model.do_sync for _ in accumulate(model, TorchLoader(Guessed()), 2)] == expected


class Guessed(IterableDataset[int]):
    """Five samples with a reported length of four."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def leave_window_open(world: World) -> str:
    model = DistributedDataParallel(Deep())
    with pytest.raises(UsageError) as raised:
        list(accumulate(model, Counted(3, 5), 2))
    assert model.do_sync
    return str(raised.value)


def test_window_left_open_by_missing_batches_is_an_error(pools: Pools) -> None:
    for message in pools.run(2, leave_window_open):
        assert message.startswith("accumulate expected 5 batches but got 3, so the last window's gradients were not")


def close_abandoned_loop(world: World) -> list[bool]:
    model = DistributedDataParallel(Deep())
    abandoned, synchronized = accumulate(model, range(4), 4), []
    next(abandoned)
    for number in accumulate(model, range(4), 4):
        if number == 1:
            abandoned.close()
        synchronized.append(model.do_sync)
    return synchronized


def test_closing_an_abandoned_loop_does_not_affect_another(pools: Pools) -> None:
    """If one rank alone kept a reference to it, that rank synchronized in the middle of a window."""
    assert pools.run(1, close_abandoned_loop) == [[False, False, False, True]]


# -- gather_for_metrics ------------------------------------------------------------------------------------------------


def gathered(world: World, size: int, batch_size: int) -> list[tuple[Any, list[int]]]:
    sampler = GlobalBatchSampler(size, batch_size, shuffle=False)
    gathered_rows = []
    for share in sampler:
        rows = torch.tensor(share)
        value = {"rows": rows, "pair": (rows * 2, [rows.double().unsqueeze(1)])} if share else None
        result = gather_for_metrics(value)
        assert result["pair"][0].tolist() == [2 * row for row in result["rows"].tolist()]
        assert result["pair"][1][0].shape == (len(result["rows"]), 1)
        gathered_rows.append(result["rows"].tolist())
    assert gather_for_metrics(None) is None
    only = gather_for_metrics(torch.ones(2) if world.is_main else None)
    assert only.tolist() == [1, 1]
    return gathered_rows


@pytest.mark.parametrize(("size", "batch_size"), [(10, 4), (7, 3), (5, 1), (6, 6)])
def test_every_row_is_gathered_exactly_once_in_order(pools: Pools, size: int, batch_size: int) -> None:
    for ranks in (1, 3):
        for batches in pools.run(ranks, gathered, size, batch_size):
            assert list(chain(*batches)) == list(range(size))


def gather_objects(world: World) -> None:
    """Gather other objects than tensors, alone and together with tensors, in slices of different lengths."""
    for size, batch_size in ((10, 4), (5, 1)):
        texts: list[str] = []
        for share in GlobalBatchSampler(size, batch_size, shuffle=False):
            rows = {
                "text": [f"text {row}" for row in share],
                "more": (torch.tensor(share), [{"row": r} for r in share]),
            }
            for value in [rows, rows if share else None]:
                result = gather_for_metrics(value)
                assert [{"row": row} for row in result["more"][0].tolist()] == result["more"][1]
            texts += result["text"]
        assert texts == [f"text {row}" for row in range(size)]
    here = [None, {1, 2}] if world.is_main else []
    assert gather_for_metrics(here) == [None, {1, 2}]
    nested = [torch.tensor([1]), ["a"]] if world.is_main else [None, None]
    assert gather_for_metrics(nested) == [torch.tensor([1]), ["a"]]
    assert gather_for_metrics([[1], [2, 3]]) == [[1], [2, 3]] * world.size


@pytest.mark.parametrize("size", [1, 3])
def test_list_objects_are_gathered_as_rows_in_order(pools: Pools, size: int) -> None:
    pools.run(size, gather_objects)


class Pair(NamedTuple):
    rows: Tensor
    more: tuple[Tensor, list[Tensor]]


def gather_pairs(world: World) -> Any:
    rows = torch.tensor([world.rank])
    result = gather_for_metrics(Pair(rows, (rows, [rows])))
    return type(result), type(result.more), type(result.more[1]), result.rows.tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_tuples_and_namedtuples_keep_their_type_when_gathered(pools: Pools, size: int) -> None:
    assert pools.run(size, gather_pairs) == [(Pair, tuple, list, list(range(size)))] * size


def whole(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def gather_from_empty_ranks(world: World) -> None:
    """Gather from ranks without rows, represented in all ways that scripts use."""
    big = 2**53 + 1  # not representable in float32 or float64
    for empty in (torch.empty(0), torch.empty(0, dtype=torch.float64), whole(), None):
        values = [{"ids": empty, "more": (empty, [None])}, {"ids": whole(big, 2), "more": (whole(3), [whole(4)])}]
        if world.size == 3:
            values.insert(0, None)
        result = gather_for_metrics(values[world.rank])
        assert result["ids"].dtype is torch.int64
        assert result["ids"].tolist() == [big, 2]
        assert result["more"][0].tolist() == [3]
        assert result["more"][1][0].tolist() == [4]
    logits = torch.ones(2, 5) if world.is_main else torch.empty(0)
    assert gather_for_metrics([logits])[0].shape == (2, 5)
    assert gather_for_metrics((None, {"a": None})) == (None, {"a": None})
    shape = gather_for_metrics(torch.empty(0, 5) if world.is_main else torch.empty(0)).shape
    assert shape == (0, 5)
    ordered = {"a": whole(1), "b": whole(2)} if world.is_main else {"b": whole(4), "a": whole(3)}
    assert gather_for_metrics(ordered)["a"].tolist() == [1, *[3] * (world.size - 1)]
    view = torch.arange(10)[2:4]
    assert gather_for_metrics(view).tolist() == [2, 3] * world.size
    for dtype in (torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bfloat16):  # plain pickling fails for some
        gathered = gather_for_metrics(torch.tensor([1, 2]).to(dtype))
        assert gathered.dtype == dtype
        assert gathered.float().tolist() == [1, 2] * world.size
    assert mean_over_ranks(torch.tensor([3], dtype=torch.uint16)).tolist() == [3]


@pytest.mark.parametrize("size", [2, 3])
def test_rank_without_rows_does_not_change_dtype_or_structure(pools: Pools, size: int) -> None:
    pools.run(size, gather_from_empty_ranks)


ROWS = torch.ones(2)
UNEQUAL: list[tuple[Any, Any, str]] = [
    ({"a": ROWS, "b": ROWS}, {"a": ROWS}, "value has keys ['a', 'b'] on rank 0 but ['a'] on rank 1"),
    ({"a": {}}, {"a": {"b": ROWS}}, "value['a'] has keys [] on rank 0 but ['b'] on rank 1"),
    ({"a": [ROWS]}, {"a": (ROWS,)}, "value['a'] is a list on rank 0 but a tuple on rank 1"),
    ([ROWS, ROWS], [ROWS], "value has length 2 on rank 0 but 1 on rank 1"),
    ([None, ROWS], [ROWS, [ROWS]], "value[1] is a tensor on rank 0 but a list on rank 1"),
    (whole(1), ROWS, "value is torch.int64 on rank 0 but torch.float32 on rank 1"),
    (torch.ones(2, 5), torch.ones(2, 4), "value has rows of shape (5,) on rank 0 but (4,) on rank 1"),
    (ROWS, torch.tensor(1.0), "rank 1: gather_for_metrics takes tensors with rows, but value is a scalar"),
    (
        {"a": 1.5},
        {"a": ROWS},
        "rank 0: gather_for_metrics takes tensors, lists of objects, or tuples, lists and dicts of them, but "
        "value['a'] is a float; give a list with one object for each row",
    ),
    (["a"], [ROWS], "value[0] is a str on rank 0 but a tensor on rank 1"),
    (["a"], [lambda: None], "rank 1: gather_for_metrics: value cannot be pickled ("),
]


# -- mean_over_ranks ---------------------------------------------------------------------------------------------------


def check_means(world: World) -> None:
    size, rank = world.size, world.rank
    assert mean_over_ranks(float(rank)) == (size - 1) / 2
    mean = mean_over_ranks(torch.tensor([rank, 1]), weight=rank + 1)
    total = size * (size + 1) / 2
    assert mean.dtype is torch.float32
    torch.testing.assert_close(mean, torch.tensor([sum(r * (r + 1) for r in range(size)) / total, 1.0]))
    # The mean loss over all samples, computed from the means of the ranks.
    losses = torch.randn(3 * size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = losses[: rank + 1] if size == 1 else losses.split([1] * (size - 1) + [2 * size + 1])[rank]
    expected = losses[:1].mean() if size == 1 else losses.mean()
    torch.testing.assert_close(mean_over_ranks(mine.mean(), weight=len(mine)), expected)
    # A rank without samples: the mean of an empty tensor is NaN.
    for missing in (torch.empty(0).mean(), float("nan"), None, torch.ones(4)):
        for value in (2.5, torch.tensor(2.5)):
            result = mean_over_ranks(value if rank == size - 1 else missing, weight=rank == size - 1)
            assert type(result) is type(value)
            assert float(result) == 2.5
    big = 2.0**40 + 1  # not representable in float32
    assert mean_over_ranks(big, torch.tensor(3)) == big
    assert mean_over_ranks(torch.tensor(0.1, dtype=torch.bfloat16)) == torch.tensor(0.1, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch 2.11 warns in any torch.load
        assert torch.equal(mean_over_ranks(torch.eye(2).to_sparse()).to_dense(), torch.eye(2))
    assert mean_over_ranks(torch.tensor(1 + 2j), weight=1e300) == 1 + 2j
    leaf = torch.ones(2, requires_grad=True)
    assert not mean_over_ranks(leaf).requires_grad
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mean_over_ranks(torch.full((3,), 0.1 * (rank + 1)), weight=0.3 * rank + 0.1))
    assert all(torch.equal(other, everyone[0]) for other in everyone)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_mean_over_ranks_weights_each_rank(pools: Pools, size: int) -> None:
    pools.run(size, check_means)


def test_a_mean_over_ranks_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    assert mean_over_ranks(1.5, weight=4) == 1.5
    assert mean_over_ranks(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(UsageError, match="the weight is 0 on every rank"):
        mean_over_ranks(1.5, weight=0)


UNEQUAL_MEANS: list[tuple[Any, Any, str]] = [
    ((1.0,), (torch.tensor(1.0),), "value is a number on rank 0 but a tensor of shape (), torch.float32 on rank 1"),
    ((ROWS,), (torch.ones(3),), "value is a tensor of shape (2,), torch.float32 on rank 0 but a tensor of shape (3,)"),
    ((ROWS,), (ROWS.double(),), "torch.float32 on rank 0 but a tensor of shape (2,), torch.float64 on rank 1"),
    ((1.0,), ([1.0],), "rank 1: mean_over_ranks takes a number or a tensor, but value is a list"),
    ((None,), (1.0,), "rank 0: mean_over_ranks takes a number or a tensor, but value is a NoneType"),
    ((1.0, -1), (1.0, 1), "rank 0: mean_over_ranks takes a finite weight of at least 0, not -1.0"),
    ((1.0, 1), (1.0, float("nan")), "rank 1: mean_over_ranks takes a finite weight of at least 0, not nan"),
    ((1.0, "many"), (1.0, 1), "rank 0: mean_over_ranks takes a number as weight, not 'many'"),
    ((1.0, 0), (1.0, 0), "mean_over_ranks: the weight is 0 on every rank"),
]
MISMATCHES = {"rows": UNEQUAL, "means": UNEQUAL_MEANS}


def mismatched(world: World, name: str) -> list[str]:
    messages = []
    for values in MISMATCHES[name]:
        with pytest.raises(UsageError) as caught:
            gather_for_metrics(values[world.rank]) if name == "rows" else mean_over_ranks(*values[world.rank])
        messages.append(str(caught.value))
    assert gather_for_metrics(whole(world.rank)).tolist() == [0, 1]  # all ranks are still in step
    return messages


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatched_values_are_refused_on_every_rank(pools: Pools, name: str) -> None:
    """A key missing on one rank was silently dropped, and dtypes were mixed."""
    first, second = pools.run(2, mismatched, name)
    assert first == second
    for message, (_, _, expected) in zip(first, MISMATCHES[name], strict=True):
        assert expected in message
