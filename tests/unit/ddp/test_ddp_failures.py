"""A failure on one rank is reported on all ranks by name, and training can continue where possible."""

from __future__ import annotations

import copy
import os
import re
import threading
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from deep import TINY, data
from insides import GraphTask, local, queue_callback
from insides import reducer as steps
from models import Trip
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import CommunicationError, DesyncError, NonFiniteGradient, UsageError
from ranks import Ranks
from twins import Pools, same_gradients


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


def whole(world: World, step: int) -> Tensor:
    return torch.cat([data(rank, step) for rank in range(world.size)])


def error_of(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except (DesyncError, CommunicationError, NonFiniteGradient, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- ranks that differ -------------------------------------------------------------------------------------------------


def non_finite(world: World, is_enabled_later: bool) -> tuple[str, str]:
    model, _ = make(check_finite=not is_enabled_later)
    model(data(world.rank, 0)).sum().backward()
    model.zero_grad()
    model.check_finite = True
    if world.rank == 1:
        model.module.layers[0].bias.register_hook(lambda gradient: gradient * float("nan"))
    first = error_of(lambda: model(data(world.rank, 1)).sum().backward())
    model.zero_grad()
    return first, error_of(lambda: model(data(world.rank, 1)).sum().backward())


@pytest.mark.parametrize("is_enabled_later", [False, True])
def test_check_finite_names_parameter_and_rank_on_every_rank(pools: Pools, is_enabled_later: bool) -> None:
    for first, second in pools.run(2, non_finite, is_enabled_later):
        assert first.startswith(
            "NonFiniteGradient: the gradient holds NaN or Inf on rank 1, in 'layers.0.bias' (1 of 8"
        )
        assert second == first


# -- an exception in backward ------------------------------------------------------------------------------------------


def trip_once(world: World, failing: list[int], cap: float, weighted: bool, good_steps: int) -> str:
    """Fail in the backward after `before` good steps on the ranks `who`; the next step equals one process."""
    model, optimizer = make(cap)
    message = ""
    for step in range(good_steps + 3):
        twin = copy.deepcopy(model.module)
        twin.zero_grad()
        x, trips = data(world.rank, step), step == good_steps and world.rank in failing

        def run_backward(x: Tensor = x, trips: bool = trips) -> None:
            if weighted:
                with model.weight(len(x)):
                    model(x, trips).sum().backward()
            else:
                model(x, trips).sum(1).mean().backward()

        error = error_of(run_backward)
        if step == good_steps:
            message = error
            if world.rank in failing:
                assert all(parameter.grad is None for parameter in model.parameters())
            if len(failing) == world.size:
                model.load_bucket_layout(model.bucket_layout()[::-1])  # as another checkpoint does
        else:
            assert error == "", error
            twin(whole(world, step)).sum(1).mean().backward()
            same_gradients(model.module, twin, where=f"step {step}")
            optimizer.step()
        optimizer.zero_grad()
    return message


@pytest.mark.parametrize(
    ("cap", "weighted", "good_steps"), [(TINY, False, 0), (TINY, True, 2), (25.0, True, 1), (25.0, False, 2)]
)
def test_exception_on_one_rank_reaches_the_others_and_the_next_step_works(
    pools: Pools, cap: float, weighted: bool, good_steps: int
) -> None:
    results = pools.run(3, trip_once, [1], cap, weighted, good_steps)
    assert results[1] == "ArithmeticError: tripped"
    for rank in (0, 2):
        assert results[rank].startswith(
            f"DesyncError: rank {rank}: backward was ended by an exception on rank 1, so the gradients"
        )


@pytest.mark.parametrize(("weighted", "good_steps"), [(False, 0), (True, 2)])
def test_exception_on_every_rank_leaves_no_state_behind(pools: Pools, weighted: bool, good_steps: int) -> None:
    assert pools.run(2, trip_once, [0, 1], TINY, weighted, good_steps) == ["ArithmeticError: tripped"] * 2


def trip_while_held(world: World, failing: list[int], order: str, weighted: bool) -> tuple[str, str]:
    """Return the errors of a backward that fails on `who` and of the next one, while the first graph task is alive."""
    held: list[Any] = []  # objects that live as long as the failed backward's graph task
    errors: list[str] = []

    class Held(GraphTask):
        def __init__(self) -> None:
            super().__init__()
            held.append(self)

    def queue(callback: Any) -> None:
        if not errors:
            held.append(callback)
        queue_callback(callback)

    holds_callbacks = patch.object(steps, "queue_callback", queue)
    with holds_callbacks if world.size > 1 else patch.object(local, "GraphTask", Held):
        model, optimizer = make()
        for step in range(3):  # the order of arrival becomes known
            model(data(world.rank, step)).sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        held.clear()

        def backward(output: Tensor, weight: int) -> None:
            with model.weight(weight) if weight else nullcontext():
                (output.sum() if weight else output.sum(1).mean()).backward()

        first, second = model(data(world.rank, 3), world.rank in failing), None
        if order == "no forward between":
            second = model(data(world.rank, 4))
        error = error_of(backward, first, 5 * weighted)
        errors.append(error)
        tripped = world.rank in failing
        assert bool(held) or not tripped
        second = model(data(world.rank, 4)) if second is None else second

        def let_go(_: Tensor) -> None:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()

        if tripped:
            second.register_hook(let_go)
        optimizer.zero_grad()
        twin = copy.deepcopy(model.module)
        after = error_of(backward, second, 3 * weighted)
        assert not held or not tripped
        twin(whole(world, 4)).sum(1).mean().backward()
        same_gradients(model.module, twin)
        optimizer.step()
    return error, after


@pytest.mark.parametrize(
    ("order", "weighted", "failing"),
    [
        ("a forward between", True, [1]),
        ("no forward between", False, [1]),
        ("no forward between", True, [0, 1]),
    ],
)
def test_backward_is_not_confused_with_the_failed_one_before_it(
    pools: Pools, order: str, failing: list[int], weighted: bool
) -> None:
    """An autograd thread may keep a graph task alive briefly after ``backward()`` has raised."""
    results = pools.run(2, trip_while_held, failing, order, weighted)
    for rank, (error, after) in enumerate(results):
        assert error.startswith("ArithmeticError" if rank in failing else "DesyncError"), error
        assert after == ""


def test_backward_is_not_confused_with_a_failed_one_on_a_single_rank(pools: Pools) -> None:
    for order in ("a forward between", "no forward between"):
        assert pools.run(1, trip_while_held, [0], order, True) == [("ArithmeticError: tripped", "")]


def trip_in_window(world: World, failing: list[int]) -> list[bool]:
    """Return whether each gradient accumulated under no_sync survives a backward that fails before reaching it."""
    model, optimizer = make()
    for step in range(2):
        model(data(world.rank, step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.no_sync():
        model(data(world.rank, 2)).sum().backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    error = error_of(lambda: model(data(world.rank, 3), world.rank in failing).sum().backward())
    assert error
    kept_now = [parameter.grad for parameter in model.parameters()]
    model(data(world.rank, 4))  # a rank with a failed backward joins the collectives that the others wait for
    if world.rank not in failing:
        return []
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept_now, strict=True))
    plain = copy.deepcopy(model.module)
    for parameter, gradient in zip(plain.parameters(), kept, strict=True):
        parameter.grad = gradient.clone()
    error_of(lambda: plain(data(world.rank, 3), True).sum().backward())
    pairs = zip(model.module.parameters(), plain.parameters(), strict=True)
    return [mine.grad is not None and torch.allclose(mine.grad, other.grad) for mine, other in pairs]


def test_exception_keeps_accumulated_gradients_like_a_plain_backward(pools: Pools) -> None:
    for failing in ([0, 1], [1]):
        for rank, kept in enumerate(pools.run(2, trip_in_window, failing)):
            assert kept == ([True] * 8 if rank in failing else [])


# -- wrappers and peers that go away -----------------------------------------------------------------------------------


def delete_in_backward(world: World) -> tuple[str, bool]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kept = [DistributedDataParallel(net)]

    def drop(_gradient: Tensor) -> None:
        kept.clear()

    net[1].weight.register_hook(drop)
    with pytest.raises(UsageError) as caught:
        kept[0](torch.full((2, 4), 1.0 + world.rank)).square().mean().backward()
    return str(caught.value), all(parameter.grad is None for parameter in net.parameters())


def test_wrapper_deleted_during_backward_leaves_no_local_gradients(pools: Pools) -> None:
    for error, is_clean in pools.run(2, delete_in_backward):
        assert "this process group was destroyed" in error
        assert is_clean


def peer_dies(world: World) -> list[str]:
    model, optimizer = make()
    model(data(world.rank, 0)).sum().backward()
    optimizer.zero_grad()
    if world.rank == 1:
        os._exit(7)
    errors = [error_of(lambda step=step: model(data(world.rank, step)).sum().backward()) for step in (1, 2)]
    errors.append(error_of(model.sync_gradients))
    return errors


def test_dead_peer_raises_communication_error_now_and_later() -> None:
    with Ranks(2) as ranks:
        ranks.start(peer_dies)
        first, second, third = ranks.answer(0, 60)
    assert re.match(r"CommunicationError: rank 0: rank 1 \(pid \d+\) has ended in shared all_reduce", first)
    for line in (second, third):
        assert line.startswith("CommunicationError: rank 0: an earlier step of this model failed partway")
