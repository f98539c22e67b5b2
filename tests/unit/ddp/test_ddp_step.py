"""One step: overlap of backward and collectives, the memory of gradients, closures, and requests to stop."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from deep import TINY, Deep, data
from insides import GRADIENT, TEST_HOST_CHANNEL, recorder, storage_of
from models import chain
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError, WorldError
from ranks import Ranks
from twins import Pools

# -- overlap and memory ------------------------------------------------------------------------------------------------


def launched_before_the_last_gradient(world: World) -> list[tuple[int, int]]:
    """Return per step the number of launches before the first layer's gradient, and of all launches."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY)
    counts = []
    for step in range(4):
        recorder.spans.clear()
        arrived: list[float] = []
        x = data(world.rank, step)
        hook = model.module.layers[0].weight.register_hook(
            lambda _, arrived=arrived: arrived.append(time.perf_counter())
        )
        with patch.multiple(recorder, on=True):
            model(x).sum().backward()
        hook.remove()
        launches = [span for span in recorder.spans if span.label == "launch"]
        counts.append((sum(span.end <= arrived[0] for span in launches), len(launches)))
        model.zero_grad()
    assert model.exposed_seconds > 0
    assert model.gradient_bytes_per_step == 6 * 20 * 8
    return counts


def test_buckets_overlap_backward_from_the_first_step(pools: Pools) -> None:
    for counts in pools.run(2, launched_before_the_last_gradient):
        for early, total in counts:
            assert total >= 4
            assert early >= total - 2


def marked_gradients(world: World) -> list[list[int]]:
    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY)
    marked = []
    for step in range(4):
        recorder.spans.clear()
        with patch.multiple(recorder, on=True, detailed=step % 2 == 1):
            model(data(world.rank, step)).sum().backward()
        marked.append(sorted(span.bucket for span in recorder.spans if span.label == GRADIENT))
        model.zero_grad()
    return marked


def test_detailed_recorder_records_every_gradient(pools: Pools) -> None:
    for plain, first, _, second in pools.run(2, marked_gradients):
        assert plain == []
        assert first == second == [*range(12)]


