"""Parameters added or replaced after wrapping are averaged from their first backward on or refused on every rank.

Torch DDP silently ignores them: they train on local data, and replicas drift apart. A new parameter has no hook and no
place in a bucket, and the wrapper is not notified of changes to the module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.utils import parametrizations

from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError, NonFiniteGradient, ReplicaMismatch, UsageError
from twins import Pools, same_gradients, same_weights

SIZE = 2


class Lora(nn.Module):
    """A frozen layer with a trainable low-rank update."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float64)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    """A body, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        words = self.embed((x[:, 0].abs() * 2).long().clamp(max=4))
        return self.head(self.body(x.to(self.embed.weight.dtype)) + words) * self.scale


def frozen_body() -> nn.Module:
    net = Net()
    net.body.requires_grad_(False)
    return net


# -- changes to a module, applied to the ranks' module and to the twin -------------------------------------------------


def new_head(net: Any) -> None:
    net.head = nn.Linear(4, 2).double()


def lora(net: Any) -> None:
    """Freeze all existing parameters and train only new ones."""
    net.requires_grad_(False)
    net.body[0], net.body[2] = Lora(net.body[0]), Lora(net.body[2])


def unfreeze(net: Any) -> None:
    net.requires_grad_(True)


def tie(net: Any) -> None:
    net.body[2].weight = net.body[0].weight = nn.Parameter(torch.randn(4, 4).double())
    net.body[0] = nn.Sequential(nn.ConstantPad1d((0, 1), 1.0), net.body[0])


def assign(net: Any) -> None:
    state = {name: value.clone() + 1 for name, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)


def to_single(net: Any) -> None:
    net.float()


def to_single_in_part(net: Any) -> None:
    net.scale.data = net.scale.data.float()


