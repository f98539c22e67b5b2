"""Less common parts of torch DDP's interface that scripts and frameworks use."""

from __future__ import annotations

import copy
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from insides import AveragingWrapper, engine_of, step_in_backward
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from twins import Pools, same_gradients, same_tensor, same_weights

TorchDDP = nn.parallel.DistributedDataParallel


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def batch(rank: int, step: int = 0, count: int = 4) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def train(model: nn.Module, world: World, steps: int = 3, momentum: float = 0.9) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(world.rank, step)).sin().sum().backward()
        optimizer.step()


def both_wrappers(world: World, **options: Any) -> tuple[DistributedDataParallel, TorchDDP]:
    return DistributedDataParallel(net(), **options), TorchDDP(net(), **options)


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    same_weights(ours, theirs, 1e-9, "")
    if dist.get_rank() != 0:
        return  # between steps torch's buffers are local, Paceline's equal rank 0's
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        same_tensor(mine.double(), other.double(), 1e-9, "buffer")


# -- complex parameters ------------------------------------------------------------------------------------------------


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.phase = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        waves = x.to(torch.complex128) @ self.phase
        return (waves.real * self.scale + waves.imag.sin()).square()


def complex_parameters(world: World) -> None:
    ours, theirs, alone = DistributedDataParallel(Waves()), TorchDDP(Waves()), Waves()
    everything = torch.cat([batch(rank) for rank in range(world.size)])
    ours(batch(world.rank)).mean().backward()
    theirs(batch(world.rank)).mean().backward()
    alone(everything).mean().backward()
    assert alone.phase.grad.imag.abs().min() > 0
    same_gradients(ours.module, alone)
    same_gradients(ours.module, theirs.module)
    ours.zero_grad()
    with ours.weight(4):
        ours(batch(world.rank)).mean(1).sum().backward()
    same_gradients(ours.module, alone)


def test_complex_gradients_average_real_and_imaginary_parts(pools: Pools) -> None:
    pools.run(2, complex_parameters)


# -- copies ------------------------------------------------------------------------------------------------------------


def average_of_weights(world: World) -> None:
    """Keep an average of the weights on rank 0 only, as scripts do."""
    model = DistributedDataParallel(net())
    train(model, world)
    if world.rank == 0:
        average = copy.deepcopy(model)
        assert type(average) is DistributedDataParallel
        assert_same(average, model)
        with torch.no_grad():
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                assert mine is not other
                mine.lerp_(other, 0.1)
            average(batch(0))
        average(batch(0))  # a teacher in training mode needs no other rank
        average.load_state_dict(model.state_dict())
    train(model, world)


def test_copy_needs_no_other_rank_until_trained(pools: Pools) -> None:
    pools.run(2, average_of_weights)


def shallow(world: World) -> bool:
    model = DistributedDataParallel(net())
    copied = copy.copy(model)
    train(model, world)
    return copied.module is model.module and not engine_of(model).shared.common()


def test_a_shallow_copy_does_not_count_as_a_second_wrapper_until_it_is_trained(pools: Pools) -> None:
    assert pools.run(2, shallow) == [True, True]


def trained_copies(world: World, how: str) -> None:
    model, theirs = both_wrappers(world)
    train(model, world)
    train(theirs, world)
    model.disable_grad_sync()
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    model.enable_grad_sync()
    assert_same(other, theirs)
    with other.no_sync():
        other(batch(world.rank)).sum().backward()
    other.zero_grad()
    if world.rank == 0:
        (other(batch(0)).sin().sum() * world.size).backward()
    else:
        other.sync_gradients()  # also initializes the copy on a rank without data
    first = [parameter.grad.clone() for parameter in other.parameters()]
    other.zero_grad()
    reference = copy.deepcopy(theirs.module)
    reference(batch(0)).sin().sum().backward()
    for gradient, parameter in zip(first, reference.parameters(), strict=True):
        same_tensor(gradient, parameter.grad, 1e-9, "gradient of the copy")
    other.load_state_dict(theirs.state_dict())
    train(other, world)
    train(model, world)
    train(theirs, world)
    assert_same(other, theirs)
    assert_same(model, theirs)


@pytest.mark.parametrize(("size", "how"), [(1, "pickle"), (2, "deepcopy"), (2, "pickle")])
def test_a_copy_trains_like_the_original(pools: Pools, size: int, how: str) -> None:
    pools.run(size, trained_copies, how)


def pickled_over_a_part(world: World) -> str:
    group = torch.distributed.new_group([0, 1])
    with pytest.raises(UsageError) as caught:
        torch.save(DistributedDataParallel(net(), process_group=group), io.BytesIO())
    return str(caught.value)


def test_only_a_wrapper_over_the_default_group_can_be_pickled(pools: Pools) -> None:
    for message in pools.run(2, pickled_over_a_part):
        assert "paceline.unwrap(model)" in message


# -- torch's arguments and members -------------------------------------------------------------------------------------


def delayed(world: World) -> None:
    module = net()
    named, hooked = [("0.weight", module[0].weight)], module[3].bias
    model = DistributedDataParallel(module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=hooked)
    theirs = TorchDDP(net())
    model(batch(world.rank)).sin().sum().backward()
    theirs(batch(world.rank)).sin().sum().backward()
    same_gradients(model.module, theirs.module)
    outside = [("outside", nn.Parameter(torch.ones(2)))]
    with pytest.raises(UsageError, match="'outside' of delay_all_reduce_named_params is not in the module"):
        DistributedDataParallel(net(), delay_all_reduce_named_params=outside, param_to_hook_all_reduce=hooked)


