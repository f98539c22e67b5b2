"""The sharded optimizer and parameter memory: aliases, writes that bypass autograd, complex numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from paceline import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import UsageError
from paceline.optim import ShardedOptimizer
from twins import Pools


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 4))


def batches(world: World, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, 8, generator=generator).to(dtype)[world.rank :: world.size] for _ in range(3)]


def train(model: Any, optimizer: Any, inputs: list[Tensor]) -> None:
    for x in inputs:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flatten(net: nn.Module) -> Tensor:
    """Point all parameters into one flat tensor."""
    flat = nn.utils.parameters_to_vector(net.parameters()).detach()
    nn.utils.vector_to_parameters(flat, net.parameters())
    return flat


def aliases(world: World, sharded: bool) -> dict[str, list[Tensor]]:
    """Train, and return the values of tensors that alias the parameters."""
    net = network()
    net.register_buffer("alias", net[0].weight.detach(), persistent=False)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    kept = {
        "state_dict": list(net.state_dict().values()),
        "detached": [each.detach() for each in net.parameters()],
        "numpy": [torch.from_numpy(each.detach().numpy()) for each in net.parameters()],
        "buffer": list(net.buffers()),
        "transposed": [net[0].weight.data.t()],
    }
    optimizer: Any = ShardedOptimizer(model, SGD, lr=0.1) if sharded else SGD(net.parameters(), lr=0.1)
    train(model, optimizer, batches(world)[:2])
    found = copy.deepcopy(kept)
    found["flat"] = [flatten(net)]  # moves the parameters between steps
    train(model, optimizer, batches(world)[2:])
    return found


def differing_aliases(world: World) -> list[str]:
    one, other = (aliases(world, sharded) for sharded in (False, True))
    return [name for name in one if not all(map(torch.equal, one[name], other[name]))]


def test_tensors_that_alias_parameters_stay_valid(pools: Pools) -> None:
    """Parameters moved into shared memory, so their aliases kept the old values."""
    assert pools.run(2, differing_aliases) == [[], []]


def refusals(world: World) -> list[str]:
    messages = []

    def transposed() -> Any:
        net = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False))
        net[1].weight = nn.Parameter(net[0].weight.data.t())
        return net

    def columns() -> Any:
        whole = torch.randn(4, 16)
        net = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False))
        net[0].weight.data = whole[:, :8]
        return net, whole

    # This parameter has no aliases, so it can be moved.
    ShardedOptimizer(DistributedDataParallel(columns()[0]), SGD, lr=0.1)
    columns_and_whole = columns()
    for net in (transposed(), columns_and_whole[0]):
        with pytest.raises(UsageError) as caught:
            ShardedOptimizer(DistributedDataParallel(net), SGD, lr=0.1)
        messages.append(str(caught.value))
    net = network()
    optimizer = ShardedOptimizer(DistributedDataParallel(net), SGD, lr=0.1)
    net[2].bias.data = net[0].weight.data.flatten()[:4]
    net[2].bias.grad = torch.ones(4)
    net[0].weight.grad = torch.ones(40, 8)
    with pytest.raises(UsageError) as caught:
        optimizer._sharding.follow()  # the guard of step() would refuse these gradients first
    return [*messages, str(caught.value)]


def test_parameters_with_shared_or_strided_memory_are_refused_by_name(pools: Pools) -> None:
    for tied, gaps, later in pools.run(2, refusals):
        assert "parameter '0.weight' and parameter '1.weight' share memory" in tied
        assert "parameter '0.weight' of shape (4, 8) has strides (16, 1), which leave gaps" in gaps
        assert "parameter '0.weight' and parameter '2.bias' share memory" in later


def written(world: World) -> dict[str, float]:
    """Clamp all weights to 0.05, train with a tiny learning rate, and return the largest weight."""

    def by_numpy(each: nn.Parameter) -> None:
        view = each.data.view(torch.int16).numpy()
        view &= 0  # zero

    ways: dict[str, tuple[int, Callable[[nn.Parameter], Any]]] = {
        "data": (1, lambda each: each.data.clamp_(-0.05, 0.05)),
        "copy": (0, lambda each: each.data.copy_(each.data.clamp(-0.05, 0.05))),
        "no_grad": (0, lambda each: each.detach().clamp_(-0.05, 0.05)),
        "numpy": (1, by_numpy),
    }
    found = {}
    for name, (steps, write) in ways.items():
        net = network().bfloat16()
        model = DistributedDataParallel(net)
        optimizer = ShardedOptimizer(model, SGD, lr=1e-4, master_dtype=torch.float32)
        inputs = batches(world, torch.bfloat16)
        train(model, optimizer, inputs[:steps])
        for parameter in net.parameters():
            write(parameter)
        train(model, optimizer, inputs)
        found[name] = max(float(each.detach().abs().max()) for each in net.parameters())
    return found


def test_masters_see_writes_that_do_not_bump_the_version(pools: Pools) -> None:
    """WGAN's ``p.data.clamp_()`` was undone by the next step."""
    for found in pools.run(2, written):
        assert {name: largest for name, largest in found.items() if largest > 0.051} == {}


class Filter(nn.Module):
    """A filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.response = nn.Parameter(torch.randn(150, dtype=torch.complex64))
        self.last = nn.Linear(298, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(x, n=298) * self.response, n=298))


def complex_apart(world: World) -> dict[str, float]:
    """Return the distance of complex weights from one process on the whole batch."""
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    twin = Filter()
    optimizer: Any = SGD(twin.parameters(), lr=0.1)
    for x in data.split(8):
        F.mse_loss(twin(x), x[:, :4]).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {}
    for way in ("element", "tensor", "virtual ranks"):
        net = Filter()
        slices = 4 if way == "virtual ranks" else None
        model = DistributedDataParallel(net, virtual_ranks=slices)
        if slices is None:
            optimizer = ShardedOptimizer(model, SGD, lr=0.1, by=way)
            for x in data.split(8):
                part = x.chunk(world.size)[world.rank]
                F.mse_loss(model(part), part[:, :4]).backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            optimizer = SGD(model.parameters(), lr=0.1)
            for x in accumulate(model, DataLoader(data, 8, shuffle=False)):
                F.mse_loss(model(x), x[:, :4]).backward()
                if model.do_sync:
                    optimizer.step()
                    optimizer.zero_grad()
        pairs = zip(net.parameters(), twin.parameters(), strict=True)
        found[way] = max(float((one - other).detach().abs().max()) for one, other in pairs)
        del optimizer
    return found


def test_complex_parameters_train_over_gloo(gloo: Pools) -> None:
    """Gloo cannot all-gather or all-to-all complex tensors, which four ranks need to sum slices."""
    for found in gloo.run(4, complex_apart):
        assert {way: apart for way, apart in found.items() if apart > 1e-5} == {}
