"""The frozen step gives the same bits as the general one, and hands over to it when anything is out of the ordinary.

``make test-lanes`` also runs the other tests of the wrapper with every possible step frozen, and with none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insides import TEST_FROZEN, TEST_HOST_CHANNEL, channel_of, engine_of
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError
from twins import Pools

STEPS, CHANGE = 30, 22
"""Number of steps of a run, and the step that brings the change; by default, steps are frozen from the 18th on."""


class Net(nn.Module):
    """Two branches, the second of which may be left out or recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.uses_side, self.recomputes = True, False

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:  # reentrant: `first` gets two gradients, the second one late
            for _ in range(2):
                x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        else:
            x = self.first(x)
        return self.last(torch.tanh(x + self.side(x) if self.uses_side else x))


def data(world: World, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + world.rank)
    return torch.randn(5, 8, generator=generator), torch.randn(5, 3, generator=generator)


class Run:
    """A training loop; a change overrides what it needs."""

    def __init__(self, world: World) -> None:
        torch.manual_seed(0)
        self.world, self.model = world, DistributedDataParallel(Net(), bucket_cap_mb=2e-4, unused_parameters="allow")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.frozen_steps = 0

    def train(self) -> tuple[int, list[Tensor]]:
        for step in range(STEPS):
            if step == CHANGE:
                self.change()
            self.optimizer.zero_grad()
            self.step(step, is_changed=step >= CHANGE)
            self.frozen_steps += engine_of(self.model).frozen_step.is_frozen
        return self.frozen_steps, [parameter.detach().clone() for parameter in self.model.parameters()]

    def step(self, step: int, *, is_changed: bool) -> None:
        self.loss(step).backward()
        self.optimizer.step()

    def loss(self, step: int) -> Tensor:
        x, y = data(self.world, step)
        return F.mse_loss(self.model(x), y)

    def change(self) -> None:
        """Change something between two steps."""


class Unused(Run):
    def change(self) -> None:
        self.model.module.uses_side = self.world.rank == 0


class Late(Run):
    def change(self) -> None:
        self.model.module.recomputes = self.world.rank == 1


class Frozen(Run):
    def change(self) -> None:
        self.model.module.first.requires_grad_(False)


class NewHead(Run):
    def change(self) -> None:
        torch.manual_seed(1)
        self.model.module.last = nn.Linear(8, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)


class Double(Run):
    def change(self) -> None:
        self.model.module.double()

    def step(self, step: int, *, is_changed: bool) -> None:
        x, y = (tensor.double() if is_changed else tensor for tensor in data(self.world, step))
        F.mse_loss(self.model(x), y).backward()
        self.optimizer.step()


class Hooked(Run):
    def change(self) -> None:
        def halve(parameter: Tensor) -> None:
            parameter.grad = parameter.grad * 0.5

        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)


class Accumulated(Run):
    def step(self, step: int, *, is_changed: bool) -> None:
        with self.model.no_sync() if is_changed else nullcontext():
            self.loss(step).backward()
        self.loss(step + STEPS).backward()
        self.optimizer.step()


class Weighted(Run):
    def step(self, step: int, *, is_changed: bool) -> None:
        x, y = data(self.world, step)
        with self.model.weight(len(y) + self.world.rank) if is_changed else nullcontext():
            F.mse_loss(self.model(x), y, reduction="sum" if is_changed else "mean").backward()
        self.optimizer.step()


class Kept(Run):
    """A part of each gradient is kept over the following steps."""

    def step(self, step: int, *, is_changed: bool) -> None:
        self.loss(step).backward()
        if step == CHANGE:
            parts = [p.grad[0] for p in self.model.parameters() if p.grad is not None]
            self.kept = [(part, part.clone()) for part in parts]
        self.optimizer.step()
        assert not is_changed or all(torch.equal(now, then) for now, then in self.kept)


class Idle(Run):
    """One rank has no data, and a collective follows before the optimizer step."""

    def step(self, step: int, *, is_changed: bool) -> None:
        if is_changed and self.world.rank == 1:
            self.model.sync_gradients()
        else:
            self.loss(step).backward()
        dist.all_reduce(torch.ones(1))
        self.optimizer.step()


