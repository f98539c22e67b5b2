"""Training with compression: lossless settings equal one process, resuming is bit-equal, torch DDP gives the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from insides import weights_sha256
from models import chain
from paceline import Checkpointer, World, compression
from paceline.compression import Cast, Compressor, Int8, PowerSGD, TopK
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from twins import Case, Pools, reentrant, same_tensor, train_beside_twin

KINDS: dict[str, Callable[[nn.Module], Compressor]] = {
    "bf16": Cast,
    "int8": Int8,
    "topk": lambda model: TopK(model, 0.02),
    "powersgd": lambda model: PowerSGD(model, rank=2),
}


# -- in the loop -------------------------------------------------------------------------------------------------------


def beside_twin(world: World, kind: str) -> None:
    """Lossless settings equal one process, with weights, uneven slices, unused parameters and rebuilt buckets."""
    lossless = {"topk": lambda model: TopK(model, 1.0), "powersgd": lambda model: PowerSGD(model, 100)}[kind]
    for case in [
        Case(pattern="unused on all in odd steps", batches=(12, 1, 7), options={"bucket_cap_mb": 1e-4}),
        Case(micros=2, window="accumulate", set_to_none=False, batches=(12, 7)),
        Case(build=reentrant, pattern="a part twice", batches=(12, 2)),
    ]:
        train_beside_twin(world, case, compression.hook, lossless)


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_lossless_settings_equal_one_process(pools: Pools, kind: str) -> None:
    pools.run(2, beside_twin, kind)


def net() -> nn.Module:
    return chain(20, 30, 25, 4)


def gradients(model: nn.Module, rank: int, steps: int) -> list[list[Tensor]]:
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(6, 20, generator=generator)).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    return found


def in_torch_ddp(world: World, kind: str) -> None:
    theirs = nn.parallel.DistributedDataParallel(net(), find_unused_parameters=True)
    ours = DistributedDataParallel(net())
    ours.load_bucket_layout([[name for name, _ in ours.module.named_parameters()]])  # torch's initial layout
    for model in (theirs, ours):
        model.register_comm_hook(KINDS[kind](model), compression.hook)
    for a, b in zip(gradients(ours, world.rank, 4), gradients(theirs, world.rank, 4), strict=True):
        for mine, other in zip(a, b, strict=True):
            same_tensor(mine, other, 1e-6, kind)
    # torch rebuilds its buckets after the first step, so compare the sum of applied and residual gradients.
    rebuilt, plain = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=0.002), DistributedDataParallel(net())
    state = KINDS[kind](rebuilt)
    rebuilt.register_comm_hook(state, compression.hook)
    applied, given = (
        [torch.stack(steps).sum(0) for steps in zip(*gradients(model, world.rank, 8), strict=True)]
        for model in (rebuilt, plain)
    )
    for (name, _), done, wanted in zip(plain.module.named_parameters(), applied, given, strict=True):
        left = state.state_dict()["residuals"].get(name, torch.zeros_like(done)).clone()
        dist.all_reduce(left)
        same_tensor(done + left / world.size, wanted, 0.02 if isinstance(state, Cast) else 1e-5, f"{kind} {name}")


@pytest.mark.parametrize("kind", ["bf16", "int8", "topk", "powersgd"])
def test_compressors_give_the_same_results_in_torch_ddp(pools: Pools, kind: str) -> None:
    pools.run(2, in_torch_ddp, kind)


def in_pairs(world: World) -> None:
    """Each pair of ranks trains alone; a state built from the unwrapped model would average over both pairs."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    model = DistributedDataParallel(net(), process_group=groups[world.rank // 2])
    with pytest.raises(UsageError, match=r"^TopK was not created for this wrapper's process group; create it from"):
        model.register_comm_hook(TopK(model.module, 1.0), compression.hook)
    model.register_comm_hook(TopK(model, 1.0), compression.hook)
    plain = DistributedDataParallel(net(), process_group=groups[world.rank // 2])
    for mine, wanted in zip(gradients(model, world.rank, 1)[0], gradients(plain, world.rank, 1)[0], strict=True):
        same_tensor(mine, wanted, 1e-6, "in a pair")


def test_a_compressor_averages_only_over_the_wrappers_group(pools: Pools) -> None:
    pools.run(4, in_pairs)


# -- resuming ----------------------------------------------------------------------------------------------------------


def resumed(world: World, kind: str, folder: str) -> str:
    ends = []
    for start, stop in ((0, 6), (0, 3), (3, 6)):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.002)
        state = KINDS[kind](model)
        model.register_comm_hook(state, compression.hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with Checkpointer(folder) as checkpointer:
            checkpointer.register("model", model)
            checkpointer.register("optimizer", optimizer)
            checkpointer.register("compression", state, per_rank=True)
            if start:
                assert checkpointer.restore() == start
            for step in range(start, stop):
                generator = torch.Generator().manual_seed(10 * step + world.rank)
                model(torch.randn(6, 20, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if stop == 3:
                checkpointer.save(3)
        left = {name: one.tolist() for name, one in state.state_dict()["residuals"].items()}
        counters = state.steps, state.bytes_on_wire, state.bytes_uncompressed
        ends.append((weights_sha256(model), counters, left))
    whole, _, again = ends
    assert whole == again
    return whole[0]


@pytest.mark.parametrize("kind", ["int8", "powersgd"])
def test_a_resumed_run_ends_with_the_same_bits(pools: Pools, kind: str, tmp_path: Any) -> None:
    first, second = pools.run(2, resumed, kind, str(tmp_path))
    assert first == second
