"""The sharded optimizer is bit-equal to the unsharded one and holds 1/N of its state per rank."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

import paceline
from paceline import World
from paceline.errors import CheckpointMismatch, UsageError
from paceline.optim import ShardedOptimizer
from twins import Pools

STEPS = 5
torch.sparse.check_sparse_tensor_invariants.disable()


class Net(nn.Module):
    """Layers of odd sizes in another order than backward's, tied, frozen, rarely used, unused, in two dtypes."""

    def __init__(self, sparse: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(33, 7, dtype=torch.float64)
        self.tokens = nn.Embedding(50, 33, sparse=sparse)
        self.hidden, self.rare, self.unused = nn.Linear(33, 33), nn.Linear(33, 33), nn.Linear(33, 5)
        self.tied = nn.Linear(33, 33, bias=False)
        self.tied.weight = self.hidden.weight
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0))
        self.conv = nn.Conv2d(1, 8, 3, padding=1).to(memory_format=torch.channels_last)
        if dtype is not torch.float32:
            self.to(dtype)

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        hidden = torch.tanh(self.hidden(self.tokens(tokens).mean(1)))
        if step % 3 == 1:
            hidden = hidden + self.rare(hidden)
        hidden = self.tied(self.frozen(hidden)) * self.scale
        hidden = hidden + self.conv(hidden[:, None, None, :]).mean((1, 2))
        return self.head(hidden.to(self.head.weight.dtype))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(50, (6, 4), generator=generator), torch.randint(7, (6,), generator=generator)


def step_once(model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
    tokens, target = batch(step, rank)
    F.cross_entropy(model(tokens, step).float(), target).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def groups_of(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "lr": 2 * lr}, {"params": parameters[1::2]}]


def optimizer_of(model: nn.Module, is_sharded: bool, kind: Any, **options: Any) -> Any:
    return ShardedOptimizer(model, kind, **options) if is_sharded else kind(model.parameters(), **options)


def is_exact(world: World, train: Callable[..., list[Tensor]], *case: Any) -> bool:
    """Whether ``train(world, is_sharded, …)`` ends with the same bits, sharded or not."""
    return all(map(torch.equal, train(world, False, *case), train(world, True, *case)))


def wrap(world: World, module: nn.Module) -> nn.Module:
    return paceline.DistributedDataParallel(module, find_unused_parameters=True)


def trained(
    world: World,
    is_sharded: bool,
    kind: type,
    options: dict[str, Any],
    how: str,
    sharding: dict[str, Any] | None = None,
) -> list[Tensor]:
    model = wrap(world, Net(sparse=how == "sparse", dtype=torch.bfloat16 if how == "bf16" else torch.float32))
    parameters: Any = groups_of(model, options["lr"]) if how == "groups" else list(model.parameters())
    if is_sharded:
        optimizer = ShardedOptimizer(parameters, kind, **(sharding or {}), **options)
    else:
        optimizer = kind(parameters, **options)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=how == "scaler")
    for step in range(STEPS):
        tokens, target = batch(step, world.rank)
        if how == "accumulated":
            with model.no_sync(), model.weight(6):  # type: ignore[operator]
                F.cross_entropy(model(*batch(step + 999, world.rank)[:1], step), target, reduction="sum").backward()
            with model.weight(6):  # type: ignore[operator]
                F.cross_entropy(model(tokens, step), target, reduction="sum").backward()
        else:
            loss = F.cross_entropy(model(tokens, step).float(), target)
            scaler.scale(loss * (float("inf") if how == "scaler" and step in (1, 4) else 1.0)).backward()
        if how in ("clipped", "scaler"):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        if step == 2 and how == "added":
            model.module.added = nn.Parameter(torch.ones(40, 7))
            optimizer.add_param_group({"params": [model.module.added], "lr": 0.5})
    return weights(model)


class Rowwise(torch.optim.Optimizer):
    """Divides by the norm of the whole gradient, as LARS does."""

    updates_tensors_separately = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (1e-3 + parameter.grad.norm()), alpha=group["lr"])


CASES: dict[str, tuple[Any, ...]] = {
    "fused": (AdamW, {"lr": 1e-2, "fused": True}, "clipped"),
    "foreach": (Adam, {"lr": 1e-2, "foreach": True, "amsgrad": True}, "groups"),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}, "accumulated"),
    "sparse": (SGD, {"lr": 0.1}, "sparse"),
    "scaled": (AdamW, {"lr": 1e-2, "fused": True}, "scaler"),
    "added": (Adagrad, {"lr": 0.1}, "added"),
    "bf16": (RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}, "bf16"),
    "rows": (Rowwise, {"lr": 1e-2}, "plain", {"by": "tensor"}),
    "rows and columns": (torch.optim.Adafactor, {"lr": 1e-2}, "plain", {"by": "tensor"}),
}


