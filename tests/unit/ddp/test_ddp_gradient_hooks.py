"""User hooks on gradients run as with torch DDP: on every gradient, before averaging, no matter when registered.

Our own hook on a parameter launches a bucket, after which ``p.grad`` is None. A user hook registered later, for example
to clip each gradient, silently skipped the parameter of each bucket that carries our hook.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from deep import TINY, Deep, data
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from twins import Pools

STEPS, REMOVED = 7, 6
Log = list[tuple[str, Tensor | None]]


def accumulated(log: Log, name: str, change: Callable[[Tensor], Tensor], parameter: Tensor) -> None:
    log.append((name, None if parameter.grad is None else parameter.grad.clone()))
    if parameter.grad is not None:
        parameter.grad = change(parameter.grad)


def on_each(net: nn.Module, log: Log, change: Callable[[Tensor], Tensor], label: str = "") -> list[Any]:
    return [
        parameter.register_post_accumulate_grad_hook(partial(accumulated, log, label + name, change))
        for name, parameter in net.named_parameters()
    ]


def clipping(net: nn.Module, log: Log) -> list[Any]:
    return on_each(net, log, lambda gradient: gradient.clamp_(-0.1, 0.1))


def replacing(net: nn.Module, log: Log) -> list[Any]:
    return on_each(net, log, lambda gradient: gradient / 2)


def two_of_them(net: nn.Module, log: Log) -> list[Any]:
    return [
        *on_each(net, log, lambda gradient: gradient.add_(1), "first "),
        *on_each(net, log, lambda gradient: gradient.mul_(2), "second "),
    ]


def on_tensors(net: nn.Module, log: Log) -> list[Any]:
    def arrived(name: str, gradient: Tensor) -> Tensor:
        log.append((name, gradient.clone()))
        return gradient * 3

    return [parameter.register_hook(partial(arrived, name)) for name, parameter in net.named_parameters()]


def on_all_together(net: nn.Module, log: Log) -> list[Any]:
    def arrived(gradients: Any) -> None:
        log.extend((f"all {place}", gradient.clone()) for place, gradient in enumerate(gradients))

    return [register_multi_grad_hook(list(net.parameters()), arrived)]


def from_within_backward(net: nn.Module, log: Log, *, prepend: bool = False) -> list[Any]:
    """Register hooks once the last layer's outputs have gradients; remove them in every step."""
    handles: list[Any] = []

    def begins(*_: Any) -> None:
        while handles:
            handles.pop().remove()
        handles.extend(clipping(net, log))

    hook = net.layers[-1].register_full_backward_pre_hook(begins, prepend=prepend)  # type: ignore[index,union-attr]
    return [hook, *handles]


def from_another_hook(net: nn.Module, log: Log) -> list[Any]:
    """Register hooks on all earlier layers when the last layer's gradient arrives."""
    layers: Any = net.layers
    return [layers[-1].weight.register_post_accumulate_grad_hook(lambda _: clipping(layers[:3], log) and None)]


CASES = [
    clipping,
    replacing,
    two_of_them,
    on_tensors,
    on_all_together,
    from_within_backward,
    partial(from_within_backward, prepend=True),
    from_another_hook,
]


def train(model: Any, rank: int, install: Callable[[nn.Module, Log], list[Any]], between: bool) -> tuple[Log, Any]:
    """Return the log of the hooks and all gradients; hooks are installed in step 2, `between` micro-batches or not."""
    net, log, handles, gradients = model.module, [], [], []
    for step in range(STEPS):
        batches = 3 if between and step == 2 else 1
        for batch in range(batches):
            if (step, batch) == (2, int(between)):
                handles = install(net, log)
            log.append((f"step {step}, batch {batch}", None))
            with nullcontext() if batch == batches - 1 else model.no_sync():
                model(data(rank, 10 * step + batch)).sin().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in net.parameters()])
        model.zero_grad(set_to_none=step != 3)
        if step == REMOVED - 1:
            for handle in handles:
                handle.remove()
    return log, gradients


def compare(where: str, ours: tuple[Log, Any], theirs: tuple[Log, Any]) -> None:
    assert [name for name, _ in ours[0]] == [name for name, _ in theirs[0]], where
    for (name, mine), (_, other) in zip(ours[0], theirs[0], strict=True):
        assert (mine is None) == (other is None), f"{where} {name}"
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{where} {name}: {text}")
    torch.testing.assert_close(ours[1], theirs[1], msg=lambda text: f"{where}: {text}")


def compare_with_torch(world: World) -> None:
    for number, case in enumerate(CASES):
        for between, megabytes in ((False, (TINY, 25)[number % 2]), (True, TINY)):
            torch.manual_seed(0)
            net = Deep()
            theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=megabytes)
            ours = DistributedDataParallel(net, bucket_cap_mb=megabytes)
            compare(
                f"{case}, between={between}, {megabytes} MB:",
                train(ours, world.rank, case, between),
                train(theirs, world.rank, case, between),
            )


@pytest.mark.slow
def test_gradient_hooks_run_as_with_torch_ddp_whenever_registered(pools: Pools) -> None:
    pools.run(2, compare_with_torch)
