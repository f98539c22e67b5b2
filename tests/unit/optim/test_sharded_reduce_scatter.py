"""With ``reduce_scatter=True`` each rank has the averages of its own pieces alone, and trains with the same bits."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_sharded_optimizer import STEPS, Net, Rowwise, batch, is_exact, step_once, trained, weights, wrap
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import paceline
from paceline.core.processes.world import World
from paceline.ddp.extensions.scattered_gradients import is_scattered
from paceline.errors import UsageError
from paceline.optim import ShardedOptimizer
from twins import Pools

SCATTERED = {"reduce_scatter": True}
CASES: dict[str, Any] = {
    "plain": (AdamW, {"lr": 1e-2, "fused": True}, "plain", SCATTERED),
    "groups": (Adam, {"lr": 1e-2, "foreach": True, "amsgrad": True}, "groups", SCATTERED),
    "accumulated": (SGD, {"lr": 0.1, "momentum": 0.9}, "accumulated", SCATTERED),
    "sparse": (SGD, {"lr": 0.1}, "sparse", SCATTERED),
    "added": (Adagrad, {"lr": 0.1}, "added", SCATTERED),
    "bf16": (RMSprop, {"lr": 1e-3}, "bf16", SCATTERED),
    "by tensor": (Rowwise, {"lr": 1e-2}, "short", {**SCATTERED, "by": "tensor"}),
}


@pytest.mark.parametrize(
    ("size", "case"),
    [
        *((2, case) for case in CASES),
        (1, "plain"),
        (3, "groups"),
        pytest.param(4, "accumulated", marks=pytest.mark.slow),
        pytest.param(4, "by tensor", marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_of_whole_gradients(pools: Pools, size: int, case: str) -> None:
    assert all(pools.run(size, is_exact, *CASES[case]))


def many_buckets(world: World, how: str) -> tuple[bool, int]:
    """Train with buckets that are smaller than some parameters, in bf16 on the way, or checked for NaN."""
    results, scattered = [], 0
    options: dict[str, Any] = {"bf16": {"reduce_dtype": torch.bfloat16}, "finite": {"check_finite": True}}.get(how, {})
    for is_scattering in (False, True):
        torch.manual_seed(3)
        net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))
        model = paceline.DistributedDataParallel(net, bucket_cap_mb=1, **options)
        optimizer = ShardedOptimizer(model, AdamW, lr=1e-3, reduce_scatter=is_scattering)
        generator = torch.Generator().manual_seed(world.rank)
        for step in range(3):
            with model.weight(world.rank + 1):
                model(torch.randn(2, 300, generator=generator)).square().sum().backward()
            if is_scattering:
                scattered += sum(is_scattered(parameter.grad) for parameter in model.parameters())
            if step % 2:
                optimizer.zero_grad()
                model(torch.randn(2, 300, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
        del optimizer
        gc.collect()
    return all(map(torch.equal, *results)), scattered


@pytest.mark.parametrize("how", ["plain", "bf16", "finite"])
def test_weights_and_dropped_gradients_change_nothing(pools: Pools, how: str) -> None:
    assert pools.run(2, many_buckets, how) == [(True, 3 * 12)] * 2


def over_gloo(world: World) -> float:
    """How far weights are from those of whole gradients; the order of sums is Gloo's."""
    results = []
    for is_scattering in (False, True):
        group = torch.distributed.new_group(backend="gloo")
        model = paceline.DistributedDataParallel(Net(), process_group=group, find_unused_parameters=True)
        optimizer = ShardedOptimizer(model, SGD, lr=0.1, momentum=0.9, reduce_scatter=is_scattering)
        for step in range(9):
            step_once(model, optimizer, step, world.rank)
        results.append(weights(model))
    return max(float((one - other).abs().max()) for one, other in zip(*results, strict=True) if one.numel())


