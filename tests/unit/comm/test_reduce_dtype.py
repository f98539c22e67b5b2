"""Gradients reduced in a different dtype than the parameters."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from twins import Case, Mixed, Odd, Parts, Pools, same_tensor, train_beside_twin

TINY = 1e-4


def equals_one_process(world: World) -> None:
    for build, dtype, rtol in [
        (Parts, torch.float32, 1e-4),
        (Parts, torch.bfloat16, 0.1),
        (Parts, torch.float16, 0.02),
        (partial(Parts, torch.float32), torch.float64, 1e-4),
        (Mixed, torch.float32, 5e-2),
        (Odd, torch.float32, 1e-4),
        (partial(Parts, checkpointing="reentrant"), torch.float32, 1e-4),
    ]:
        options = {"reduce_dtype": dtype, "bucket_cap_mb": TINY}
        for case in [
            Case(build, "a part twice", (12, 7, 2), options=options, rtol=rtol),
            Case(build, "unused on all in odd steps", (12, 7, 2), 2, "backward", False, options=options, rtol=rtol),
            Case(build, "all parts", (12, 1), 2, "sync_gradients", options=options, rtol=rtol),
        ]:
            try:
                train_beside_twin(world, case)
            except Exception as error:
                raise AssertionError(f"{case}: {error}") from error


@pytest.mark.slow
def test_ranks_equal_one_process_for_every_reduce_dtype(pools: Pools) -> None:
    pools.run(3, equals_one_process)


def model_and_gradients(world: World, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> list[Tensor]:
    """Gradients of a bf16 layer: 1 on rank 0 and 1/256 (half an ulp) elsewhere, which bf16 sums lose."""
    layer = nn.Linear(8, 3, bias=False).to(dtype)
    model = DistributedDataParallel(layer, reduce_dtype=reduce_dtype)
    value = 1.0 if world.rank == 0 else 1 / 256
    model(torch.full((1, 8), value, dtype=dtype)).sum().backward()
    (parameter,) = model.parameters()
    assert parameter.grad.dtype == dtype
    assert model.gradient_bytes_per_step == 24 * (reduce_dtype or dtype).itemsize
    return [parameter.grad]


def exact_in_float32(world: World) -> None:
    for reduce_dtype, exact in ((torch.float32, True), (None, False)):
        (gradient,) = model_and_gradients(world, torch.bfloat16, reduce_dtype)
        mean = torch.full((3, 8), (1.0 + 2 / 256) / 3).to(torch.bfloat16)
        assert torch.equal(gradient, mean) == exact


def test_a_mean_of_bf16_gradients_summed_in_float32_is_rounded_once(pools: Pools) -> None:
    pools.run(3, exact_in_float32)


def lifetimes(world: World) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4), reduce_dtype=torch.bfloat16)
    plain = DistributedDataParallel(copy.deepcopy(model.module))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))
        for one in (model, plain):
            one(x).square().sum().backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            same_tensor(mine.grad, other.grad, 0.02, f"step {step}")
        optimizer.step()
        optimizer.step()  # repeats the same averages; not refused for views either
        with torch.no_grad():
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                other.copy_(mine)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        plain.zero_grad()
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(UsageError, match="has not averaged over the ranks"):
        optimizer.step()
    with pytest.raises(UsageError, match=r"reduce_dtype=torch.int8: give torch\.float32"):
        DistributedDataParallel(nn.Linear(4, 4), reduce_dtype=torch.int8)


def test_averaged_and_local_gradients_are_distinguished_even_if_not_views(pools: Pools) -> None:
    pools.run(3, lifetimes)
