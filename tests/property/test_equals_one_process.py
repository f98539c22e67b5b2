"""Promise: gradients and weights equal a training in one process on the global batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from drawn import draws
from models import chain
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from twins import (
    INPUTS,
    OUTPUTS,
    PATTERNS,
    Case,
    ChannelsLast,
    Frozen,
    Mixed,
    Odd,
    Parts,
    Pools,
    Tied,
    global_batch,
    no_warning_about_cycles,
    non_reentrant,
    reentrant,
    same_gradients,
    same_weights,
    single_precision,
    summed_loss,
    train_beside_twin,
)

TINY = 1e-4  # MiB, about 13 float64: many buckets
BFLOAT16 = 5e-2  # relative; bfloat16 has 8 bits
WINDOWS = ["both", "backward", "accumulate", "sync_gradients"]
# A failure ends the ranks, so each example of shrinking would have to start new ones.
no_shrinking = draws(12, shrinks=False)


def train_cases(world: World, cases: list[Case]) -> None:
    for case in cases:
        try:
            train_beside_twin(world, case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


# -- splitting the batch -----------------------------------------------------------------------------------------------


def test_uneven_batches_and_empty_slices(pools: Pools) -> None:
    pools.run(4, train_cases, [Case(batches=(12, 11, 7, 1, 5, 2)), Case(batches=(1, 1, 2, 9, 1))])


@pytest.mark.parametrize(("window", "micros"), [*((window, 3) for window in WINDOWS), ("both", 1)])
def test_accumulation_crossed_with_unused_parameters(pools: Pools, window: str, micros: int) -> None:
    cases = [Case(pattern=pattern, micros=micros, window=window, batches=(12, 9, 13, 1, 8)) for pattern in PATTERNS]
    pools.run(2, train_cases, cases)


@pytest.mark.slow
def test_unused_parameters_on_more_ranks(pools: Pools) -> None:
    pools.run(3, train_cases, [Case(pattern=pattern, options={"bucket_cap_mb": TINY}) for pattern in PATTERNS])


@no_shrinking
@given(
    size=st.sampled_from([2, 2, 3]),
    case=st.builds(
        Case,
        build=st.sampled_from([Parts, reentrant, non_reentrant, Tied, Frozen, Odd, ChannelsLast, Mixed]),
        pattern=st.sampled_from(list(PATTERNS)),
        batches=st.lists(st.integers(1, 14), min_size=2, max_size=5).map(tuple),
        micros=st.sampled_from([1, 2, 3, 4]),
        window=st.sampled_from(WINDOWS),
        set_to_none=st.booleans(),
        optimizer=st.sampled_from(["sgd", "adamw"]),
        options=st.fixed_dictionaries({"bucket_cap_mb": st.sampled_from([TINY, 1e-3, 25.0])}),
        rtol=st.just(1e-8),
    ),
)
def test_any_combination(pools: Pools, size: int, case: Case) -> None:
    if case.build is Frozen and case.pattern == "no part at all on rank 0":
        case = replace(case, pattern="all parts")  # Frozen without any part has no gradients
    if case.build is Mixed:  # AdamW divides by tiny second moments, which magnifies bfloat16 rounding
        case = replace(case, optimizer="sgd", batches=case.batches[:2], rtol=BFLOAT16)
    pools.run(size, train_cases, [case])


# -- kinds of models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Tied, Frozen, Odd, ChannelsLast, single_precision, Mixed])
def test_models(pools: Pools, build: Any) -> None:
    cap = {"bucket_cap_mb": TINY}
    rtol = {single_precision: 1e-4, Mixed: BFLOAT16}.get(build, 1e-9)
    pools.run(2, train_cases, [Case(build, set_to_none=n == 1, micros=n, rtol=rtol, options=cap) for n in (1, 2)])


@pytest.mark.slow
@pytest.mark.parametrize(("build", "cap"), [(reentrant, TINY), (non_reentrant, 25.0)])
def test_activation_checkpointing(pools: Pools, build: Any, cap: float) -> None:
    """With `reentrant`, every parameter is inside a checkpoint; "a part twice" runs one block twice."""
    patterns = ("all parts", "a part twice", "a part twice on rank 0", "unused on rank 0", "other parts on other ranks")
    options = {"bucket_cap_mb": cap}
    cases = [
        Case(build, pattern, micros=micros, set_to_none=micros == 1, options=options)
        for pattern in patterns
        for micros in (1, 2)
    ]
    pools.run(2, train_cases, cases)


# -- unusual backwards -------------------------------------------------------------------------------------------------


def net(inputs: int = INPUTS, outputs: int = OUTPUTS) -> nn.Module:
    return chain(inputs, 7, 7, outputs, dtype=torch.float64)


class Pair:
    """A wrapped model on this rank's slice and its twin on the whole batch, trained by the same functions."""

    def __init__(self, world: World, build: Any = net, **options: Any) -> None:
        torch.manual_seed(0)
        self.world = world
        self.module = build()
        self.twin = copy.deepcopy(self.module)
        self.model = DistributedDataParallel(
            self.module, **{"bucket_cap_mb": TINY, "unused_parameters": "allow", **options}
        )
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.module, self.twin)]

    def batch(self, step: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return this rank's slice and the whole batch."""
        x, y = global_batch(step, 4 * self.world.size)
        mine = slice(4 * self.world.rank, 4 * self.world.rank + 4)
        return (x[mine], y[mine]), (x, y)

    def step(self, where: str = "") -> None:
        same_gradients(self.module, self.twin, where=where)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_weights(self.module, self.twin, where=where)


def mean_loss(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y) ** 2).mean()