@pytest.mark.parametrize("case", CASES)
def test_sharding_keeps_the_bits(pools: Pools, case: str) -> None:
    assert all(pools.run(3 if case == "fused" else 2, is_exact, trained, *CASES[case]))


def through_gloo(world: World, is_sharded: bool, wrapper: Any) -> list[Tensor]:
    group = dist.new_group(backend="gloo")
    model = wrapper(Net(), process_group=group, find_unused_parameters=True)
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    if is_sharded:
        optimizer = ShardedOptimizer(model.parameters(), AdamW, process_group=group, lr=1e-2)
    for step in range(3):
        step_once(model, optimizer, step, world.rank)
    return weights(model)


@pytest.mark.parametrize("wrapper", [nn.parallel.DistributedDataParallel, paceline.DistributedDataParallel])
def test_it_works_over_gloo_and_with_torch_ddp(pools: Pools, wrapper: Any) -> None:
    assert all(pools.run(2, is_exact, through_gloo, wrapper))


class ScheduleFree(SGD):
    def train(self) -> None: ...
    def eval(self) -> None: ...


def refused(function: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        function(*arguments, **options)
    return str(caught.value)


STATE_HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


def refusals(world: World) -> dict[str, str]:
    model = wrap(world, Net())
    parameters = list(model.parameters())
    foreign = nn.Parameter(torch.ones(3))
    found = {"rows": refused(ShardedOptimizer, model, Rowwise), "views": refused(ShardedOptimizer, model, ScheduleFree)}
    found["twice"] = refused(ShardedOptimizer, [{"params": parameters}, {"params": parameters[:1]}], SGD, lr=0.1)
    found["strange"] = refused(ShardedOptimizer, [*parameters, foreign], SGD, lr=0.1)
    found["class"] = refused(ShardedOptimizer, model, SGD(parameters, lr=0.1), lr=0.1)
    found["groups"] = refused(ShardedOptimizer, model, SGD, lr=0.1 + world.rank)
    optimizer = ShardedOptimizer(model, SGD, lr=0.1)
    found["closure"] = refused(optimizer.step, lambda: 1.0)
    found["early"] = refused(optimizer.step)
    found["copy"] = refused(copy.deepcopy, optimizer)
    for when in STATE_HOOKS:
        found[when] = refused(getattr(optimizer, f"register_{when}_hook"), print)
    if world.size > 1:
        found["shard"] = refused(optimizer.load_state_dict, [optimizer.local_state()])
    with model.join():  # type: ignore[operator]
        F.cross_entropy(model(*batch(0, world.rank)[:1], 0), batch(0, world.rank)[1]).backward()
        found["join"] = refused(optimizer.step)
    return found


def test_invalid_input_is_refused_in_one_line(pools: Pools) -> None:
    first, second = pools.run(2, refusals)
    parts = {
        "rows": 'Rowwise is not an elementwise optimizer of torch, .* by="tensor"',
        "views": "ScheduleFree has train() and eval()",
        "twice": "parameter 'scale' is in two parameter groups",
        "strange": "not averaged by the wrapper",
        "class": "takes the class of an optimizer",
        "groups": "rank 1 created the ShardedOptimizer with a different parameter group 0 than rank 0",
        "closure": "takes no closure",
        "early": "none of its parameters has a gradient",
        "copy": "cannot be copied",
        **dict.fromkeys(STATE_HOOKS, "does not run hooks on its state dict"),
        "shard": "in 2 shards, and that of rank 1 is missing",
        "join": "inside model.join()",
    }
    for name, part in parts.items():
        assert re.search(part.replace("(", r"\(").replace(")", r"\)"), first[name]), (name, first[name])
        assert "\n" not in first[name] + second[name]


def state_elements(state: dict[str, Any]) -> int:
    return sum(value.numel() for entry in state["state"].values() for value in entry.values())


def shards_and_full(world: World) -> tuple[int, int, bool, bool]:
    results = []
    for is_sharded in (False, True):
        model = wrap(world, Net())
        optimizer: Any = ShardedOptimizer(model, AdamW) if is_sharded else AdamW(model.parameters())
        for step in range(4):
            step_once(model, optimizer, step, world.rank)
        results.append(optimizer)
    plain, sharded = results[0].state_dict(), results[1].full_state_dict()
    equal = plain["param_groups"] == sharded["param_groups"] and plain["state"].keys() == sharded["state"].keys()
    equal = equal and all(
        torch.equal(value, sharded["state"][index][key])
        for index, entry in plain["state"].items()
        for key, value in entry.items()
    )
    is_on_rank_0 = (results[1].full_state_dict(to=0) is not None) == (world.rank == 0)
    return state_elements(results[1].state_dict()), state_elements(plain), equal, is_on_rank_0


def test_each_rank_holds_a_share_of_the_state(pools: Pools) -> None:
    for own, whole, is_equal, is_on_rank_0 in pools.run(3, shards_and_full):
        assert is_equal
        assert is_on_rank_0
        assert own < whole / 3 + 1000


def trained_to_shards(world: World) -> tuple[dict[str, Any], dict[str, Tensor]]:
    model = wrap(world, Net())
    optimizer = ShardedOptimizer(model, Adam, lr=0.01)
    for step in range(4):
        step_once(model, optimizer, step, 0)
    return copy.deepcopy(optimizer.local_state()), {
        key: value.clone() for key, value in model.module.state_dict().items()
    }


def continued(world: World, shards: Any, state: dict[str, Tensor]) -> list[Tensor]:
    module = Net()
    module.load_state_dict(state)
    model = wrap(world, module)
    optimizer = ShardedOptimizer(model, Adam, lr=0.5)
    optimizer.load_state_dict(shards)
    for step in range(4, 7):
        step_once(model, optimizer, step, 0)
    return weights(model)


@pytest.mark.parametrize(("before", "now"), [(1, 2), (3, 2)])
def test_shards_of_any_number_of_ranks_are_loaded(pools: Pools, before: int, now: int) -> None:
    shards, states = zip(*pools.run(before, trained_to_shards), strict=True)
    [expected] = pools.run(1, continued, list(shards), states[0])
    for result in pools.run(now, continued, list(shards), states[0]):
        assert all(map(torch.equal, result, expected))


def with_masters(world: World) -> list[float]:
    """Return the distance of bf16 from fp32 weights after many small steps: with masters, without, and resumed."""
    found: list[list[Tensor]] = []
    for dtype, master in ((torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, None)):
        model = wrap(world, nn.Linear(64, 64).to(dtype))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer = ShardedOptimizer(model, SGD, lr=1e-4, master_dtype=master)
        for step in range(24):
            if step == 12 and master is not None:
                state = copy.deepcopy(optimizer.full_state_dict())
                del optimizer
                gc.collect()
                optimizer = ShardedOptimizer(model, SGD, lr=1e-4, master_dtype=master)
                optimizer.load_state_dict(state)
            model(torch.ones(4, 64, dtype=dtype)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    return [
        max(float((a - b.float()).abs().max()) for a, b in zip(found[0], other, strict=True)) for other in found[1:]
    ]


def test_masters_keep_updates_that_bf16_would_round_away(pools: Pools) -> None:
    for with_master, without in pools.run(2, with_masters):
        assert with_master < 4e-3 < without


def moved(world: World, is_sharded: bool) -> list[Tensor]:
    """Weights that were changed or moved between steps are the input of the next step."""
    model = wrap(world, Net())
    optimizer = optimizer_of(model, is_sharded, AdamW)
    for step in range(6):
        step_once(model, optimizer, step, world.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                if step == 1:
                    parameter.mul_(0.9)
                if step == 3:
                    parameter.data = parameter.data * 0.9
            if step == 4:
                model.module.load_state_dict({key: 0.9 * value for key, value in model.module.state_dict().items()})
    return weights(model)


def of_another_dtype(world: World, is_sharded: bool) -> list[Tensor]:
    model = wrap(world, Net())
    optimizer = optimizer_of(model, is_sharded, SGD, lr=0.1)
    model.double()
    for step in range(3):
        step_once(model, optimizer, step, world.rank)
    return weights(model)


def of_two_wrappers(world: World, is_sharded: bool) -> list[Tensor]:
    """One optimizer for an actor and a critic; parameters without gradients do not change, so backward may follow."""
    torch.manual_seed(0)
    actor, critic = (paceline.DistributedDataParallel(nn.Linear(40, 40)) for _ in range(2))
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer: Any = ShardedOptimizer(parameters, Adam) if is_sharded else Adam(parameters)
    for step in range(3):
        x = torch.full((2, 40), float(step + world.rank), requires_grad=True)
        for loss in (actor(x).square().sum(), critic(x).square().sum()):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(actor) + weights(critic)


def taken_over(world: World, is_sharded: bool) -> list[Tensor]:
    """Replace an optimizer that has already trained."""
    model = wrap(world, Net())
    optimizer: Any = Adagrad(groups_of(model, 0.1), lr=0.1, initial_accumulator_value=0.3)
    for step in range(3):
        step_once(model, optimizer, step, world.rank)
    if is_sharded:
        state = optimizer.state_dict()
        optimizer = ShardedOptimizer(optimizer.param_groups, Adagrad)
        optimizer.load_state_dict(state)
    for step in range(3, 6):
        step_once(model, optimizer, step, world.rank)
    return weights(model)


@pytest.mark.parametrize("train", [moved, of_another_dtype, of_two_wrappers, taken_over])
def test_events_between_steps_keep_the_bits(pools: Pools, train: Any) -> None:
    assert all(pools.run(2, is_exact, train))


def test_a_shard_of_different_parameters_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    optimizer = ShardedOptimizer(parameters, SGD, lr=0.1)
    other = ShardedOptimizer([nn.Parameter(torch.ones(4))], SGD, lr=0.1)
    with pytest.raises(CheckpointMismatch, match=r"shape \(3,\), but the shard of rank 0 has shape \(4,\)"):
        optimizer.load_state_dict(other.local_state())


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 3))


def image_step(model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    model(images).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def of_another_memory_format(world: World) -> tuple[bool, str]:
    """Load a state that was saved in another memory format; change the format after the optimizer was created."""
    results = []
    for is_sharded in (False, True):
        model = wrap(world, convolutions())
        optimizer = optimizer_of(model, is_sharded, AdamW, lr=1e-2)
        for step in range(4):
            if step == 2:
                state = optimizer.state_dict()
                model.to(memory_format=torch.channels_last)
                if is_sharded:
                    F.mse_loss(model(torch.ones(2, 3, 8, 8)), torch.ones(2, 3)).backward()
                    message = refused(optimizer.step)
                    model.zero_grad()
                    state = optimizer.full_state_dict()  # as the message recommends
                    optimizer = ShardedOptimizer(model, AdamW, lr=1e-2)
                optimizer.load_state_dict(state)
            image_step(model, optimizer, step, world.rank)
        results.append(weights(model))
    return all(map(torch.equal, *results)), message


def test_a_state_is_loaded_in_a_different_memory_format(pools: Pools) -> None:
    for is_equal, message in pools.run(2, of_another_memory_format):
        assert is_equal
        assert "parameter '0.weight' has shape (16, 3, 3, 3) and strides (27, 1, 9, 3)" in message


def with_edited_groups(world: World) -> list[str]:
    """Change ``param_groups`` by hand. The shards do not follow, so a layer would silently not be trained."""
    model = wrap(world, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    first, second = (list(layer.parameters()) for layer in model.module)
    optimizer = ShardedOptimizer([{"params": list(first)}], SGD, lr=0.1)
    groups = optimizer.param_groups
    messages = []

    def refuse() -> None:
        model(torch.ones(1, 8)).sum().backward()
        with pytest.raises(UsageError) as caught:
            optimizer.step()
        messages.append(str(caught.value))
        model.zero_grad()

    groups[0]["params"].extend(second)
    refuse()
    groups[0]["params"] = first[:1]
    refuse()
    groups[0]["params"] = first
    groups.append({**groups[0], "params": second})
    refuse()
    groups.pop()
    image = groups.pop()
    refuse()
    groups.append(image)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return messages


def test_groups_edited_by_hand_are_refused(pools: Pools) -> None:
    for messages in pools.run(2, with_edited_groups):
        assert len(messages) == 4
        assert all("add_param_group()" in message for message in messages)
        assert "group 1" in messages[2]


def after_a_refused_step(world: World) -> bool:
    """Refuse a gradient that cannot be sharded; gradients taken before it are not used in the next step."""
    first, second = nn.Parameter(torch.ones(128)), nn.Parameter(torch.ones(384))
    optimizer = ShardedOptimizer([first, second], SGD, lr=0.1)
    first.grad, second.grad = torch.ones(128), torch.ones(384).to_sparse()
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()
    first.grad, second.grad = None, torch.ones(384)
    optimizer.step()
    return bool((first == 1).all()) and torch.allclose(second, torch.tensor(0.9))


def test_a_refused_step_leaves_no_gradient_behind(pools: Pools) -> None:
    assert pools.run(2, after_a_refused_step) == [True, True]


def trained_copy(model: nn.Module, how: str) -> nn.Module:
    """Return the wrapper that is trained in place of `model`."""
    if how == "copy of a copy":
        return copy.deepcopy(copy.deepcopy(model))
    if how == "copy":
        return copy.deepcopy(model)
    if how == "copy in the middle":
        copied = copy.deepcopy(model)
        with copied.no_sync():  # type: ignore[operator]
            copied(torch.ones(1, 16, dtype=torch.float64)).sum().backward()
        copied.zero_grad()
        return copied
    return model


def of_groups(world: World) -> dict[str, float]:
    """Train wrappers of separate groups with different weights, each compared with one process.

    An untrained copy was not recognized, so all ranks shared the work and mixed the weights of all groups.
    """
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])][world.rank % 2]
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    ways: dict[str, Any] = {
        "parameters": lambda model: ShardedOptimizer(model.parameters(), SGD, lr=0.1),
        "model": lambda model: ShardedOptimizer(model, SGD, lr=0.1),
        "module": lambda model: ShardedOptimizer(model.module, SGD, lr=0.1),
        "groups": lambda model: ShardedOptimizer(SGD(model.parameters(), lr=0.1).param_groups, SGD),
    }
    cases = [("pairs", pairs, "copy", way) for way in ways] + [("pairs", pairs, "original", "module")]
    cases += [("pairs", pairs, how, "parameters") for how in ("copy of a copy", "copy in the middle")]
    cases += [("alone", alone, "original", "groups"), ("alone", alone, "copy", "model")]
    found = {}
    for who, group, how, way in cases:
        torch.manual_seed(world.rank % 2 if who == "pairs" else world.rank)
        net = nn.Linear(16, 64).double()
        twin = copy.deepcopy(net)
        model = trained_copy(paceline.DistributedDataParallel(net, process_group=group), how)
        averaged = copy.deepcopy(model) if world.rank == 0 else None  # only on one rank, and never trained
        optimizer, other = ways[way](model), SGD(twin.parameters(), lr=0.1)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        for step in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            for each, one, part in ((model, optimizer, x[rank::size]), (twin, other, x)):
                each(part).square().mean().backward()
                one.step()
                one.zero_grad()
        pairs_of = zip(model.parameters(), twin.parameters(), strict=True)
        found[f"{who}, {how}, {way}"] = max(float((one - other).detach().abs().max()) for one, other in pairs_of)
        del model, optimizer, averaged
    return found


