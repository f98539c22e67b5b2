"""Regression tests: cases that once gave silently wrong gradients are exact now or refused."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

from models import chain
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import NonFiniteGradient, ReplicaMismatch, UsageError
from ranks import Ranks
from twins import Pools


def net() -> nn.Module:
    return chain(3, 4, 2, dtype=torch.float64)


def sample(world: World, count: int = 4) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)


def all_samples(world: World) -> Tensor:
    return torch.cat([sample(World(rank, *[world.size, 0, 1, 0], world.device)) for rank in range(world.size)])


def expect_mean(model: nn.Module, world: World) -> None:
    twin = net()
    twin(all_samples(world)).sum(1).mean().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


# -- weights -----------------------------------------------------------------------------------------------------------


def weighted_in_eval_mode(world: World) -> None:
    """Train in eval mode, as fine-tuning with frozen BatchNorm does."""
    model = DistributedDataParallel(net()).eval()
    with model.weight(4):
        model(sample(world)).sum().backward()
    expect_mean(model, world)


def weighted_with_inputs(world: World) -> None:
    model = DistributedDataParallel(net())
    with model.weight(4):
        model(sample(world)).sum().backward(inputs=list(model.parameters()))
    expect_mean(model, world)


def weighted_bypassing_the_wrapper(world: World) -> str:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError) as caught, model.weight(4):  # noqa: PT012
        model.module(sample(world)).sum().backward()
        optimizer.step()
    return str(caught.value)


def test_step_with_an_unused_weight_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(weighted_bypassing_the_wrapper):
        assert "call the wrapper and not model.module" in message


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.body(x)
        return out[:, 0], out[:, 1]


def backward_after_its_block(world: World) -> None:
    model = DistributedDataParallel(TwoOutputs())
    for halves in sample(world).chunk(2):
        with model.weight(2):
            left, right = model(halves)
            loss = left.sum() + right.sum()
        with model.no_sync():
            loss.backward()
    model.sync_gradients()
    expect_mean(model, world)


def accumulated_and_dropped(world: World) -> None:
    model = DistributedDataParallel(net())
    with model.no_sync(), model.weight(2):
        model(sample(world)).sum().backward()
    model.zero_grad()
    with model.weight(4):
        model(sample(world)).sum().backward()
    expect_mean(model, world)


def unweighted_and_dropped(world: World) -> None:
    """Like a discriminator in the generator's step: its gradients are discarded."""
    model = DistributedDataParallel(net())
    for _ in range(3):
        with model.no_sync():
            model(sample(world)).sum().backward()
        model.zero_grad()
        with model.weight(4):
            model(sample(world)).sum().backward()
        expect_mean(model, world)
        model.zero_grad()


WEIGHTED = [weighted_in_eval_mode, weighted_with_inputs, backward_after_its_block, accumulated_and_dropped]
WEIGHTED += [unweighted_and_dropped]


@pytest.mark.parametrize("train", WEIGHTED, ids=lambda train: train.__name__)
def test_weight_counts_once_for_synchronized_gradients(ranks: Ranks, train: Any) -> None:
    ranks.run(train)


# -- the guard ---------------------------------------------------------------------------------------------------------


def local_after_synchronized(world: World) -> str:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(sample(world)).sum().backward()
    with model.no_sync():
        model(sample(world)).sum().backward()
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_step_after_a_local_backward_is_refused(pools: Pools) -> None:
    for message in pools.run(2, local_after_synchronized):
        assert "ran under no_sync()" in message


def state_before_the_first_step(world: World) -> int:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.parameters())
    return len(get_optimizer_state_dict(model, optimizer)["state"])


def test_dcp_may_create_optimizer_state_before_the_first_step(ranks: Ranks) -> None:
    """Distributed Checkpoint sets zero gradients and steps with a learning rate of 0."""
    assert set(ranks.run(state_before_the_first_step)) == {4}


def layout_after_an_exception(world: World) -> None:
    model = DistributedDataParallel(net(), bucket_cap_mb=1e-4)
    model(sample(world)).sum().backward()
    layout = model.bucket_layout()
    out = model(sample(world))
    out.register_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    model.load_bucket_layout(layout[::-1])
    model.zero_grad()
    with model.weight(4):
        model(sample(world)).sum().backward()
    expect_mean(model, world)


def _raise(_gradient: Tensor) -> None:
    raise ZeroDivisionError


def test_a_layout_may_be_loaded_after_an_exception_in_backward(pools: Pools) -> None:
    pools.run(2, layout_after_an_exception)


def refuse_repeatedly(world: World) -> int:
    first = 0
    for turn in range(4):
        module = net() if world.rank == 0 else nn.Linear(1, 1)
        with pytest.raises(ReplicaMismatch):
            DistributedDataParallel(module)
        gc.collect()
        open_now = len(os.listdir("/proc/self/fd"))
        first = first or open_now
        assert open_now <= first, turn
    return first


def test_refused_wrapper_leaks_no_file_descriptors(pools: Pools) -> None:
    pools.run(2, refuse_repeatedly)


# -- nonfinite and large numbers ---------------------------------------------------------------------------------------


def train_with_late_nan(world: World) -> str:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    model = DistributedDataParallel(_Twice(layer), check_finite=True)
    for step in range(4):
        model.zero_grad()
        out = model(sample(world).requires_grad_(), bad=step == 3 and world.rank == 1)
        if step < 3:
            out.sum().backward()
    with pytest.raises(NonFiniteGradient) as caught:
        out.sum().backward()
    return str(caught.value)


class _Twice(nn.Module):
    """The layer's gradient arrives twice, from two reentrant checkpoints; the later one may be NaN."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, bad: bool) -> Tensor:
        first = checkpoint(self.layer, x, use_reentrant=True)
        if bad:
            first = first * float("nan")
        return checkpoint(self.layer, first, use_reentrant=True)


def test_late_nonfinite_gradient_is_detected(pools: Pools) -> None:
    for message in pools.run(2, train_with_late_nan):
        assert "rank 1" in message


def large_fp16_gradient(world: World) -> float:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).half())
    model(torch.full((1, 1), 40000.0).half()).sum().backward()
    return float(model.module.weight.grad)


def test_the_mean_of_large_fp16_gradients_does_not_overflow(pools: Pools) -> None:
    assert pools.run(2, large_fp16_gradient) == [40000.0, 40000.0]


def bucket_names(world: World) -> list[list[str]]:
    plain = DistributedDataParallel(net())
    compiled = DistributedDataParallel(torch.compile(net(), backend="eager"))
    compiled.load_state_dict(plain.module.state_dict())
    compiled.load_state_dict(compiled.state_dict())
    return [sorted(name for names in model.bucket_layout() for name in names) for model in (plain, compiled)]


def test_compiled_module_keeps_the_original_parameter_names(pools: Pools) -> None:
    for plain, compiled in pools.run(2, bucket_names):
        assert plain == compiled


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))

    def forward(self, scale: float) -> Tensor:
        return scale * torch.view_as_real(self.weight.conj().resolve_conj()).sum()


def conjugated(world: World) -> list[complex]:
    model = DistributedDataParallel(Conjugated(), check_finite=True)
    model(1.0).backward()
    values: list[complex] = model.module.weight.grad.tolist()
    model.zero_grad()
    with pytest.raises(NonFiniteGradient):
        model(float("nan")).backward()
    return values


@pytest.mark.parametrize("ranks", [1, 2])
def test_lazily_conjugated_gradient_is_checked(pools: Pools, ranks: int) -> None:
    for values in pools.run(ranks, conjugated):
        assert values == [1 - 1j, 1 - 1j]
