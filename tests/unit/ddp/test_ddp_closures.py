"""``optimizer.step(closure)``: the closure's backward may synchronize gradients accumulated under no_sync()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import chain
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from ranks import Ranks


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
