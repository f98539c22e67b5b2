"""One step as the data flows: overlap, where gradients live, and what loops need beside the wrapper."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.data import GlobalBatchSampler
from paceline.ddp import DistributedDataParallel, accumulate, clip_grad_norm_, gather_for_metrics
from paceline.errors import UsageError, WorldError
from paceline.events import Recorder
from paceline.world import World
from twins import Pools, same_gradients

TINY = 1e-4


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as pools:
        yield pools


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4, dtype=torch.float64) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def data(rank: int, step: int, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 4, generator=generator, dtype=torch.float64)


# -- overlap and memory ------------------------------------------------------------------------------------------------


def launched_before_the_last_gradient(world: World) -> list[tuple[int, int]]:
    """Per step: launches before the first layer's gradient arrived, and all launches."""
    recorder = Recorder(on=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY, recorder=recorder)
    counts = []
    for step in range(4):
        recorder.spans.clear()
        arrived: list[float] = []
        x = data(world.rank, step)
        hook = model.module.layers[0].weight.register_hook(
            lambda _, arrived=arrived: arrived.append(time.perf_counter())
        )
        model(x).sum().backward()
        hook.remove()
        launches = [span for span in recorder.spans if span.label == "launch"]
        counts.append((sum(span.end <= arrived[0] for span in launches), len(launches)))
        model.zero_grad()
    assert model.exposed_seconds > 0
    assert model.gradient_bytes_per_step == 6 * 20 * 8
    return counts


def test_buckets_are_launched_while_backward_runs_from_the_first_step_on(pools: Pools) -> None:
    for counts in pools.run(2, launched_before_the_last_gradient):
        for early, total in counts:
            assert total >= 4
            assert early >= total - 2


def where_gradients_live(world: World) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY)
    for step in range(4):
        model(data(world.rank, step)).sum().backward()
        flats = [bucket.flat for bucket in model._reducer.storage.buckets]
        inside = [range(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in flats]
        assert all(any(p.grad.data_ptr() in memory for memory in inside) for p in model.parameters())
        assert sum(p.grad.nbytes for p in model.parameters()) == sum(flat.nbytes for flat in flats)
        model.zero_grad(set_to_none=step % 2 == 0)


def test_between_steps_gradients_exist_once_in_the_buckets(pools: Pools) -> None:
    pools.run(2, where_gradients_live)


def hooks_left(world: World) -> list[int]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY)
    counts = []
    for step in range(3):
        model(data(world.rank, step)).sum().backward()
        counts.append(sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters()))
        model.zero_grad()
    assert counts[-1] == len(model.bucket_layout())
    return counts


def test_once_the_order_is_known_one_hook_a_bucket_is_left(pools: Pools) -> None:
    for first, second, third in pools.run(2, hooks_left):
        assert first == 12
        assert second == third < 12


# -- accumulate --------------------------------------------------------------------------------------------------------


class Reports:
    """A loader that says itself when it gives its last batch, and must not be asked ahead."""

    def __init__(self, count: int) -> None:
        self.count, self.given, self.at_last = count, 0, False

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.count):
            self.given, self.at_last = batch + 1, batch == self.count - 1
            yield batch


def windows(world: World) -> None:
    model = DistributedDataParallel(Deep())
    for count, every, expected in (
        (5, 2, [False, True, False, True, True]),
        (4, 2, [False, True, False, True]),
        (3, 1, [True, True, True]),
        (2, 5, [False, True]),
        (0, 3, []),
    ):
        assert [model.do_sync for _ in accumulate(model, iter(range(count)), every)] == expected
        reports, seen = Reports(count), []
        for batch in accumulate(model, reports, every):
            assert reports.given == batch + 1
            seen.append(model.do_sync)
        assert seen == expected
        assert model.do_sync
    for _ in accumulate(model, range(4), every=4):
        assert not model.require_backward_grad_sync
        with pytest.raises(UsageError, match="before the gradients were synchronized"):
            clip_grad_norm_(model, 1.0)
        break
    assert model.do_sync
    with pytest.raises(UsageError, match=r"accumulate\(every=0\)"):
        next(accumulate(model, [1], every=0))
    with model.no_sync():
        with model.no_sync():
            pass
        assert not model.do_sync
    assert model.do_sync


def test_accumulate_synchronizes_the_last_of_each_window_and_of_all(pools: Pools) -> None:
    pools.run(1, windows)
    pools.run(2, windows)


def clipped(world: World, norm_type: float) -> None:
    torch.manual_seed(0)
    module = Deep()
    twin = copy.deepcopy(module)
    model = DistributedDataParallel(module, bucket_cap_mb=TINY)
    model(data(world.rank, 0)).sum(1).mean().backward()
    twin(torch.cat([data(rank, 0) for rank in range(world.size)])).sum(1).mean().backward()
    norm = clip_grad_norm_(model, 0.1, norm_type)
    other = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1, norm_type)
    torch.testing.assert_close(norm, other, rtol=1e-12, atol=0)
    same_gradients(module, twin)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 10.0, norm_type).item(), 0.1, rtol=1e-4, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_equals_one_process(pools: Pools, norm_type: float) -> None:
    pools.run(3, clipped, norm_type)


# -- gather_for_metrics ------------------------------------------------------------------------------------------------


def gathered(world: World, size: int, batch_size: int) -> list[tuple[Any, list[int]]]:
    sampler = GlobalBatchSampler(size, batch_size, shuffle=False)
    found = []
    for share in sampler:
        rows = torch.tensor(share)
        value = {"rows": rows, "pair": (rows * 2, [rows.double().unsqueeze(1)])} if share else None
        result = gather_for_metrics(value)
        assert result["pair"][0].tolist() == [2 * row for row in result["rows"].tolist()]
        assert result["pair"][1][0].shape == (len(result["rows"]), 1)
        found.append(result["rows"].tolist())
    assert gather_for_metrics(None) is None
    only = gather_for_metrics(torch.ones(2) if world.is_main else None)
    assert only.tolist() == [1, 1]
    return found


@pytest.mark.parametrize(("size", "batch_size"), [(10, 4), (7, 3), (5, 1), (6, 6)])
def test_every_row_is_gathered_exactly_once_in_order(pools: Pools, size: int, batch_size: int) -> None:
    for ranks in (1, 3):
        for found in pools.run(ranks, gathered, size, batch_size):
            assert list(chain(*found)) == list(range(size))


@pytest.mark.parametrize("value", [torch.tensor(1.0), 3, "text", {"a": 1.5}])
def test_only_tensors_with_rows_are_gathered(value: Any) -> None:
    with pytest.raises(UsageError, match="gather_for_metrics takes tensors"):
        gather_for_metrics(value)


# -- the world's own collectives ---------------------------------------------------------------------------------------


def main_first(world: World, path: str) -> str:
    with world.main_first() as is_main:
        if is_main:
            open(path, "w").write("made")  # noqa: SIM115
        content = open(path).read()  # noqa: SIM115
    assert is_main == world.is_main
    try:
        with world.main_first() as is_main:
            assert is_main, "no other rank comes here"
            raise KeyError("no cache")
    except (KeyError, WorldError) as error:
        return f"{content} {type(error).__name__}: {error}"
    return "nothing raised"


def test_main_first_fails_on_all_if_it_fails_on_rank_0(pools: Pools, tmp_path: Any) -> None:
    first, *others = pools.run(3, main_first, str(tmp_path / "cache"))
    assert first == "made KeyError: 'no cache'"
    for rank, message in enumerate(others, start=1):
        assert message.startswith(f"made WorldError: rank {rank}: the main_first block failed on rank 0 (KeyError: ")