@pytest.mark.parametrize("size", [2, 3])
def test_it_works_over_gloo(pools: Pools, size: int) -> None:
    assert max(pools.run(size, over_gloo)) < 1e-5


def fewer_parameters_than_ranks(world: World) -> list[float]:
    group = torch.distributed.new_group(backend="gloo")
    model = paceline.DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    optimizer = ShardedOptimizer(model, SGD, lr=0.1, by="tensor", reduce_scatter=True)
    for _ in range(2):
        with model.weight(1 + world.rank):
            model(torch.full((1 + world.rank, 1), 6.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.full((1, 1), 3.0 * world.rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(weight) for weight in weights(model)]


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_may_own_nothing(pools: Pools, size: int) -> None:
    torch.manual_seed(0)
    first, *others = pools.run(size, fewer_parameters_than_ranks)
    assert all(other == first for other in others)


def clipped(world: World, norm_type: float) -> tuple[float, float]:
    """How far norms and weights are from those of whole gradients."""
    norms: list[list[float]] = []
    results = []
    for is_scattering in (False, True):
        model = wrap(world, Net())
        # AdamW would divide by gradients near zero, and make much of how a norm was rounded.
        optimizer = ShardedOptimizer(model, SGD, lr=0.1, momentum=0.9, reduce_scatter=is_scattering)
        norms.append([])
        for step in range(9):
            tokens, target = batch(step, world.rank)
            F.cross_entropy(model(tokens, step).float(), target).backward()
            norms[-1].append(float(paceline.clip_grad_norm_(model, 0.05, norm_type)))
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
        (model(*batch(9, world.rank)[:1], 9).sum() * float("inf")).backward()
        with pytest.raises(RuntimeError, match="norm"):
            paceline.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    apart = max(float((one - other).abs().max()) for one, other in zip(*results, strict=True) if one.numel())
    return max(abs(one / other - 1) for one, other in zip(*norms, strict=True)), apart


@pytest.mark.parametrize(("size", "norm_type"), [(2, 2.0), (3, 2.0), (2, float("inf")), (2, 1.0)])
def test_the_norm_is_that_over_all_ranks(pools: Pools, size: int, norm_type: float) -> None:
    for norms, apart in pools.run(size, clipped, norm_type):
        assert norms < 1e-5
        assert apart < 1e-5


def refused(function: Any) -> str:
    with pytest.raises(UsageError) as caught:
        function()
    return str(caught.value)


def refusals(world: World) -> list[str]:
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(nn.Linear(40, 40))
    optimizer = ShardedOptimizer(model, AdamW, lr=0.1, reduce_scatter=True)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.ones(2, 40)

    def backward() -> None:
        scaler.scale(model(x).sum()).backward()

    backward()
    weight = model.module.weight
    before = weights(model)
    assert str(weight.grad) == "ScatteredGradient(shape=(40, 40), dtype=torch.float32, device=cpu)"
    uses = [
        lambda: weight.grad.norm(),
        lambda: weight.grad.add_(1),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: SGD(model.parameters(), lr=0.1).step(),
        lambda: model.gradients_are_averaged(),
        backward,
    ]
    found = [refused(use) for use in uses]
    assert all(map(torch.equal, before, weights(model)))
    optimizer.step()  # with the averages that were there before the backward that was refused
    assert not torch.equal(before[0], weight)
    before = weights(model)
    optimizer.zero_grad()
    kept = []
    for _ in range(2):
        backward()
        kept.append(weight.grad)
        optimizer.zero_grad()
    backward()
    weight.grad = kept[0]
    found.append(refused(optimizer.step))
    optimizer.zero_grad()
    assert all(map(torch.equal, before, weights(model)))
    return found


def test_whatever_reads_a_scattered_gradient_is_refused(pools: Pools) -> None:
    for *found, kept in pools.run(2, refusals):
        assert all("reduce_scatter=True" in text and "\n" not in text for text in found), found
        assert "earlier backward" in kept


def not_fitting(world: World) -> list[str]:
    net = nn.Linear(8, 8)
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    ring = paceline.DistributedDataParallel(copy.deepcopy(net), algorithm="ring")
    hooked = paceline.DistributedDataParallel(copy.deepcopy(net))
    hooked.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
    make = partial(ShardedOptimizer, optimizer_class=SGD, lr=0.1, reduce_scatter=True)
    return [refused(partial(make, model)) for model in (theirs, ring, hooked)]


def test_wrappers_that_average_otherwise_are_refused(pools: Pools) -> None:
    for theirs, ring, hooked in pools.run(2, not_fitting):
        assert "needs paceline.DistributedDataParallel" in theirs
        assert "'ring'" in ring
        assert "a communication hook" in hooked


def one_after_the_other(world: World) -> list[bool]:
    """Make optimizers of one model in turn, each of which decides anew how gradients come."""
    model = wrap(world, Net())
    found = []
    for is_scattering in (True, False, True):
        optimizer = ShardedOptimizer(model, AdamW, lr=1e-2, reduce_scatter=is_scattering)
        for step in range(3):
            tokens, target = batch(step, world.rank)
            F.cross_entropy(model(tokens, step).float(), target).backward()
            found.append(is_scattered(model.module.hidden.weight.grad) is is_scattering)
            optimizer.step()
            optimizer.zero_grad()
        del optimizer
        gc.collect()
    part = list(model.parameters())[:4]
    optimizer = ShardedOptimizer(part, AdamW, lr=1e-2, reduce_scatter=True)
    step_once(model, optimizer, 0, world.rank)  # buckets with parameters of nobody's are all-reduced
    return found


def test_optimizers_of_one_model_decide_anew(pools: Pools) -> None:
    assert pools.run(2, one_after_the_other) == [[True] * 9] * 2


def resumed(world: World) -> list[bool]:
    """Load the state of an unsharded optimizer, of which the first step is taken with whole gradients."""
    plain = trained(world, False, AdamW, {"lr": 1e-2}, "short")
    model = wrap(world, Net())
    first = ShardedOptimizer(model, AdamW, lr=1e-2)
    half, state = 3, None
    for step in range(6):
        if step == half:
            state = first.full_state_dict()
            del first
            gc.collect()
            first = ShardedOptimizer(model, AdamW, lr=1.0, reduce_scatter=True)
            first.load_state_dict(state)
        for group in first.param_groups:
            group["lr"] = 1e-2 * (1 + torch.cos(torch.tensor(torch.pi * step / STEPS)).item()) / 2
        step_once(model, first, step, world.rank)
    return [bool(torch.allclose(one, other, atol=1e-6)) for one, other in zip(plain, weights(model), strict=True)]


def test_states_go_from_one_to_the_other(pools: Pools) -> None:
    assert all(all(found) for found in pools.run(2, resumed))


def interrupted(world: World) -> bool:
    """Go on after an exception in the middle of a backward, on one rank, as if that step had not been."""
    results = []
    for is_scattering in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
        model = paceline.DistributedDataParallel(net, bucket_cap_mb=1)
        optimizer = ShardedOptimizer(model, SGD, lr=0.1, reduce_scatter=is_scattering)
        for step in range(4):
            out = model(torch.full((2, 300), float(step + world.rank)))
            if step == 2:
                handle = net[0].weight.register_hook(lambda _: 1 / 0 if world.rank == 1 else None)
                with pytest.raises((ZeroDivisionError, paceline.PacelineError)):
                    out.square().mean().backward()
                handle.remove()
                optimizer.zero_grad()
                continue
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
    return all(map(torch.equal, *results))


def test_an_exception_in_backward_leaves_a_wrapper_that_goes_on(pools: Pools) -> None:
    assert all(pools.run(2, interrupted))


def thawed(world: World) -> tuple[bool, float]:
    """Thaw layers, so that others of one shape get other numbers.

    Returns whether bits are those of whole gradients, and how far clipped ones are from them.
    """
    results: dict[tuple[bool, float], list[torch.Tensor]] = {}
    for limit in (1e9, 0.05):
        for is_scattering in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(24, 24) for _ in range(5)))
            net[0].requires_grad_(False)
            net[2].requires_grad_(False)
            model = paceline.DistributedDataParallel(net)
            optimizer = ShardedOptimizer(model, AdamW, lr=1e-2, reduce_scatter=is_scattering)
            for step in range(6):
                net[2].requires_grad_(step >= 2)
                net[0].requires_grad_(step >= 4)
                model(torch.full((2, 24), float(step + world.rank))).square().sum().backward()
                paceline.clip_grad_norm_(model, limit)
                optimizer.step()
                optimizer.zero_grad()
            results[is_scattering, limit] = weights(model)
            del optimizer
    is_exact = all(map(torch.equal, results[False, 1e9], results[True, 1e9]))
    pairs = zip(results[False, 0.05], results[True, 0.05], strict=True)
    return is_exact, max(float((one - other).abs().max()) for one, other in pairs)