def test_parameters_with_a_delayed_all_reduce_are_averaged(pools: Pools) -> None:
    pools.run(2, delayed)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + len(x)  # a new tensor with the same name
        return self.linear(x)


def reassigned(world: World) -> float:
    model = DistributedDataParallel(_Counting())
    model(torch.ones(1 + world.rank, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    return float(model.module.count)


def test_a_buffer_that_the_module_reassigns_is_still_broadcast(pools: Pools) -> None:
    """pytorch issue 63916."""
    assert pools.run(2, reassigned) == [3.0, 3.0]


def initial_counts(world: World) -> list[float]:
    counts = []
    for option in ({"broadcast_buffers": False}, {"forward_sync_buffers": False}, {}):
        module = _Counting()
        module.count.fill_(world.rank)
        counts.append(float(DistributedDataParallel(module, **option).module.count))
    return counts


def test_broadcast_buffers_false_skips_the_initial_broadcast_as_in_torch(pools: Pools) -> None:
    assert pools.run(2, initial_counts) == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def framework_calls(world: World) -> None:
    """Make the calls that Accelerate, Lightning and torch make around a step."""
    model = DistributedDataParallel(net(), dim=1, check_reduction=True, batched_grad_copy=True, bucket_cap_mb=2)
    assert isinstance(model, TorchDDP)
    assert isinstance(model, AveragingWrapper)
    model.require_forward_param_sync = True
    out = model(batch(world.rank))
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([])
    out.sum().backward()
    model._check_reducer_finalized()
    model._set_ddp_runtime_logging_sample_rate(1)
    model._set_static_graph()
    assert model.static_graph
    assert (model.bucket_bytes_cap, model.dim, model.device_type) == (2 * 2**20, 1, "cpu")
    assert model.will_sync_module_buffers()
    assert model._find_common_rank(world.rank, True) == world.size - 1
    data = model._get_ddp_logging_data()
    assert (data["world_size"], data["rank"], data["iteration"]) == (world.size, world.rank, 1)
    with pytest.raises(AttributeError, match="only prepare_for_backward"):
        model.reducer.get_backward_stats  # noqa: B018
    with pytest.raises(UsageError, match="does not have"):
        model._update_process_group(None)
    with pytest.raises(UsageError, match="at least 1"):
        model._set_ddp_runtime_logging_sample_rate(0)
    model.require_forward_param_sync = False
    assert not model.will_sync_module_buffers()


def test_framework_calls_work_or_are_refused_by_name(pools: Pools) -> None:
    pools.run(2, framework_calls)


# -- the table of arguments and members --------------------------------------------------------------------------------


def test_drop_in_table_lists_every_argument_and_member_of_torch_ddp() -> None:
    table = (Path(__file__).parents[3] / "docs" / "drop-in.md").read_text()
    named = set(re.findall(r"`([A-Za-z_]+)`", table))
    signatures = [inspect.signature(kind.__init__).parameters for kind in (TorchDDP, DistributedDataParallel)]
    arguments = {name for parameters in signatures for name in parameters} - {"self"}
    members = {name for name in vars(TorchDDP) if not name.startswith("__") and name != "_abc_impl"}
    assert not (arguments | members) - named


def refused_members(world: World) -> None:
    model = DistributedDataParallel(net())
    table = (Path(__file__).parents[3] / "docs" / "drop-in.md").read_text()
    (row,) = [line for line in table.splitlines() if "names the member" in line and "_register_accum_grad_hook" in line]
    for name in re.findall(r"`([a-z_]+)`", row):
        with pytest.raises(UsageError, match=name):
            getattr(model, name)()


def test_parts_of_torchs_reducer_are_refused_by_name(pools: Pools) -> None:
    pools.run(2, refused_members)


def use_torch_2_15_additions(_: World) -> None:
    model = DistributedDataParallel(net(), lazy_bucket_allocation=False)
    assert model.lazy_bucket_allocation is False
    with pytest.raises(UsageError, match=r"lazy_bucket_allocation=True is not supported: .*; leave it out"):
        DistributedDataParallel(net(), lazy_bucket_allocation=True)
    model.require_manual_backward_finalization = False
    with pytest.raises(
        UsageError, match=r"require_manual_backward_finalization=True is not supported: .*; leave it out"
    ):
        model.require_manual_backward_finalization = True
    assert (model.require_manual_backward_finalization, model.should_finalize_after_backward) == (False, False)
    with pytest.raises(UsageError, match="finalize_backward"):
        model.finalize_backward()


@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_2_15_additions_exist_with_every_torch(pools: Pools, ranks: int) -> None:
    # Scripts for torch 2.15 failed with a TypeError for the argument and an AttributeError in torch's own method.
    pools.run(ranks, use_torch_2_15_additions)


def wrap_with_optimizer_in_backward(world: World) -> None:
    with pytest.raises(UsageError, match="_register_fused_optim drives torch's own reducer"):
        DistributedDataParallel(nn.Linear(2, 2))._register_fused_optim(torch.optim.SGD, lr=0.1)
    net = nn.Linear(2, 2)
    step_in_backward(torch.optim.SGD, net.parameters(), 0.1)
    with pytest.raises(UsageError, match="'weight' has an optimizer that steps in backward"):
        DistributedDataParallel(net)


def test_optimizers_stepping_in_backward_are_refused(pools: Pools) -> None:
    pools.run(2, wrap_with_optimizer_in_backward)