class TwiceScaled(Net):
    """The second scale is in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Parameter(torch.ones((), dtype=torch.half))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.second


def to_bfloat16_in_part(net: Any) -> None:
    """Change the dtype of one parameter but not its size in bytes."""
    net.second.data = net.second.data.bfloat16()


def equal_scalar(net: Any) -> None:
    """Replace a parameter by a new one with an equal value."""
    net.scale = nn.Parameter(net.scale.detach().clone())


def sparse_embedding(net: Any) -> None:
    net.embed = nn.Embedding(5, 4, sparse=True).double()


def with_statistics(net: Any) -> None:
    net.head = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)).double().eval()


def weight_norm(net: Any) -> None:
    parametrizations.weight_norm(net.head)


CHANGES: list[tuple[Callable[[Any], None], Callable[[], nn.Module]]] = [
    *((change, Net) for change in (new_head, lora, tie, assign, to_single, to_single_in_part, equal_scalar)),
    *((change, Net) for change in (sparse_embedding, with_statistics, weight_norm)),
    *((change, frozen_body) for change in (unfreeze, new_head)),
    (to_bfloat16_in_part, TwiceScaled),
]


def batch(step: int, size: int) -> Tensor:
    return torch.randn(4 * size, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(
    world: World,
    build: Callable[[], nn.Module],
    change: Callable[[Any], None],
    options: dict[str, Any],
    micros: int = 1,
) -> list[str]:
    """Train beside a twin in one process, with the change after step 2; return the names in buckets."""
    torch.manual_seed(0)
    net: Any = build()
    model = DistributedDataParallel(net, unused_parameters="allow", **options)
    twin: Any = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (net, twin)]
    for step in range(6):
        if step == 2:
            for module in (net, twin):
                torch.manual_seed(1)
                change(module)
            optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (net, twin)]
        x = batch(step, world.size)
        mine = x[4 * world.rank : 4 * world.rank + 4]
        for at, part in enumerate(mine.chunk(micros)):
            model.require_backward_grad_sync = at == micros - 1
            (model(part).sin().sum() / 4).backward()
        (twin(x).sin().sum() / len(x)).backward()
        rtol = {8: 1e-9, 4: 1e-4, 2: 0.2}[min(p.itemsize for p in net.parameters())]
        if net.embed.sparse:
            assert step < 2 or net.embed.weight.grad.is_sparse
            for module in (net, twin):
                module.embed.weight.grad = module.embed.weight.grad.to_dense()
        same_gradients(net, twin, rtol, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_weights(net, twin, rtol, f"step {step}")
    return sorted(name for names in model.bucket_layout() for name in names)


@pytest.mark.parametrize(("change", "build"), CHANGES, ids=lambda case: case.__name__)
def test_a_changed_module_trains_as_in_one_process(pools: Pools, change: Any, build: Any) -> None:
    layouts = pools.run(SIZE, train, build, change, {})
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("change", [new_head, lora], ids=lambda case: case.__name__)
def test_changed_module_works_with_small_buckets_and_local_backwards(pools: Pools, change: Any) -> None:
    pools.run(SIZE, train, Net, change, {"bucket_cap_mb": 1e-4}, 2)


# -- different changes on the ranks: every rank raises the same error in the same step ---------------------------------


def on_one_rank(net: Any, rank: int) -> None:
    if rank == 1:
        new_head(net)


def other_shapes(net: Any, rank: int) -> None:
    net.head = nn.Linear(4, 2 + rank).double()


def other_values(net: Any, rank: int) -> None:
    torch.manual_seed(rank)
    new_head(net)


def adapter_on_one_rank(net: Any, rank: int) -> None:
    """Freeze everything that was trained before on that rank."""
    if rank == 0:
        lora(net)


def dtype_on_one_rank(net: Any, rank: int) -> None:
    if rank == 0:
        net.float()


def thawed_on_one_rank(net: Any, rank: int) -> None:
    if rank == 1:
        net.requires_grad_(True)


def average_on_one_rank(net: Any, rank: int) -> None:
    """Add a trainable copy that no forward uses; a new wrapper would average it."""
    if rank == 0:
        net.body[3].average = copy.deepcopy(net.body)


def errors_after(world: World, build: Callable[[], nn.Module], change: Any, hook: bool = False) -> list[str]:
    """Return the errors of two steps after the change; then wrap the module again and train."""
    net: Any = build()
    model = DistributedDataParallel(net, unused_parameters="allow")
    if hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(batch(0, 1)).sum().backward()
    net.zero_grad()
    change(net, world.rank)
    messages = []
    for step in range(2):
        with pytest.raises(UsageError) as caught:
            model(batch(step, 1)).sum().backward()
        messages.append(str(caught.value))
    if change in (on_one_rank, other_values, thawed_on_one_rank, same_new_head):  # same names and shapes on all ranks
        del model
        net.zero_grad()
        net.requires_grad_(True)
        train(world, lambda: net, lambda net: None, {})
    return messages


REFUSED = [
    (on_one_rank, Net, "'head.weight' has shape (2, 4), torch.float64, on cpu, new on rank 1 but"),
    (other_shapes, Net, "'head.weight' has shape (3, 4), torch.float64, on cpu, new on rank 1 but shape (2, 4)"),
    (
        other_values,
        Net,
        "'head.weight' has different values on rank 1 than on rank 0; make the same change on every rank, or wrap",
    ),
    (adapter_on_one_rank, Net, "'body.0.down.weight' is in the model of rank 0 but not on rank 1"),
    (dtype_on_one_rank, Net, "torch.float64, on cpu on rank 1 but shape (), torch.float32, on cpu, new on rank 0"),
    (average_on_one_rank, Net, "'body.3.average.0.weight' is in the model of rank 0 but not on rank 1"),
    (thawed_on_one_rank, frozen_body, "'body.0.weight' is in the model of rank 1 but not on rank 0"),
]


@pytest.mark.parametrize(("change", "build", "expected"), REFUSED, ids=lambda case: getattr(case, "__name__", ""))
def test_different_changes_are_refused_on_every_rank(pools: Pools, change: Any, build: Any, expected: str) -> None:
    """Unchanged ranks raise in the same step, so no rank waits for one that refused alone."""
    for first, second in pools.run(SIZE, errors_after, build, change):
        assert first == second
        assert "the module's parameters were changed after it was wrapped" in first
        assert expected in first, first


def test_new_parameters_with_a_communication_hook_are_refused(pools: Pools) -> None:
    """The state of a hook may depend on the original parameters, as with PowerSGD."""
    for first, _ in pools.run(SIZE, errors_after, Net, same_new_head, True):
        assert "parameters such as 'head.weight' were added to the module after a communication hook" in first


def same_new_head(net: Any, _rank: int) -> None:
    torch.manual_seed(1)
    new_head(net)


# -- around the change -------------------------------------------------------------------------------------------------


def compare(world: World, model: nn.Module, twin: nn.Module, steps: range = range(3)) -> None:
    """Compare gradients of several steps with the twin in one process."""
    for step in steps:
        x = batch(step, world.size)
        model(x[4 * world.rank : 4 * world.rank + 4]).sin().mean().backward()
        twin(x).sin().mean().backward()
        same_gradients(getattr(model, "module", model), twin, where=f"step {step}")
        model.zero_grad()
        twin.zero_grad()


def wrapped() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = Net()
    return DistributedDataParallel(net), net, copy.deepcopy(net)


def change_both(change: Callable[[Any], None], *nets: Any) -> None:
    for net in nets:
        torch.manual_seed(1)
        change(net)


def in_a_copy_of_the_wrapper(world: World) -> None:
    model, _, twin = wrapped()
    copied = copy.deepcopy(model)
    change_both(lora, copied.module, twin)
    compare(world, copied, twin)
    change_both(new_head, copied.module, twin)
    compare(world, copied, twin)


def another_module(world: World) -> None:
    model, _, _ = wrapped()
    torch.manual_seed(1)
    model.module = frozen_body()
    compare(world, model, copy.deepcopy(model.module))


def after_an_exception(world: World) -> None:
    model, net, twin = wrapped()
    change_both(new_head, net, twin)
    out = model(batch(0, 1))
    if world.rank == 1:
        out.register_hook(lambda _: 1 / 0)
    with pytest.raises((ZeroDivisionError, DesyncError)):
        out.sum().backward()
    model.zero_grad()
    compare(world, model, twin)


def a_rank_without_data(world: World) -> None:
    model, net, twin = wrapped()
    change_both(new_head, net, twin)
    if world.rank == 0:
        model(batch(0, 1)).mean().backward()
    else:
        model.sync_gradients()
    (twin(batch(0, 1)).mean() / world.size).backward()
    same_gradients(net, twin)


def two_forwards_in_a_step(world: World) -> None:
    """Run a backward after the new parameters were adopted for a forward from before."""
    model, net, twin = wrapped()
    change_both(lora, net, twin)
    x = batch(0, world.size)
    mine = x[4 * world.rank : 4 * world.rank + 4]
    first, second = model(mine).sin().mean(), model(mine).cos().mean()
    first.backward()
    second.backward()
    (twin(x).sin().mean() + twin(x).cos().mean()).backward()
    same_gradients(net, twin)


def weighed_micro_batches(world: World) -> None:
    """The weights of local backwards count even if only new parameters have gradients."""
    model, net, twin = wrapped()
    change_both(lora, net, twin)
    for part in range(3):
        rows = [batch(part, world.size)[4 * rank : 4 * rank + rank + 1] for rank in range(world.size)]
        with model.weight(world.rank + 1), nullcontext() if part == 2 else model.no_sync():
            model(rows[world.rank]).sum().backward()
        (twin(torch.cat(rows)).sum() / (3 * sum(map(len, rows)))).backward()
    same_gradients(net, twin)


def used_outside_of_the_forward(world: World) -> None:
    """Create a layer from the wrapper's output once its size is known."""
    model, net, twin = wrapped()
    x = batch(0, world.size)
    for _ in range(3):
        outs = [model(x[4 * world.rank : 4 * world.rank + 4]), twin(x)]
        for module, out in zip((net, twin), outs, strict=True):
            if not hasattr(module, "late"):
                torch.manual_seed(1)
                module.late = nn.Linear(out.shape[1], 1, dtype=torch.float64)
            module.late(out).square().mean().backward()
        same_gradients(net, twin)
        model.zero_grad()
        twin.zero_grad()


