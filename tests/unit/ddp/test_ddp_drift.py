"""Replicas that would drift apart are refused by name: weights that depend on local samples, and optimizer settings.

Equal changes are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from insides import PIECE, drift, quick_digest
from models import chain
from paceline import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import ReplicaMismatch, UsageError
from paceline.optim import ShardedOptimizer
from paceline.testing import assert_replicas_equal
from ranks import RankFailed
from twins import Pools

Step = Callable[[DistributedDataParallel, torch.optim.Optimizer, Tensor], None]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def samples(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.double)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


def outcome(
    world: World, step: Step, build: Callable[[], nn.Module], make: Callable[[list[nn.Parameter]], Optimizer] = sgd
) -> str:
    """Return the first error of 8 steps; without an error the replicas must be equal."""
    module = build()
    model = DistributedDataParallel(module)
    optimizer = make([p for p in module.parameters() if p.requires_grad])
    for number in range(8):
        try:
            step(model, optimizer, samples(world.rank, number))
        except UsageError as error:
            return f"{type(error).__name__}: {error}"
    assert_replicas_equal(model)
    return ""


# -- a backward bypassing the wrapper after the synchronized one -------------------------------------------------------


def whole_module(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    model.module(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def head_alone(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    model.module.get_submodule("2")(torch.cat([x, x], 1)[:, :8]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def equal_penalty(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def local_perturbation(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """SAM with a local ascent step; weights differ while the synchronized backward runs."""
    with model.no_sync():
        model(x).square().mean().backward()
    ascents = [0.01 * p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for parameter, ascent in zip(model.parameters(), ascents, strict=True):
            parameter.add_(ascent)
    model.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter, ascent in zip(model.parameters(), ascents, strict=True):
            parameter.sub_(ascent)
            parameter.copy_(parameter.round(decimals=12))  # a + b - b is not a
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("step", "name"), [(whole_module, "parameter '0.bias'"), (head_alone, "parameter '2.weight'")])
def test_second_backward_bypassing_the_wrapper_is_refused(pools: Pools, step: Step, name: str) -> None:
    for message in pools.run(2, outcome, step, build):
        assert message.startswith(f"ReplicaMismatch: after optimizer step 1, {name}")
        assert "a backward pass that bypasses the wrapper" in message


def head_alone_once(world: World) -> tuple[int, str]:
    """Call only the head after the synchronized backward of step 8, between the comparisons of steps 7 and 15."""
    module = build()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number in range(1, 15):
        try:
            (head_alone if number == 8 else update)(model, optimizer, samples(world.rank, number))
        except ReplicaMismatch as error:
            return number, str(error)
    return 15, ""


def test_single_bypassing_backward_is_refused_two_steps_later(pools: Pools) -> None:
    for number, message in pools.run(2, head_alone_once):
        assert number == 10
        assert "parameter '2.weight'" in message


def perturbation_beside_another_graph(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: Tensor
) -> None:
    """Only rank 0 bypasses the wrapper, for example for a saliency map, so only rank 0 requests a comparison."""
    if dist.get_rank() == 0:
        torch.autograd.grad(model.module(x).sum(), list(model.parameters()))
    local_perturbation(model, optimizer, x)


@pytest.mark.parametrize("step", [update, equal_penalty, local_perturbation, perturbation_beside_another_graph])
def test_equal_gradient_changes_and_temporary_weight_changes_are_allowed(pools: Pools, step: Step) -> None:
    assert pools.run(2, outcome, step, build) == ["", ""]


def train_different_replicas(world: World) -> None:
    module = build()
    next(module.parameters()).data += world.rank
    model = DistributedDataParallel(module, init_sync=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number in range(4):
        update(model, optimizer, samples(world.rank, number))


def test_replicas_may_differ_with_init_sync_false(pools: Pools) -> None:
    pools.run(2, train_different_replicas)


def train_virtual_ranks(world: World, bypasses: str) -> str:
    module = build()
    model = DistributedDataParallel(module, virtual_ranks=4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    try:
        for x in accumulate(model, DataLoader(torch.cat([samples(0, step) for step in range(8)]), 8)):
            model(x).square().mean().backward()
            if bypasses == "always" or (bypasses == "at last" and model.do_sync):
                module(x).mean().backward()
            if model.do_sync:
                optimizer.step()
                optimizer.zero_grad()
    except UsageError as error:
        return str(error)
    return ""


def test_virtual_ranks_refuse_a_backward_bypassing_the_wrapper(pools: Pools) -> None:
    """Its share depended on whether it followed a rank's last slice, so results depended on the number of ranks."""
    assert pools.run(2, train_virtual_ranks, "never") == ["", ""]
    assert all("parameter '0.bias'" in message for message in pools.run(2, train_virtual_ranks, "at last"))
    for size in 1, 2:
        for message in pools.run(size, train_virtual_ranks, "always"):
            assert "the gradient of '0.weight' was changed after a slice's backward" in message


