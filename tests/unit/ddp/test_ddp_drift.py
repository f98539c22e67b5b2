"""Weights that depend on each rank's own samples are refused by name; equal changes are allowed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.world import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import ReplicaMismatch, UsageError, WrongComputation
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


def outcome(world: World, step: Step, build: Callable[[], nn.Module]) -> str:
    """Return the first error of 8 steps; without an error the replicas must be equal."""
    module = build()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
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


def test_advised_rescaling_after_the_step_equals_max_norm() -> None:
    torch.manual_seed(0)
    advised, limited = nn.Embedding(5, 3), nn.Embedding(5, 3, max_norm=1.0)
    advised.weight.data = torch.renorm(advised.weight.data, 2, 0, 1)
    limited.load_state_dict(advised.state_dict())
    for _ in range(3):
        for layer in (advised, limited):
            layer(torch.tensor([0, 2, 2])).sum().backward()
            layer.weight.data.add_(layer.weight.grad)  # type: ignore[arg-type]
            layer.weight.grad = None
        advised.weight.data.copy_(torch.renorm(advised.weight.data, 2, 0, 1))
    limited(torch.arange(5))  # rescales the rows
    torch.testing.assert_close(advised.weight, limited.weight)


def warnings_of(world: World, kind: Any) -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(kind(30, 4, scale_grad_by_freq=True))
    return [(str(warning.message), warning.filename) for warning in caught]


@pytest.mark.parametrize("kind", LOOKUPS)
def test_scale_grad_by_freq_warns_on_several_ranks(pools: Pools, kind: Any) -> None:
    assert pools.run(1, warnings_of, kind) == [[]]
    [[(message, place)], nothing] = pools.run(2, warnings_of, kind)
    assert "scale_grad_by_freq=True" in message
    assert place == __file__
    assert nothing == []


class FunctionalNorm(nn.Module):
    """Rescales the rows it reads, without using a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Parameter(torch.randn(32, 3))

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.rows, max_norm=0.5).square().sum(-1) @ torch.arange(1.0, 3.0)


def train_functional(world: World) -> str:
    model = DistributedDataParallel(FunctionalNorm(), virtual_ranks=4, check_compute_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    index = torch.randint(0, 32, (64, 2), generator=torch.Generator().manual_seed(1))
    try:
        for x in accumulate(model, DataLoader(index, 16)):
            model(x).mean().backward()
            if model.do_sync:
                optimizer.step()
                optimizer.zero_grad()
    except (WrongComputation, ReplicaMismatch) as error:
        return str(error)
    return ""


def test_compute_check_suspects_the_forward_before_faulty_memory(pools: Pools) -> None:
    for message in pools.run(2, train_functional):
        assert "'rows'" in message
        assert message.index("forward") < message.index("faulty memory")


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
