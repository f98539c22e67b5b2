"""What goes wrong on one rank is said on all, with ranks named, and the next step works where it can."""

from __future__ import annotations

import copy
import os
import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from models import Trip
from paceline.core.torch_internals import GraphTask, queue_callback
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel, local
from paceline.ddp import step as steps
from paceline.errors import CommunicationError, DesyncError, NonFiniteGradient, UsageError
from ranks import Ranks
from twins import Pools, same_gradients

TINY = 1e-4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)])

    def forward(self, x: Tensor, trip: bool = False) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if trip and index == 1:
                x = Trip.apply(x)
        return x


def make(cap: float = TINY, **options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=cap, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def data(world: World, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + world.rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def whole(world: World, step: int) -> Tensor:
    return torch.cat([data(SimpleNamespace(rank=rank), step) for rank in range(world.size)])  # type: ignore[arg-type]


def raised(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except (DesyncError, CommunicationError, NonFiniteGradient, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- ranks that differ -------------------------------------------------------------------------------------------------


def differ(world: World, how: str) -> str:
    model, optimizer = make()
    for step in range(2):
        model(data(world, step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    odd = world.rank == 1
    if how == "steps" and odd:
        optimizer.step()
    x = data(world, 5)
    if how == "weights" and odd:
        with model.weight(1):
            return raised(lambda: model(x).sum().backward())
    return raised(lambda: model(x).sum().backward())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("steps", "ranks 0, 2 have 2, rank 1 has 3 optimizer steps"),
        ("weights", "ranks 0, 2 averaged gradients computed outside model.weight()"),
    ],
)
def test_ranks_that_differ_are_named_on_every_rank(pools: Pools, how: str, said: str) -> None:
    """Other differences are in test_ddp_control.py."""
    for message in pools.run(3, differ, how):
        assert message.startswith(f"DesyncError: ranks differ: {said}")


def non_finite(world: World) -> tuple[str, str]:
    model, _ = make(check_finite=True)
    model(data(world, 0)).sum().backward()
    model.zero_grad()
    if world.rank == 1:
        model.module.layers[0].bias.register_hook(lambda gradient: gradient * float("nan"))
    first = raised(lambda: model(data(world, 1)).sum().backward())
    model.zero_grad()
    return first, raised(lambda: model(data(world, 1)).sum().backward())


def test_check_finite_names_parameter_and_rank_on_every_rank(pools: Pools) -> None:
    for first, second in pools.run(2, non_finite):
        assert first.startswith(
            "NonFiniteGradient: the gradient holds NaN or Inf on rank 1, in 'layers.0.bias' (1 of 8"
        )
        assert second == first


def propagated(world: World) -> list[bool]:
    model, _ = make()
    if world.rank == 1:
        model.module.layers[0].bias.register_hook(lambda gradient: gradient * float("nan"))
    model(data(world, 1)).sum().backward()
    spread = [bool(p.grad.isnan().any()) for p in model.parameters()]
    model.zero_grad()
    model.check_finite = True
    assert raised(lambda: model(data(world, 1)).sum().backward()).startswith("NonFiniteGradient: ")
    return spread


def test_by_default_nan_goes_to_every_rank_as_with_torch_and_the_check_may_be_turned_on(pools: Pools) -> None:
    first, second = pools.run(2, propagated)
    assert first == second
    assert sum(first) == 1


# -- an exception in backward ------------------------------------------------------------------------------------------


def trip_once(world: World, who: list[int], cap: float, weighted: bool, before: int) -> str:
    """After `before` good steps a backward trips on `who`; the next step equals one process."""
    model, optimizer = make(cap)
    message = ""
    for step in range(before + 3):
        twin = copy.deepcopy(model.module)
        twin.zero_grad()
        x, trips = data(world, step), step == before and world.rank in who

        def go(x: Tensor = x, trips: bool = trips) -> None:
            if weighted:
                with model.weight(len(x)):
                    model(x, trips).sum().backward()
            else:
                model(x, trips).sum(1).mean().backward()

        said = raised(go)
        if step == before:
            message = said
            if world.rank in who:
                assert all(parameter.grad is None for parameter in model.parameters())
        else:
            assert said == "", said
            twin(whole(world, step)).sum(1).mean().backward()
            same_gradients(model.module, twin, where=f"step {step}")
            optimizer.step()
        optimizer.zero_grad()
    return message


@pytest.mark.parametrize(
    ("cap", "weighted", "before"), [(TINY, False, 0), (TINY, True, 2), (25.0, True, 1), (25.0, False, 2)]
)
def test_an_exception_on_one_rank_is_told_to_the_others_and_the_next_step_works(
    pools: Pools, cap: float, weighted: bool, before: int
) -> None:
    results = pools.run(3, trip_once, [1], cap, weighted, before)
    assert results[1] == "ArithmeticError: tripped"
    for rank in (0, 2):
        assert results[rank].startswith(
            f"DesyncError: rank {rank}: backward was ended by an exception on rank 1, so the gradients"
        )


@pytest.mark.parametrize(("weighted", "before"), [(False, 0), (True, 2)])
def test_an_exception_on_every_rank_leaves_nothing_behind(pools: Pools, weighted: bool, before: int) -> None:
    assert pools.run(2, trip_once, [0, 1], TINY, weighted, before) == ["ArithmeticError: tripped"] * 2


def trip_while_held(world: World, who: list[int], order: str, weighted: bool) -> tuple[str, str]:
    """What a backward says that trips on `who`, and the one after it, while something holds on to the first task."""
    held: list[Any] = []  # what lives as long as the task of the backward that trips
    told: list[str] = []

    class Held(GraphTask):
        def __init__(self) -> None:
            super().__init__()
            held.append(self)

    def queue(callback: Any) -> None:
        if not told:
            held.append(callback)
        queue_callback(callback)

    holds_callbacks = patch.object(steps, "queue_callback", queue)
    with holds_callbacks if world.size > 1 else patch.object(local, "GraphTask", Held):
        model, optimizer = make()
        for step in range(3):  # the order of arrival gets known
            model(data(world, step)).sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        held.clear()

        def backward(output: Tensor, weight: int) -> None:
            with model.weight(weight) if weight else nullcontext():
                (output.sum() if weight else output.sum(1).mean()).backward()

        first, second = model(data(world, 3), world.rank in who), None
        if order == "no forward between":
            second = model(data(world, 4))
        said = raised(backward, first, 5 * weighted)
        told.append(said)
        tripped = world.rank in who
        assert bool(held) or not tripped
        second = model(data(world, 4)) if second is None else second

        def let_go(_: Tensor) -> None:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()

        if tripped:
            second.register_hook(let_go)
        optimizer.zero_grad()
        twin = copy.deepcopy(model.module)
        after = raised(backward, second, 3 * weighted)
        assert not held or not tripped
        twin(whole(world, 4)).sum(1).mean().backward()
        same_gradients(model.module, twin)
        optimizer.step()
    return said, after


@pytest.mark.parametrize(
    ("order", "weighted", "who"),
    [
        ("a forward between", True, [1]),
        ("no forward between", False, [1]),
        ("no forward between", True, [0, 1]),
    ],
)
def test_a_backward_is_not_taken_for_the_one_before_it_that_an_exception_has_ended(
    pools: Pools, order: str, who: list[int], weighted: bool
) -> None:
    """A thread of autograd may hold on to a graph task for a moment after ``backward()`` has raised its error."""
    results = pools.run(2, trip_while_held, who, order, weighted)
    for rank, (said, after) in enumerate(results):
        assert said.startswith("ArithmeticError" if rank in who else "DesyncError"), said
        assert after == ""


def test_so_it_is_in_a_world_of_one(pools: Pools) -> None:
    for order in ("a forward between", "no forward between"):
        assert pools.run(1, trip_while_held, [0], order, True) == [("ArithmeticError: tripped", "")]


def trip_in_window(world: World, who: list[int]) -> list[bool]:
    """Whether each gradient that no_sync accumulated is there after a backward that tripped before it."""
    model, optimizer = make()
    for step in range(2):
        model(data(world, step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.no_sync():
        model(data(world, 2)).sum().backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    said = raised(lambda: model(data(world, 3), world.rank in who).sum().backward())
    assert said
    kept_now = [parameter.grad for parameter in model.parameters()]
    model(data(world, 4))  # where a rank whose backward tripped takes part in what the others wait for
    if world.rank not in who:
        return []
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept_now, strict=True))
    plain = copy.deepcopy(model.module)
    for parameter, gradient in zip(plain.parameters(), kept, strict=True):
        parameter.grad = gradient.clone()
    raised(lambda: plain(data(world, 3), True).sum().backward())
    pairs = zip(model.module.parameters(), plain.parameters(), strict=True)
    return [mine.grad is not None and torch.allclose(mine.grad, other.grad) for mine, other in pairs]


def test_an_exception_keeps_what_no_sync_accumulated_as_a_plain_backward_would(pools: Pools) -> None:
    for who in ([0, 1], [1]):
        for rank, kept in enumerate(pools.run(2, trip_in_window, who)):
            assert kept == ([True] * 8 if rank in who else [])


# -- a peer that is gone -----------------------------------------------------------------------------------------------


def goes_in_mid_backward(world: World) -> tuple[str, bool]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kept = [DistributedDataParallel(net)]

    def drop(_gradient: Tensor) -> None:
        kept.clear()

    net[1].weight.register_hook(drop)
    with pytest.raises(UsageError) as caught:
        kept[0](torch.full((2, 4), 1.0 + world.rank)).square().mean().backward()
    return str(caught.value), all(parameter.grad is None for parameter in net.parameters())


def test_a_wrapper_that_goes_in_the_middle_of_its_backward_leaves_no_gradients_of_one_rank(pools: Pools) -> None:
    for said, is_clean in pools.run(2, goes_in_mid_backward):
        assert "this process group was destroyed" in said
        assert is_clean


def peer_dies(world: World) -> list[str]:
    model, optimizer = make()
    model(data(world, 0)).sum().backward()
    optimizer.zero_grad()
    if world.rank == 1:
        os._exit(7)
    said = [raised(lambda step=step: model(data(world, step)).sum().backward()) for step in (1, 2)]
    said.append(raised(model.sync_gradients))
    return said


def test_a_dead_peer_is_a_communication_error_and_so_is_further_use() -> None:
    with Ranks(2) as ranks:
        ranks.start(peer_dies)
        first, second, third = ranks.answer(0, 60)
    assert re.match(r"CommunicationError: rank 0: rank 1 \(pid \d+\) has ended in shared all_reduce", first)
    for line in (second, third):
        assert line.startswith("CommunicationError: rank 0: an earlier step of this model failed partway")