def where_gradients_live(world: World) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Deep(), bucket_cap_mb=TINY)
    for step in range(4):
        model(data(world.rank, step)).sum().backward()
        flats = [bucket.flat for bucket in storage_of(model).buckets]
        inside = [range(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in flats]
        assert all(any(p.grad.data_ptr() in memory for memory in inside) for p in model.parameters())
        assert sum(p.grad.nbytes for p in model.parameters()) == sum(flat.nbytes for flat in flats)
        model.zero_grad(set_to_none=step % 2 == 0)


def test_gradients_exist_only_in_the_buckets_between_steps(pools: Pools) -> None:
    pools.run(2, where_gradients_live)


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


# -- closures ----------------------------------------------------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: uses the gradient at weights moved along the previous gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        moves = [0.05 * parameter.grad for parameter in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move)
        self.base.step()


class IgnoresItsClosure(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


def net() -> nn.Module:
    return chain(3, 4, 1, dtype=torch.float64)


def batches(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield global batches and this rank's part of each."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        whole = torch.randn(4 * world.size, 3, generator=generator, dtype=torch.float64)
        yield whole, whole.chunk(world.size)[world.rank]


def check_equal(model: nn.Module, twin: nn.Module) -> None:
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def last_micro_batch_in_the_closure(world: World, weighted: bool, by_keyword: bool) -> None:
    model, twin = DistributedDataParallel(net()), net()
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, twin))

    def backward(x: Tensor) -> Any:
        if weighted:
            with model.weight(len(x)):
                (loss := model(x).square().sum()).backward()
        else:
            (loss := model(x).square().mean() / 2).backward()
        return loss

    for whole, x in batches(world):
        first, last = x.chunk(2)
        with model.no_sync():
            backward(first)
        closure: Any = partial(backward, last)
        loss = ours.step(closure=closure) if by_keyword else ours.step(closure)
        assert loss is not None
        twin(whole).square().mean().backward()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    check_equal(model, twin)


@pytest.mark.parametrize(("weighted", "by_keyword"), [(False, True), (True, False)])
def test_the_last_micro_batch_may_run_inside_the_closure(ranks: Ranks, weighted: bool, by_keyword: bool) -> None:
    """Lightning's loop does this; the step used to be refused before the closure ran."""
    ranks.run(last_micro_batch_in_the_closure, weighted, by_keyword)


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def sharpness_aware(world: World) -> int:
    model, twin = DistributedDataParallel(net()), net()
    ours, theirs = Sam(model.parameters()), Sam(twin.parameters())
    for whole, x in batches(world):
        with model.no_sync():  # on the whole batch, so that all ranks move their weights equally
            backward(model, whole)
        ours.step(partial(backward, model, x))
        backward(twin, whole)
        theirs.step(partial(backward, twin, whole))
        ours.zero_grad()
        theirs.zero_grad()
    check_equal(model, twin)
    return model._replica.ledger.status.optimizer_steps


def test_sharpness_aware_minimization_equals_one_process(ranks: Ranks) -> None:
    assert ranks.run(sharpness_aware) == [4] * ranks.size


def local_after_synchronized(world: World) -> str:
    model, (_, x) = DistributedDataParallel(net()), next(batches(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, x)
    with model.no_sync():
        backward(model, x)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_step_after_a_local_backward_is_refused(pools: Pools) -> None:
    for message in pools.run(2, local_after_synchronized):
        assert "ran under no_sync()" in message


def local_gradients_after_the_closure(world: World, make: Callable[..., torch.optim.Optimizer]) -> str:
    model = DistributedDataParallel(net())
    _, x = next(batches(world))
    optimizer = make(model.parameters(), lr=0.1)
    weights = [parameter.clone() for parameter in model.parameters()]
    with model.no_sync():
        model(x).sum().backward()

        def closure() -> Any:
            model(x).sum().backward()

        with pytest.raises(UsageError) as caught:
            optimizer.step(closure)
    if make is torch.optim.SGD:
        assert all(map(torch.equal, model.parameters(), weights)), "the step was taken"
    return str(caught.value)


@pytest.mark.parametrize("make", [torch.optim.SGD, IgnoresItsClosure])
def test_closure_without_a_synchronized_backward_is_refused(ranks: Ranks, make: Any) -> None:
    for message in ranks.run(local_gradients_after_the_closure, make):
        assert "optimizer.step(closure) found gradients" in message


# -- requests to stop --------------------------------------------------------------------------------------------------


def train_until_asked(world: World, asker: int, at: int, weighted: bool, kind: str) -> list[bool]:
    """Train 6 steps; rank `asker` asks to stop after step `at`. Return `stop_agreed` after each step."""
    with patch.dict(os.environ, {TEST_HOST_CHANNEL: "always"} if kind == "read late" else {}):
        model = DistributedDataParallel(chain(4, 8, 2))
    if kind == "copy":
        model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agreed = []
    for step in range(1, 7):
        if weighted:
            with model.weight(2):
                model(torch.ones(2, 4)).sum().backward()
            assert model.total_weight == 2 * world.size
        else:
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        agreed.append(model.stop_agreed)
        if world.rank == asker and step == at:
            model.ask_to_stop()
            agreed[-1] = agreed[-1] or model.stop_agreed
    return agreed


@pytest.mark.parametrize(
    ("size", "asker", "weighted", "kind"),
    [(1, 0, False, "wrapper"), (2, 1, False, "copy"), (2, 1, True, "read late"), (3, 0, True, "wrapper")],
)
def test_stop_request_reaches_all_ranks(pools: Pools, size: int, asker: int, weighted: bool, kind: str) -> None:
    for at in (1, 4):
        for agreed in pools.run(size, train_until_asked, asker, at, weighted, kind):
            assert agreed == [step > at for step in range(1, 7)]


def local_and_late(world: World) -> list[bool]:
    model = DistributedDataParallel(chain(4, 8, 2))
    if world.rank == 0:
        model.ask_to_stop()
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    early = model.stop_agreed
    model.sync_gradients()
    return [early, model.stop_agreed]


@pytest.mark.parametrize("size", [1, 2])
def test_stop_request_travels_with_the_next_synchronization(pools: Pools, size: int) -> None:
    assert pools.run(size, local_and_late) == [[False, True]] * size