def test_state_is_sharded_over_the_wrappers_ranks(pools: Pools) -> None:
    for found in pools.run(4, of_groups):
        assert {case: apart for case, apart in found.items() if apart > 1e-12} == {}


def assign(net: nn.Module) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def changed_in_form(_world: World) -> dict[str, str]:
    """Return the errors for parameters that were replaced or changed after the optimizer was created."""
    found = {}

    def in_part(net: Any) -> None:
        net[1].weight.data = net[1].weight.data.bfloat16()

    def in_shape(net: Any) -> None:
        net[1].weight.data = net[1].weight.data.view(3, 2)

    for change, dtype in ((assign, torch.float32), (in_part, torch.half), (in_shape, torch.float32)):
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
        model = paceline.DistributedDataParallel(net)
        optimizer = ShardedOptimizer(model, SGD, lr=0.1)
        change(net)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        model.gradients_are_averaged()
        found[change.__name__] = refused(optimizer.step)
    return found


def test_replaced_parameters_are_named(pools: Pools) -> None:
    for found in pools.run(2, changed_in_form):
        assert "create a new ShardedOptimizer after load_state_dict(assign=True)" in found["assign"]
        assert "now have torch.bfloat16 and torch.float16" in found["in_part"]
        assert "parameter '1.weight' has shape (3, 2) and strides (2, 1), but had (2, 3)" in found["in_shape"]


def saved_by_torch(world: World) -> list[str]:
    model = wrap(world, nn.Linear(1, 1))  # rank 1 has no shard of it
    optimizer = ShardedOptimizer(model, AdamW, by="tensor")
    full = optimizer.full_state_dict()
    errors = []
    for _ in range(2):
        for options in (None, StateDictOptions(strict=False), StateDictOptions(full_state_dict=True, cpu_offload=True)):
            errors.append(refused(get_optimizer_state_dict, model, optimizer, options=options))
        errors.append(refused(set_optimizer_state_dict, model, optimizer, full))
        errors.append(refused(dcp.save, {"optimizer": optimizer}, checkpoint_id="never written"))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state_dict()["state"].keys() <= optimizer.full_state_dict()["state"].keys()
    return errors


def test_torchs_distributed_checkpoint_is_refused_with_the_remedy(pools: Pools) -> None:
    # It saved only one rank's shard.
    for errors in pools.run(3, saved_by_torch):
        assert len(errors) == 10
        assert all("optimizer.full_state_dict()" in error for error in errors)