def after_an_exception_in_eval_mode(world: World) -> None:
    """No forward in eval mode cleans up after the exception, because a rank may evaluate alone."""
    model, net, twin = wrapped()
    model.eval()
    out = model(batch(0, 1))
    out.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    change_both(new_head, net, twin)
    compare(world, model, twin)


def in_join_without_data(world: World) -> None:
    model, net, twin = wrapped()
    compare(world, model, twin)
    change_both(lora, net, twin)
    with model.join():
        for step in range(2 * (1 - world.rank)):
            model(batch(step, 1)).mean().backward()
            (twin(batch(step, 1)).mean() / world.size).backward()
            same_gradients(net, twin)
            model.zero_grad()
            twin.zero_grad()


def undone_on_one_rank(world: World) -> None:
    """Freeze a parameter again after the error."""
    torch.manual_seed(0)
    net, twin = frozen_body(), frozen_body()
    twin.load_state_dict(net.state_dict())
    model = DistributedDataParallel(net)
    net.get_submodule("body").requires_grad_(world.rank == 1)
    with pytest.raises(ReplicaMismatch):
        model(batch(0, 1)).mean().backward()
    net.get_submodule("body").requires_grad_(False)
    model.zero_grad()
    compare(world, model, twin)


def two_wrappers_reached_in_another_order(world: World) -> None:
    """Ranks wait for each other when adopting a change, so all must use the same order."""
    (first, net, twin), (second, other, other_twin) = wrapped(), wrapped()
    change_both(new_head, net, twin)
    change_both(lora, other, other_twin)
    models = [first, second] if world.rank else [second, first]
    sum(model(batch(world.rank, 1)).sin().mean() for model in models).backward()
    for rank in range(world.size):
        (sum(module(batch(rank, 1)).sin().mean() for module in (twin, other_twin)) / world.size).backward()
    same_gradients(net, twin)
    same_gradients(other, other_twin)