class Stopping(Run):
    """One rank asks all to stop, but they continue for a while."""

    def step(self, step: int, *, is_changed: bool) -> None:
        self.loss(step).backward()
        if is_changed and self.world.rank == 1:
            self.model.ask_to_stop()
        self.optimizer.step()
        assert self.model.stop_agreed == (step > CHANGE)


class Raising(Run):
    """Backward raises on one rank, and all skip the step."""

    def step(self, step: int, *, is_changed: bool) -> None:
        if step != CHANGE:
            super().step(step, is_changed=is_changed)
            return
        if self.world.rank == 1:
            self.model.module.first.weight.register_hook(fail_once())
        with pytest.raises(ArithmeticError if self.world.rank == 1 else DesyncError):
            super().step(step, is_changed=is_changed)


def fail_once() -> Callable[[Tensor], None]:
    calls: Iterator[int] = iter(range(100))

    def fail(_gradient: Tensor) -> None:
        if next(calls) == 0:
            raise ArithmeticError("in backward")

    return fail


RUNS = (Run, Unused, Late, Frozen, NewHead, Double, Hooked, Accumulated, Weighted, Kept, Idle, Stopping, Raising)


def train_in_both_lanes(world: World, name: str, host: str | None) -> None:
    results = {}
    for lane in ("always", "never"):
        changed = {TEST_FROZEN: lane} | ({} if host is None else {TEST_HOST_CHANNEL: host})
        with patch.dict(os.environ, changed):
            results[lane] = {run.__name__: run for run in RUNS}[name](world).train()
    assert results["always"][0] > CHANGE - 8, results["always"][0]
    assert results["never"][0] == 0
    assert all(map(torch.equal, results["always"][1], results["never"][1]))


@pytest.mark.parametrize("host", [None, "1"])
@pytest.mark.parametrize("name", [run.__name__ for run in RUNS])
def test_both_lanes_give_the_same_bits(pools: Pools, name: str, host: str | None) -> None:
    pools.run(2, train_in_both_lanes, name, host)


def freeze_by_default(world: World) -> list[bool]:
    with patch.dict(os.environ, {TEST_FROZEN: ""}):
        run, other = Run(world), None
    frozen = []
    for step in range(40):
        run.optimizer.zero_grad()
        if step == 30:
            other = DistributedDataParallel(nn.Linear(8, 3))
        if step >= 35:
            assert other is not None
            waiting = other(data(world, step)[0])  # its backward might reach both
        run.step(step, is_changed=False)
        frozen.append(engine_of(run.model).frozen_step.is_frozen)
    del waiting
    return frozen


def test_step_freezes_by_default_beside_another_wrapper(pools: Pools) -> None:
    for frozen in pools.run(2, freeze_by_default):
        assert not any(frozen[:16])
        assert all(frozen[20:])


# -- averages by NCCL, which is not here: a stand-in averages ----------------------------------------------------------


def train_with_averages(world: World, averages: bool, weights: bool) -> tuple[int, list[Tensor]]:
    with patch.dict(os.environ, {TEST_HOST_CHANNEL: "1"}):  # as with GPUs, no bucket carries a digest
        run = (Weighted if weights else Run)(world)
    channel, averaged = channel_of(run.model), []

    def launcher(tensor: Tensor, *, averages: bool = False) -> Callable[[], Any]:
        def launch() -> Any:
            if averages:
                averaged.append(tensor.div_(world.size))
            launched = type(channel).launcher(channel, tensor)()
            launched.wait()  # NCCL's collectives end in order, and Paceline waits only for the last one
            return launched

        return launch

    if averages:
        channel.is_ordered, channel.launcher = True, launcher
        engine = engine_of(run.model)
        engine.use_finisher(lambda _: engine.finisher)
    _, weights_after = run.train()
    return len(averaged), weights_after


@pytest.mark.parametrize("weights", [False, True])
def test_averages_by_the_backend_give_the_same_bits(gloo: Pools, weights: bool) -> None:
    (count, plain), (averaged_count, averaged) = (
        gloo.run(2, train_with_averages, a, weights)[0] for a in (False, True)
    )
    assert count == 0
    assert averaged_count >= STEPS
    assert all(map(torch.equal, plain, averaged))