def run_both(world: World, do: Any, build: Any = net, steps: int = 4) -> None:
    """Train with ``do(model, x, y)``, which runs forward and backward of a step with mean losses."""
    for cap in (TINY, 25.0):
        pair = Pair(world, build, bucket_cap_mb=cap)
        for step in range(steps):
            mine, whole = pair.batch(step)
            do(pair.model, *mine)
            do(pair.twin, *whole)
            pair.step(f"step {step}")


def plain(model: nn.Module, x: Tensor, y: Tensor) -> None:
    mean_loss(model(x), y).backward()


def gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (mean_loss(out, y) + (slope**2).sum(1).mean()).backward()


def create_graph(model: nn.Module, x: Tensor, y: Tensor) -> None:
    with no_warning_about_cycles():
        mean_loss(model(x), y).backward(create_graph=True)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()


def grad_of_parameters_first(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = mean_loss(model(x), y)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def grad_of_inputs_first(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    loss = mean_loss(model(x), y)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def some_inputs_only(model: nn.Module, x: Tensor, y: Tensor) -> None:
    mean_loss(model(x), y).backward(inputs=list(model.parameters())[1:3])


def two_forwards(model: nn.Module, x: Tensor, y: Tensor) -> None:
    (mean_loss(model(x), y) + model(x + 1).sin().mean()).backward()


def backward_twice(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = mean_loss(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def in_evaluation_mode(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.eval()
    mean_loss(model(x), y).backward()
    model.train()


def through_a_hook_that_scales(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    out.register_hook(lambda gradient: gradient * 2)
    mean_loss(out, y).backward()


STEPS = [
    plain, gradient_penalty, create_graph, grad_of_parameters_first, grad_of_inputs_first, some_inputs_only,
    two_forwards, backward_twice, in_evaluation_mode, through_a_hook_that_scales,
]  # fmt: skip


@pytest.mark.parametrize("do", STEPS, ids=lambda do: do.__name__)
def test_unusual_backwards(pools: Pools, do: Any) -> None:
    pools.run(2, run_both, do)


def step_after_bypassing_the_wrapper(world: World, whole: bool) -> str:
    torch.manual_seed(0)
    model = DistributedDataParallel(net(), unused_parameters="allow")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = global_batch(1, 6)
    for _ in range(2):  # in the first step every parameter still has a hook
        mean_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    mean_loss(model.module(x) if whole else model.module[4](torch.cat([x, x[:, :2]], 1)), y).backward()
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    model.sync_gradients()
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("whole", [False, True])
def test_step_over_gradients_bypassing_the_wrapper_is_refused(pools: Pools, whole: bool) -> None:
    """A wrapper acts only in backwards of its own forwards, because other wrappers may share its parameters."""
    for message in pools.run(2, step_after_bypassing_the_wrapper, whole):
        assert ("'0.weight'" if whole else "'4.weight'") in message
        assert "not averaged" in message


# -- outputs of every kind ---------------------------------------------------------------------------------------------


@dataclass
class Output:
    loss: Tensor
    extra: dict[str, list[Tensor]]


class Several(nn.Module):
    """Two outputs, one of them nested."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = net(), nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)

    def forward(self, x: Tensor) -> Output:
        return Output(self.left(x), {"right": [self.right(x)]})


def take(output: Output) -> tuple[Tensor, Tensor]:
    return output.loss, output.extra["right"][0]


def both_outputs(model: nn.Module, x: Tensor, y: Tensor) -> None:
    left, right = take(model(x))
    (mean_loss(left, y) + right.sin().mean()).backward()


def one_output(model: nn.Module, x: Tensor, y: Tensor) -> None:
    mean_loss(take(model(x))[1], y).backward()


def outputs_one_after_the_other(model: nn.Module, x: Tensor, y: Tensor) -> None:
    left, right = take(model(x))
    mean_loss(left, y).backward()
    mean_loss(right, y).backward()


@pytest.mark.parametrize("do", [both_outputs, one_output, outputs_one_after_the_other], ids=lambda do: do.__name__)
def test_several_outputs(pools: Pools, do: Any) -> None:
    """Other kinds of containers are tested in test_ddp_ledger.py."""
    pools.run(2, run_both, do, Several)


# -- freezing ----------------------------------------------------------------------------------------------------------


def freeze_and_thaw(world: World) -> None:
    """Freeze layers after wrapping and thaw them again."""
    pair = Pair(world)
    for step in range(9):
        for module in (pair.module, pair.twin):
            module[2].requires_grad_(not 2 <= step < 7)
            module[0].requires_grad_(not 4 <= step < 6)
        mine, whole = pair.batch(step)
        plain(pair.model, *mine)
        plain(pair.twin, *whole)
        pair.step(f"step {step}")


def test_parameters_frozen_and_thawed_between_steps(pools: Pools) -> None:
    pools.run(2, freeze_and_thaw)


# -- numbers of tokens ------------------------------------------------------------------------------------------------


def train_on_tokens(world: World, counts: list[list[list[int]]]) -> None:
    """Train on numbers of tokens that differ by step, rank and micro-batch, weighted by these numbers."""
    torch.manual_seed(0)
    module = net()
    twin = copy.deepcopy(module)
    model = DistributedDataParallel(module, bucket_cap_mb=TINY)
    for step, by_rank in enumerate(counts):
        total = sum(map(sum, by_rank))
        data = [
            [global_batch(100 * step + 10 * rank + m, count) for m, count in enumerate(micros)]
            for rank, micros in enumerate(by_rank)
        ]
        for x, y in data[world.rank]:
            with model.no_sync(), model.weight(len(x)):
                summed_loss(model(x), y).backward()
        model.sync_gradients()
        loss = sum(summed_loss(twin(x), y) for micros in data for x, y in micros) / max(total, 1)
        loss.backward()
        same_gradients(module, twin, 1e-9, f"step {step}")
        for trained in (model, twin):
            trained.zero_grad()


@no_shrinking
@given(
    st.lists(
        st.tuples(*[st.lists(st.integers(0, 9), min_size=1, max_size=3) for _ in range(2)]).map(list),
        min_size=1,
        max_size=4,
    )
)
def test_random_numbers_of_tokens(pools: Pools, counts: list[list[list[int]]]) -> None:
    pools.run(2, train_on_tokens, counts)


# -- losses of derivatives ---------------------------------------------------------------------------------------------


Models = tuple[nn.Module, nn.Module]


def build(activation: type[nn.Module]) -> nn.ModuleList:
    """Build two nets with a shared body. Derivatives of a ReLU net do not depend on its biases."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 4), activation())
    return nn.ModuleList(nn.Sequential(body, nn.Linear(4, 1)) for _ in range(2)).double()


def slope(model: nn.Module, x: Tensor) -> Tensor:
    """Return a penalty on the model's derivatives; the output is freed on return."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.square().sum(1) - 1).square().mean()


def penalty_alone(models: Models, x: Tensor) -> None:
    slope(models[0], x).backward()


def penalty_after_plain_losses(models: Models, x: Tensor) -> None:
    models[0](x).mean().backward()
    (-models[0](x + 1).mean()).backward()
    slope(models[0], x).backward()


def penalty_taken_before_a_plain_loss(models: Models, x: Tensor) -> None:
    penalty = slope(models[0], x)
    models[0](x).square().mean().backward()
    penalty.backward()


def residual_beside_data(models: Models, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    out = models[0](x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out - 1).square().mean().backward(retain_graph=True)
    gradient.square().mean().backward()


def accumulated(models: Models, x: Tensor) -> None:
    model = models[0]
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        slope(model, x).backward()
    slope(model, x + 1).backward()


def two_models_with_a_shared_body(models: Models, x: Tensor) -> None:
    (slope(models[0], x) + slope(models[1], x + 1)).backward()


def one_of_two_with_a_shared_body(models: Models, x: Tensor) -> None:
    slope(models[0], x).backward()
    slope(models[1], x).backward()


def penalty_on_gradients(models: Models, x: Tensor) -> None:
    """Penalize the gradients of the whole batch, averaged by a differentiable collective."""
    model = models[0]
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    if isinstance(model, DistributedDataParallel):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            gradients = tuple(all_reduce(gradient.contiguous()) / dist.get_world_size() for gradient in gradients)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


LOSSES = [
    penalty_on_gradients, penalty_alone, penalty_after_plain_losses, penalty_taken_before_a_plain_loss,
    residual_beside_data, accumulated, two_models_with_a_shared_body, one_of_two_with_a_shared_body,
]  # fmt: skip


def compare_derivatives(world: World, loss: Callable[[Models, Tensor], None]) -> None:
    bare = build(nn.ReLU if loss in (penalty_alone, one_of_two_with_a_shared_body) else nn.Tanh)
    twin = copy.deepcopy(bare)
    models = tuple(DistributedDataParallel(module, unused_parameters="allow") for module in bare)
    optimizers = [torch.optim.SGD(module.parameters(), 0.05, momentum=0.9) for module in (bare, twin)]
    for step in range(4):
        batch = torch.randn(4 * world.size, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(models, batch[world.rank :: world.size])
        loss((twin[0], twin[1]), batch)
        same_gradients(bare, twin, where=f"{loss.__name__}, step {step}:")
        for optimizer in optimizers:
            optimizer.step()
        same_weights(bare, twin, where=f"{loss.__name__}, step {step}:")


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_of_derivatives_equal_one_process(pools: Pools, loss: Callable[[Models, Tensor], None]) -> None:
    """The gradients stayed local if backward reached no output of the wrapper, for example with a WGAN-GP penalty."""
    pools.run(2, compare_derivatives, loss)


def wrap_again(world: World) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    old = DistributedDataParallel(model)
    old(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    model.zero_grad()
    twin, new = copy.deepcopy(model), DistributedDataParallel(model, unused_parameters="allow")
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slope(new, batch[world.rank :: world.size]).backward()
    slope(twin, batch).backward()
    same_gradients(model, twin)


def test_derivatives_are_averaged_while_an_older_wrapper_is_alive(pools: Pools) -> None:
    # The wrappers share all parameters, and no output shows which wrapper's backward runs.
    pools.run(2, wrap_again)


def create_graph_warnings(world: World) -> list[list[str]]:
    """Return the warnings of three backwards with ``create_graph=True``; only the first, local one keeps a graph."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 1).double())
    warned = []
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught, model.no_sync() if step == 0 else nullcontext():
            warnings.simplefilter("always")
            model(torch.ones(2, 6, dtype=torch.float64) * (world.rank + 1)).square().sum().backward(create_graph=True)
        warned.append([f"{Path(w.filename).name}: {w.message}" for w in caught if "p.grad" in str(w.message)])
        assert all(parameter.grad.requires_grad == (step == 0) for parameter in model.parameters())
        model.zero_grad()
    return warned


def test_create_graph_warns_that_averages_are_not_differentiable(pools: Pools) -> None:
    # As in torch DDP, p.grad is a constant; a penalty on it failed with torch's "does not require grad".
    first, second = pools.run(2, create_graph_warnings)
    assert [len(warned) for warned in first] == [0, 1, 0]
    assert first[1][0].startswith("test_equals_one_process.py: after backward(create_graph=True) p.grad is the average")
    assert "torch.autograd.grad(loss, parameters, create_graph=True)" in first[1][0]
    assert second == [[], [], []]