AROUND = [in_a_copy_of_the_wrapper, another_module, undone_on_one_rank, two_wrappers_reached_in_another_order]
AROUND += [after_an_exception, a_rank_without_data, two_forwards_in_a_step, weighed_micro_batches]
AROUND += [used_outside_of_the_forward]
AROUND += [after_an_exception_in_eval_mode, in_join_without_data]
ON_ONE_RANK = [another_module, weighed_micro_batches]


@pytest.mark.parametrize("case", AROUND, ids=lambda case: case.__name__)
def test_gradients_around_a_change_equal_one_process(pools: Pools, case: Callable[[World], None]) -> None:
    for size in (1, SIZE) if case in ON_ONE_RANK else (SIZE,):
        pools.run(size, case)


def around_join(world: World) -> list[str]:
    model, net, _ = wrapped()
    on_one_rank(net, world.rank)
    with pytest.raises(ReplicaMismatch) as before:
        model.join()
    model, net, _ = wrapped()
    with model.join():
        change_both(new_head, net)
        with pytest.raises(UsageError) as inside:
            model(batch(0, 1)).mean().backward()
    return [str(before.value), str(inside.value)]


def test_unequal_change_before_join_and_any_change_inside_are_refused(pools: Pools) -> None:
    for before, inside in pools.run(SIZE, around_join):
        assert "'head.weight' has shape (2, 4), torch.float64, on cpu, new on rank 1" in before
        assert "change the module before join()" in inside


def step_over_new_parameters(world: World) -> None:
    model, net, _ = wrapped()
    change_both(lora, net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    with model.no_sync():
        model(batch(world.rank, 1)).mean().backward()
    with pytest.raises(UsageError, match="not averaged over the ranks, because the last backward ran under no_sync"):
        optimizer.step()


def test_a_step_over_local_gradients_of_new_parameters_is_refused(pools: Pools) -> None:
    pools.run(SIZE, step_over_new_parameters)


def train_with_drift(world: World) -> str:
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, check_replicas_every=1)
    torch.manual_seed(1)
    new_head(net)
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(4):
        if step == 2 and world.rank == 1:
            net.head.weight.data[0, 0] += 1
        optimizer.zero_grad()
        try:
            model(batch(step, 1)).mean().backward()
        except ReplicaMismatch as error:
            return str(error)
        optimizer.step()
    return ""


def test_replica_check_covers_parameters_added_later(pools: Pools) -> None:
    for message in pools.run(SIZE, train_with_drift):
        assert "parameter 'head.weight'" in message


def train_with_nan(world: World) -> str:
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, check_finite=True)
    change_both(new_head, net)
    with pytest.raises(NonFiniteGradient) as caught:
        (model(batch(0, 1)) * (float("nan") if world.rank == 1 else 1.0)).sum().backward()
    return str(caught.value)


def test_nonfinite_gradients_of_new_parameters_are_detected(pools: Pools) -> None:
    for message in pools.run(SIZE, train_with_nan):
        assert "NaN or Inf on rank 1" in message