def test_a_stand_in_is_never_taken_for_another_parameters(pools: Pools) -> None:
    for is_exact_now, apart in pools.run(2, thawed):
        assert is_exact_now
        assert apart < 1e-5


def clipped_in(world: World, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> tuple[torch.dtype, float, float]:
    """The dtype of the norm, and how far norms and weights are from those of whole gradients."""
    results, norms = [], []
    for is_scattering in (False, True):
        torch.manual_seed(0)
        model = paceline.DistributedDataParallel(nn.Linear(40, 40, dtype=dtype), reduce_dtype=reduce_dtype)
        optimizer = ShardedOptimizer(model, SGD, lr=0.1, reduce_scatter=is_scattering)
        for step in range(3):
            model(torch.full((2, 40), float(step + world.rank), dtype=dtype)).square().sum().backward()
            norms.append(paceline.clip_grad_norm_(model, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
        del optimizer
    apart = max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))
    return norms[-1].dtype, abs(float(norms[0] / norms[3]) - 1), apart


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "of_norms", "of_weights"),
    [(torch.float64, None, 1e-14, 1e-14), (torch.float32, torch.bfloat16, 1e-6, 1e-3)],
)
def test_norms_have_the_precision_of_the_parameters(
    pools: Pools, dtype: torch.dtype, reduce_dtype: torch.dtype | None, of_norms: float, of_weights: float
) -> None:
    for kind, norms, apart in pools.run(2, clipped_in, dtype, reduce_dtype):
        assert kind is dtype
        assert norms < of_norms
        assert apart < of_weights


def hooked_too_late(world: World) -> str:
    model = paceline.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = ShardedOptimizer(model, SGD, lr=0.1, reduce_scatter=True)
    hook = torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook
    message = refused(partial(model.register_comm_hook, None, hook))
    model(torch.ones(2, 8)).sum().backward()
    assert is_scattered(model.module.weight.grad)
    optimizer.step()
    return message


def test_a_hook_does_not_take_the_place_of_scattering_in_silence(pools: Pools) -> None:
    assert all("ShardedOptimizer" in message for message in pools.run(2, hooked_too_late))


def one_of_two_hooked(world: World) -> bool:
    """Refuse two wrappers of which the second has a hook, and leave the first as it was."""
    first, second = (paceline.DistributedDataParallel(nn.Linear(8, 8)) for _ in range(2))
    second.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
    parameters = [*first.parameters(), *second.parameters()]
    refused(lambda: ShardedOptimizer(parameters, SGD, lr=0.1, reduce_scatter=True))
    first(torch.ones(2, 8)).sum().backward()
    return is_scattered(first.module.weight.grad)


def test_a_refused_optimizer_leaves_wrappers_as_they_were(pools: Pools) -> None:
    assert pools.run(2, one_of_two_hooked) == [False, False]