# -- manual updates in hooks -------------------------------------------------------------------------------------------


def update_in_hooks(world: World, drops: bool) -> str:
    module = build()

    def descend(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)
        if drops:
            parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(descend)

    def step(model: nn.Module, _optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    return outcome(world, step, lambda: module)


@pytest.mark.parametrize("drops", [True, False])
def test_an_update_in_a_post_accumulate_hook_is_refused(pools: Pools, drops: bool) -> None:
    for message in pools.run(2, update_in_hooks, drops):
        assert "parameter '0.bias' (and 3 more) has different bits on rank 1" in message
        assert "a hook" in message


# -- forwards that write to weights ------------------------------------------------------------------------------------


class Codebook(nn.Module):
    """Moves frozen weights toward the samples, like an EMA codebook."""

    def __init__(self, *, through_data: bool, ignored: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._ddp_params_and_buffers_to_ignore = ["codes"] if ignored else []
        self.layer, self.through_data = nn.Linear(6, 2).double(), through_data
        self.codes = nn.Parameter(torch.zeros(2).double(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        with torch.no_grad():
            (self.codes.data if self.through_data else self.codes).lerp_(out.mean(0), 0.1)
        return out - self.codes


@pytest.mark.parametrize("through_data", [False, True])
def test_frozen_codebook_updated_in_forward_is_refused_unless_ignored(pools: Pools, through_data: bool) -> None:
    for message in pools.run(2, outcome, update, partial(Codebook, through_data=through_data)):
        assert "parameter 'codes' has different bits" in message or "parameter 'codes' (and 2 more)" in message
        assert "module._ddp_params_and_buffers_to_ignore" in message
    with pytest.raises(RankFailed, match="codes"):  # replicas differ, as requested
        pools.run(2, outcome, update, partial(Codebook, through_data=through_data, ignored=True))


LOOKUPS = [nn.Embedding, nn.EmbeddingBag]


def wrap_lookup(world: World, kind: Any, options: dict[str, Any]) -> None:
    module: Any = nn.ModuleDict({"words": kind(30, 4, max_norm=1.0), "head": nn.Linear(4, 1)})
    if world.size == 1 and not options:
        DistributedDataParallel(module)  # allowed on a single rank
        return
    with pytest.raises(UsageError, match=rf"{kind.__name__} 'words' has max_norm=1.*torch.renorm"):
        DistributedDataParallel(module, **options)
    module._ddp_params_and_buffers_to_ignore = ["words.weight"]
    DistributedDataParallel(module)


@pytest.mark.parametrize("kind", LOOKUPS)
def test_embedding_with_max_norm_is_refused_unless_ignored(pools: Pools, kind: Any) -> None:
    pools.run(2, wrap_lookup, kind, {})
    pools.run(1, wrap_lookup, kind, {})
    pools.run(1, wrap_lookup, kind, {"virtual_ranks": 2})


# -- parameters averaged by no wrapper ---------------------------------------------------------------------------------


def train_outside(world: World, how: str) -> str:
    """Train with a parameter outside the module, in the way `how`."""
    module: Any = build()
    outside = nn.Parameter(torch.ones(2).double())
    if how == "ignored":
        module.outside, module._ddp_params_and_buffers_to_ignore = outside, ["outside"]
    model = DistributedDataParallel(module)
    if how == "on the wrapper":
        model.outside = outside
    inside = [p for p in module.parameters() if p is not outside]
    groups = [[*inside], [outside]] if how in ("own optimizer", "other backward") else [[*inside, outside]]
    optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
    for number in range(4):
        x = samples(world.rank, number)
        if how == "other backward":
            (outside * x.mean()).sum().backward()
            outside.grad = outside.grad.clone()  # type: ignore[union-attr]
        with model.no_sync() if how == "accumulated" else nullcontext():
            (model(x) * (1 if how == "other backward" else outside)).square().mean().backward()
        if how == "accumulated":
            (model(x) * outside).square().mean().backward()
        if how == "averaged by hand":
            dist.all_reduce(outside.grad)
            model.gradients_are_averaged()
        try:
            for optimizer in optimizers:
                optimizer.step()
        except UsageError as error:
            return str(error)
        for optimizer in optimizers:
            optimizer.zero_grad()
    return ""


REFUSED = ["same optimizer", "own optimizer", "on the wrapper", "accumulated"]


@pytest.mark.parametrize("how", REFUSED)
def test_gradient_averaged_by_no_wrapper_is_refused(pools: Pools, how: str) -> None:
    place = "parameter 0 of group 0" if how == "own optimizer" else "parameter 4 of group 0"
    for message in pools.run(2, train_outside, how):
        assert f"found a gradient of {place} of SGD, of shape (2,), which is not averaged by any" in message
        assert "gradients_are_averaged()" in message
    assert pools.run(1, train_outside, how) == [""]


@pytest.mark.parametrize("how", ["ignored", "averaged by hand", "other backward"])
def test_rank_local_parameters_and_manual_averages_are_allowed(pools: Pools, how: str) -> None:
    assert pools.run(2, train_outside, how) == ["", ""]


# -- optimizer settings ------------------------------------------------------------------------------------------------


Make = Callable[[nn.Module, int], Optimizer]


def adamw(net: nn.Module, rank: int, **options: Any) -> Optimizer:
    return AdamW(net.parameters(), **{"lr": 0.01} | options)


def with_local_group(net: nn.Module, rank: int) -> Optimizer:
    local = {"params": [nn.Parameter(torch.ones(2))], "lr": 0.1 * (rank + 1)}
    return SGD([{"params": list(net.parameters())}, local], lr=0.01)


def with_key_of_the_program(net: nn.Module, rank: int) -> Optimizer:
    return SGD([{"params": list(net.parameters()), "rank": rank}], lr=0.01)


def in_groups(net: Any, rank: int, last: float = 0.01) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": net[:2].parameters()}, {"params": net[2].parameters(), "lr": last}]
    return SGD(groups[::-1] if rank else groups, lr=0.01)


DIFFERENT: dict[str, tuple[Make, str, Any, str]] = {
    "lr": (adamw, "lr", 0.02, "rank 0 has 0.01, rank 1 has 0.02 as lr in group 0 of AdamW"),
    "betas": (adamw, "betas", (0.8, 0.9), "rank 1 has (0.8, 0.9) as betas in group 0"),
    "lr in a tensor": (lambda net, rank: adamw(net, rank, lr=torch.tensor(0.5)), "lr", 0.25, "rank 1 has 0.25 as lr"),
    "lr of different groups": (in_groups, "lr", 0.5, "rank 0 has 0.01, rank 1 has 0.5 as lr in group 1 of SGD"),
    "lr from NumPy": (adamw, "lr", np.float32(0.5), "rank 1 has 0.5 as lr"),
    "sharded": (lambda net, _: ShardedOptimizer(net.parameters(), SGD, lr=0.5), "lr", 0.25, "rank 1 has 0.25 as lr"),
}
LEGITIMATE: dict[str, Make] = {
    "equal": adamw,
    "a local parameter group": with_local_group,
    "a user-defined key": with_key_of_the_program,
    "numbers of other types": lambda net, rank: adamw(net, rank, lr=1, betas=(0.5, np.float64(0.5) if rank else 0.5)),
    "groups in another order": lambda net, rank: in_groups(net, rank, last=0.02),
    "sharded by hand": lambda net, rank: SGD(net[rank].parameters(), lr=0.01 * (rank + 1)),  # type: ignore[index]
}


def steps_until_refused(world: World, case: str) -> tuple[int, str, bool]:
    make, name, value, _ = DIFFERENT.get(case) or (LEGITIMATE[case], "", None, "")
    net = chain(3, 4, 4, 2)
    model = DistributedDataParallel(net, check_replicas_every=100)
    optimizer = make(nn.Sequential(*(part for part in net if isinstance(part, nn.Linear))), world.rank)
    for step in range(12):
        asked = model._replica.ledger.settings.comparisons_left
        try:
            model(torch.ones(2, 3)).sum().backward()
        except ReplicaMismatch as error:
            return step, str(error), True
        optimizer.step()
        optimizer.zero_grad()
        if name and step == 2 and world.rank == 1:
            group = optimizer.param_groups[0]
            if isinstance(group[name], torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = value
    return 12, "", asked != model._replica.ledger.settings.comparisons_left


@pytest.mark.parametrize("case", DIFFERENT)
def test_differing_setting_is_named_before_it_is_used(pools: Pools, case: str) -> None:
    """A differing learning rate used to be detected many steps later, and without its name."""
    for step, text, _ in pools.run(2, steps_until_refused, case):
        assert step == 3
        assert DIFFERENT[case][-1] in text


@pytest.mark.parametrize("case", LEGITIMATE)
def test_legitimate_differences_in_settings_are_allowed(pools: Pools, case: str) -> None:
    for step, _, asks in pools.run(2, steps_until_refused, case):
        assert step == 12
        assert not asks, "the ranks still exchange their settings"


def class_by_rank(parameters: list[nn.Parameter]) -> Optimizer:
    return (SGD, AdamW)[dist.get_rank()](parameters, lr=0.1, weight_decay=0.0)


def test_replicas_are_compared_when_settings_cannot_be(pools: Pools) -> None:
    for message in pools.run(2, outcome, update, build, class_by_rank):
        assert "different bits on rank 1" in message


# -- the replica check -------------------------------------------------------------------------------------------------


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


@given(st.sampled_from(DTYPES), st.sampled_from([1, 2, 3, 7, 8, 1000, 2 * PIECE + 5]), st.data())
def test_one_flipped_bit_always_changes_the_digest(dtype: torch.dtype, count: int, data: Any) -> None:
    tensor = torch.arange(count).to(dtype)
    before = int(quick_digest(tensor))
    bytes_ = torch.view_as_real(tensor).view(-1).view(torch.uint8) if dtype.is_complex else tensor.view(torch.uint8)
    at = data.draw(st.integers(0, len(bytes_) - 1))
    bytes_[at] ^= 1 << data.draw(st.integers(0, 7))
    assert int(quick_digest(tensor)) != before


@given(st.integers(2, 5000), st.data())
def test_swapping_values_changes_the_digest(count: int, data: Any) -> None:
    powers = 2.0 ** (torch.arange(count) % 200 - 100)  # differ only in high bits
    first, second = data.draw(st.tuples(*[st.integers(0, count - 1)] * 2))
    swapped = powers.clone()
    swapped[[first, second]] = powers[[second, first]]
    same = bool(torch.equal(powers, swapped))
    assert (int(quick_digest(powers)) == int(quick_digest(swapped))) == same


def test_digest_depends_only_on_the_elements() -> None:
    tensor = torch.randn(6, 5)
    digest = int(quick_digest(tensor))
    assert int(quick_digest(tensor.t().contiguous().t())) == digest
    shifted = torch.randn(31)
    shifted[1:] = tensor.view(-1)
    assert int(quick_digest(shifted[1:].view(6, 5))) == digest  # not aligned to a word
    assert int(quick_digest(torch.zeros(0))) == 0


def test_majority_is_assumed_correct() -> None:
    names = ["a", "b"]
    assert drift(names, [[2, 3]] * 3, 7) is None
    message = drift(names, [[5, 3], [2, 3], [2, 3]], 7)
    assert message is not None
    assert "after optimizer step 7, parameter 'a' has different bits on rank 0 than on rank 1" in message
    both = drift(names, [[2, 3], [6, 4]], 7)
    assert both is not None
    assert "parameter 'a' (and 1 more) has different bits on rank 1 than on rank 0" in both


def train(world: World, every: int, change: str, rank: int) -> tuple[str, int]:
    """Train 10 steps, with a change on one rank before the 4th; return the error and its step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = DistributedDataParallel(module, check_replicas_every=every, forward_sync_buffers=change != "statistics")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(10):
        if step == 3 and world.rank == rank:
            corrupt(change, module, optimizer)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + world.rank))
        optimizer.zero_grad()
        try:
            model(x).sin().sum().backward()
        except ReplicaMismatch as error:
            return str(error), step
        optimizer.step()
    return "", step


def corrupt(change: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if "added" in change:
        module.register_parameter("added", nn.Parameter(torch.ones(2), requires_grad=False))
    if "bit" in change:
        module[0].weight.data.view(torch.int32)[1, 2] ^= 1
    elif change == "swap":
        module[2].weight.data[:] = module[2].weight.data.flip(0)
    elif change == "state":
        optimizer.state[module[2].bias]["exp_avg"].view(torch.int32)[0] ^= 1 << 22  # the effect of a low bit would fade


@pytest.mark.parametrize(
    ("change", "parameter", "every", "detected"),
    [
        ("bit", "parameter '0.weight'", 1, 3),
        ("added, bit", "parameter '0.weight'", 1, 3),
        ("swap", "parameter '2.weight'", 2, 4),
        ("state", "parameter '2.bias'", 5, 5),
    ],
)
def test_a_flipped_bit_is_found_within_the_interval_on_every_rank(
    pools: Pools, change: str, parameter: str, every: int, detected: int
) -> None:
    for message, step in pools.run(2, train, every, change, 1):
        assert step == detected
        assert parameter in message
        assert f"after optimizer step {detected}" in message
        assert "on rank 1 than on rank 0" in message


def test_odd_one_out_of_three_ranks_is_named(pools: Pools) -> None:
    for message, _ in pools.run(3, train, 1, "bit", 0):
        assert "has different bits on rank 0 than on rank 1" in message


@pytest.mark.parametrize("change", ["nothing", "statistics", "added"])
def test_no_false_alarm(pools: Pools, change: str) -> None:
    """Running statistics differ without a broadcast; a frozen parameter may exist on only one rank."""
    assert pools.run(2, train, 2, change, 1) == [("", 9)] * 2
