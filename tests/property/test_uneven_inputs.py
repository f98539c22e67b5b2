"""Promise: training equals one process if ranks run out of data inside ``join``, also with SyncBatchNorm."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from drawn import draws
from paceline import SyncBatchNorm, World, compression
from paceline.comm.algorithms import ring_all_reduce
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError, UsageError
from ranks import run_ranks
from twins import (
    Pools,
    averaging_by,
    make_optimizer,
    no_warning_about_cycles,
    same_gradients,
    same_tensor,
    same_weights,
)

RTOL = 1e-8


class ConvNet(nn.Module):
    """Two normalized convolutions, the second without affine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 2, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(3, dtype=torch.float64)
        self.second = nn.Conv2d(3, 4, 2, dtype=torch.float64)
        self.bare = nn.BatchNorm2d(4, affine=False, dtype=torch.float64)
        self.last = nn.Linear(4, 2, dtype=torch.float64)

    def body(self, x: Tensor) -> Tensor:
        return self.bare(self.second(self.norm(self.first(x)).tanh())).tanh().mean((2, 3))

    def forward(self, x: Tensor, how: str = "plain") -> Tensor:
        if how == "plain":
            return self.last(self.body(x))
        return self.last(checkpoint(self.body, x.requires_grad_(), use_reentrant=how == "reentrant"))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(self, x: Tensor, how: str = "plain") -> Tensor:
        return self.net(x)


def batch(rank: int, at: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * at + rank)
    return torch.randn(1 + (rank + at) % 3, 1, 4, 4, generator=generator, dtype=torch.float64)


def loss_of(out: Tensor) -> Tensor:
    return (out**2 + out).sum()


@dataclass(frozen=True)
class Uneven:
    """Number of batches per rank and settings of the training."""

    counts: tuple[int, ...]
    build: Callable[[], nn.Module] = ConvNet
    optimizer: str = "sgd"
    window: int = 1
    """Batches per optimizer step."""
    weighted: bool = False
    by_initial: bool = True
    how: str = "plain"
    local: str = "both"
    """Part of the step under no_sync: "both" forward and backward, or "backward"."""
    zero_at: str = "end"
    """When gradients are cleared: at the "end" of a step or the "start" of the next, which keeps the last average."""
    broadcast: bool = True
    entry: str = "model.join"
    epochs: int = 1
    sums: str = "all-reduce"
    """How buckets are averaged; see :func:`wrapped`."""


COMPRESSORS: dict[str, Callable[[nn.Module], Any]] = {
    "PowerSGD": lambda model: compression.PowerSGD(model, 100),  # full rank, therefore lossless
    "top-k": lambda model: compression.TopK(model, 1.0),
}


def wrapped(module: nn.Module, sums: str, **options: Any) -> DistributedDataParallel:
    """Wrap `module` with buckets averaged by the backend or a communication hook."""
    model = DistributedDataParallel(module, bucket_cap_mb=1e-4, **options)
    if sums == "hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif sums == "ring":
        model.register_comm_hook(model.process_group, averaging_by(ring_all_reduce))
    elif sums in COMPRESSORS:
        model.register_comm_hook(COMPRESSORS[sums](model), compression.hook)
    return model


def one_batch(model: DistributedDataParallel, case: Uneven, x: Tensor, sync: bool) -> None:
    outer = model.no_sync() if not sync and case.local == "both" else nullcontext()
    inner = model.no_sync() if not sync and case.local == "backward" else nullcontext()
    with outer, model.weight(len(x)) if case.weighted else nullcontext():
        loss = loss_of(model(x, case.how))
        with inner:
            loss.backward()


def compare_with_twin(world: World, case: Uneven) -> None:
    torch.manual_seed(0)
    twin = case.build()
    module = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(twin))
    model = wrapped(module, case.sums, broadcast_buffers=case.broadcast)
    twin_optimizer = make_optimizer(case.optimizer, twin)
    zero = case.entry == "Join with ZeRO"
    optimizer: Any = sharded(model) if zero else make_optimizer(case.optimizer, model)
    for epoch in range(case.epochs):
        steps = reference_steps(twin, twin_optimizer, case, epoch)
        expected = next(steps, None)
        with join_context(model, optimizer, case):
            for at in range(case.counts[world.rank]):
                sync = (at + 1) % case.window == 0
                if case.zero_at == "start" and at % case.window == 0:
                    optimizer.zero_grad()
                one_batch(model, case, batch(world.rank, at + 100 * epoch), sync)
                if sync:
                    assert expected is not None
                    same_gradients(module, expected, RTOL, f"rank {world.rank}, batch {at}:")
                    optimizer.step()
                    if case.zero_at == "end":
                        optimizer.zero_grad()
                    expected = next(steps, None)
        for _ in steps:  # steps without data on this rank
            pass
        model.zero_grad()
        same_weights(module, twin, RTOL, f"rank {world.rank}")
        for (name, ours), others in zip(module.named_buffers(), twin.buffers(), strict=True):
            same_tensor(ours.double(), others.double(), RTOL, f"rank {world.rank} {name}")
        assert not model._join_config.enable
        assert model._authoritative_rank == max(r for r, n in enumerate(case.counts) if n == max(case.counts))
    # The ranks are still in step.
    model(batch(world.rank, 5000)).sum().backward()


def sharded(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import warns about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)


def join_context(model: DistributedDataParallel, optimizer: Any, case: Uneven) -> Any:
    by_initial = {"divide_by_initial_world_size": case.by_initial}
    if case.entry == "model.join":
        return model.join(**by_initial, optimizers=[optimizer])
    if case.entry == "Join":
        return Join([model], **by_initial, optimizers=[optimizer])
    return Join([model, optimizer], **by_initial)


def reference_steps(twin: nn.Module, optimizer: torch.optim.Optimizer, case: Uneven, epoch: int) -> Iterator[nn.Module]:
    """Train in one process: each round uses the batches of all ranks that still have data, normalized together."""
    twin.zero_grad()
    samples = 0
    for at in range(max(case.counts)):
        parts = [batch(rank, at + 100 * epoch) for rank, count in enumerate(case.counts) if at < count]
        samples += sum(map(len, parts))
        loss_of(twin(torch.cat(parts), case.how)).backward()
        if (at + 1) % case.window:
            continue
        # A rank that ran out within a window counts in this step, with its accumulated gradients.
        began = at + 1 - case.window
        with_data = sum(count > began for count in case.counts)
        ranks = len(case.counts) if case.by_initial else with_data
        for parameter in twin.parameters():
            if parameter.grad is not None:
                parameter.grad /= samples if case.weighted else ranks
        yield twin
        optimizer.step()
        optimizer.zero_grad()
        samples = 0


CASES: dict[str, Uneven] = {
    "one batch more": Uneven((3, 4)),
    "no data at all": Uneven((0, 0)),
    "even": Uneven((3, 3)),
    "four ranks": Uneven((1, 3, 0, 4)),
    "weighted": Uneven((1, 4, 2), weighted=True),
    "AdamW, two epochs": Uneven((2, 5), optimizer="adamw", epochs=2),
    "leaving in the middle of a window": Uneven((3, 8), window=2),
    "leaving in the middle, by those with data": Uneven((3, 5, 8), window=2, by_initial=False),
    "no_sync around backward alone": Uneven((5, 3), window=2, local="backward"),
    "a last average stays in the gradients": Uneven((1, 4), zero_at="start"),
    "checkpointed, reentrant": Uneven((1, 0, 3), how="reentrant", window=2),
    "without broadcast of buffers": Uneven((1, 3), broadcast=False),
    "through torch's Join": Uneven((1, 4), entry="Join"),
    "with ZeRO, three ranks": Uneven((0, 4, 2), optimizer="adamw", entry="Join with ZeRO", epochs=2),
    "without normalization": Uneven((4, 1), build=Plain),
}


@pytest.mark.parametrize("name", CASES)
def test_uneven_inputs_equal_one_process(pools: Pools, name: str) -> None:
    case = CASES[name]
    pools.run(len(case.counts), compare_with_twin, case)


def test_uneven_inputs_equal_one_process_on_gloo() -> None:
    run_ranks(2, compare_with_twin, CASES["leaving in the middle of a window"], backend="gloo")


# Layers and hooks need their collectives in one order, but a rank without data does not know the order of the others'
# buckets and layers.
@pytest.mark.parametrize(("sums", "window"), [("ring", 1), ("hook", 2), ("PowerSGD", 1)])
def test_collectives_of_layers_and_hooks_keep_one_order(pools: Pools, sums: str, window: int) -> None:
    weighted = sums != "hook"  # a mean over all ranks includes ranks without data
    pools.run(3, compare_with_twin, Uneven((2, 0, 5), sums=sums, window=window, weighted=weighted, by_initial=weighted))


def train_with_subgroup_norms(world: World, counts: tuple[int, ...], groups: list[list[int]], sums: str) -> None:
    """Compute statistics over subgroups, including a single rank, while gradients are averaged over all ranks."""
    torch.manual_seed(0)
    twin = ConvNet()
    made = [dist.new_group(ranks) for ranks in groups]
    subgroup = next(group for group, ranks in zip(made, groups, strict=True) if world.rank in ranks)
    module = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(twin), subgroup)
    model = wrapped(module, sums, broadcast_buffers=False)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (model, twin)]
    with model.join():
        for at in range(counts[world.rank]):
            loss_of(model(batch(world.rank, at))).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
    for at in range(max(counts)):
        for ranks in groups:
            if parts := [batch(rank, at) for rank in ranks if at < counts[rank]]:
                (loss_of(twin(torch.cat(parts))) / world.size).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    same_weights(module, twin, RTOL, f"rank {world.rank}")


@pytest.mark.parametrize(("sums", "counts"), [("hook", (3, 1, 2)), ("all-reduce", (1, 3, 0))])
def test_norm_layers_over_a_subgroup_are_shadowed(pools: Pools, counts: tuple[int, ...], sums: str) -> None:
    pools.run(3, train_with_subgroup_norms, counts, [[0], [1, 2]], sums)


def join_with_norms_outside_the_wrapper(world: World) -> str:
    """The other half of the world is not notified if a rank of this half runs out."""
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    module = SyncBatchNorm.convert_sync_batchnorm(ConvNet())
    model = DistributedDataParallel(module, process_group=halves[world.rank // 2])
    with pytest.raises(UsageError) as caught, model.join():
        pass
    return str(caught.value)


def test_norm_layers_over_more_ranks_than_the_wrapper_are_refused(pools: Pools) -> None:
    messages = pools.run(4, join_with_norms_outside_the_wrapper)
    assert "SyncBatchNorm 'norm' communicates with ranks [2, 3]" in messages[0]
    assert "SyncBatchNorm 'norm' communicates with ranks [0, 1]" in messages[3]


def train_two_models(world: World) -> None:
    torch.manual_seed(0)
    twins = [ConvNet(), ConvNet()]
    models = [
        wrapped(SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(twin)), sums)
        for twin, sums in zip(twins, ("top-k", "all-reduce"), strict=True)
    ]
    counts = (3, 1)
    optimizers = {id(net): torch.optim.SGD(net.parameters(), lr=0.05) for net in (*models, *twins)}

    def step(net: Any, x: Tensor) -> None:
        (loss_of(net(x)) / (1 if net in models else world.size)).backward()
        optimizers[id(net)].step()
        optimizers[id(net)].zero_grad()

    with Join(models):
        for at in range(counts[world.rank]):
            for model in models:
                step(model, batch(world.rank, at))
    for at in range(max(counts)):
        for twin in twins:
            step(twin, torch.cat([batch(rank, at) for rank, count in enumerate(counts) if at < count]))
    for model, twin in zip(models, twins, strict=True):
        same_weights(model.module, twin, RTOL, f"rank {world.rank}")


def test_two_models_in_one_join_may_average_differently(pools: Pools) -> None:
    pools.run(2, train_two_models)


@pytest.mark.slow
@draws(15)
@given(
    counts=st.lists(st.integers(0, 6), min_size=3, max_size=3).map(tuple),
    window=st.integers(1, 3),
    weighted=st.booleans(),
    by_initial=st.booleans(),
    local=st.sampled_from(["both", "backward"]),
)
def test_any_counts_equal_one_process(
    pools: Pools, counts: tuple[int, ...], window: int, weighted: bool, by_initial: bool, local: str
) -> None:
    case = Uneven(counts, window=window, weighted=weighted, by_initial=by_initial, local=local)
    pools.run(3, compare_with_twin, case)


# -- other steps than forward, backward, step --------------------------------------------------------------------------


def two_outputs_two_backwards(model: Any, x: Tensor) -> None:
    first, second = loss_of(model(x)), loss_of(model(x + 1))
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        first.backward()
    second.backward()


def forward_without_gradients_first(model: Any, x: Tensor) -> None:
    """Update statistics in a forward without gradients first."""
    with torch.no_grad():
        model(x * 2)
    loss_of(model(x)).backward()


def in_eval_mode(model: Any, x: Tensor) -> None:
    model.eval()
    loss_of(model(x)).backward()
    model.train()


def gradient_penalty(model: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    with no_warning_about_cycles():
        out = model(x)
        (slope,) = torch.autograd.grad(loss_of(out), x, create_graph=True)
        (loss_of(out) + (slope**2).sum()).backward()


def unused_forward(model: Any, x: Tensor) -> None:
    loss_of(model(x)).backward()
    model(x + 1)


def accumulated_by_hand(model: Any, x: Tensor) -> None:
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        loss_of(model(x)).backward()
    if hasattr(model, "sync_gradients"):
        model.sync_gradients()


STEPS = [
    two_outputs_two_backwards, forward_without_gradients_first, in_eval_mode, gradient_penalty, unused_forward,
    accumulated_by_hand,
]  # fmt: skip


def run_unusual_steps(world: World, counts: tuple[int, ...], step: Callable[[Any, Tensor], None]) -> None:
    torch.manual_seed(0)
    twin = ConvNet()
    module = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(twin))
    model = DistributedDataParallel(module)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (model, twin)]
    with model.join():
        for at in range(counts[world.rank]):
            step(model, batch(world.rank, at))
            optimizers[0].step()
            optimizers[0].zero_grad()
    for at in range(max(counts)):
        step(twin, torch.cat([batch(rank, at) for rank, count in enumerate(counts) if at < count]))
        for parameter in twin.parameters():
            if parameter.grad is not None:
                parameter.grad /= world.size
        optimizers[1].step()
        optimizers[1].zero_grad()
    same_weights(module, twin, RTOL, f"rank {world.rank}")
    for (name, ours), others in zip(module.named_buffers(), twin.buffers(), strict=True):
        same_tensor(ours.double(), others.double(), RTOL, name)


@pytest.mark.parametrize(("step", "counts"), [(step, (2, 0) if at % 2 else (1, 3)) for at, step in enumerate(STEPS)])
def test_unusual_steps_are_shadowed(pools: Pools, counts: tuple[int, ...], step: Any) -> None:
    pools.run(len(counts), run_unusual_steps, counts, step)


# -- unsynchronized statistics -----------------------------------------------------------------------------------------


def train_with_local_norms(world: World) -> str:
    """Check that BatchNorm's buffers are broadcast from the lowest rank with data."""
    torch.manual_seed(0)
    model = DistributedDataParallel(ConvNet())
    with model.join():
        for at in range(1 + 2 * world.rank):
            loss_of(model(batch(world.rank, at))).backward()
            model.zero_grad()
    torch.manual_seed(0)
    twins = [ConvNet() for _ in range(world.size)]
    for twin in twins:
        twin.load_state_dict(model.module.state_dict())
        twin.norm.reset_running_stats()
        twin.bare.reset_running_stats()
    for at in range(5):
        present = [rank for rank in range(world.size) if at < 1 + 2 * rank]
        for rank in present[1:]:
            twins[rank].load_state_dict(twins[present[0]].state_dict())
        for rank in present:
            twins[rank](batch(rank, at))
    for ours, last in zip(model.buffers(), twins[-1].buffers(), strict=True):
        same_tensor(ours.double(), last.double(), RTOL, "buffer")
    return str([buffer.tolist() for buffer in model.buffers()])


def test_buffers_end_equal_on_every_rank(pools: Pools) -> None:
    assert len(set(pools.run(3, train_with_local_norms))) == 1


# -- warnings and errors -----------------------------------------------------------------------------------------------


def train_past_the_end(world: World, passes_optimizer: bool) -> tuple[list[str], list[Any]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Plain())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.join(optimizers=[optimizer] if passes_optimizer else []):
            for at in range(2 + 3 * world.rank):
                loss_of(model(batch(world.rank, at))).backward()
                optimizer.step()
                optimizer.zero_grad()
    for at in range(2):  # one more step, and the comparison of parameters would detect the drift
        loss_of(model(batch(world.rank, at))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [str(warning.message) for warning in caught], [p.tolist() for p in model.parameters()]


def test_stale_optimizer_state_is_reported_or_updated(pools: Pools) -> None:
    """Torch gives no warning: models are equal after join but diverge in the next step."""
    for [message], _ in pools.run(2, train_past_the_end, False):
        assert "data ran out on rank 0 after 2 of 5 optimizer steps" in message
    (warned, first), (_, second) = pools.run(2, train_past_the_end, True)
    assert not warned
    assert first == second


def raise_in_join(world: World) -> None:
    model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(ConvNet()))
    with pytest.raises(KeyError, match="on purpose"), model.join():  # noqa: PT012
        loss_of(model(batch(world.rank, 0))).backward()
        raise KeyError("on purpose")
    assert all(layer.announce is None for layer in model.modules() if isinstance(layer, SyncBatchNorm))
    model.zero_grad()
    loss_of(model(batch(world.rank, 1))).backward()


def test_exception_inside_join_propagates_and_leaves_no_state(pools: Pools) -> None:
    pools.run(2, raise_in_join)


def backward_that_raises(world: World) -> str:
    """Fail in rank 1's second backward, without data on rank 0; rank 1 informs the others by using the model again."""

    def fail(_: Tensor) -> None:
        raise KeyError("on purpose")

    torch.manual_seed(0)
    model = DistributedDataParallel(Plain(), bucket_cap_mb=1e-4)
    try:
        with model.join():
            for at in range(2 if world.rank else 0):
                loss = loss_of(model(batch(world.rank, at)))
                if (world.rank, at) == (1, 1):
                    model.module.net[1].weight.register_hook(fail)
                    with pytest.raises(KeyError):
                        loss.backward()
                    with model.weight(0):  # joins the collectives that the others wait for
                        raise KeyError("seen")
                loss.backward()
                model.zero_grad()
    except (KeyError, DesyncError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_failed_backward_inside_join_is_reported_on_all_ranks(pools: Pools) -> None:
    first, second, third = pools.run(3, backward_that_raises)
    assert second == "KeyError: 'seen'"
    assert first.startswith("DesyncError: rank 0: backward was ended by an exception on rank 1")
    assert third.startswith("DesyncError: rank 2: backward was ended by an exception on rank 1")


def join_with_torch_norm(world: World) -> str:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(Plain(), nn.SyncBatchNorm(2)))
    with pytest.raises(UsageError) as caught, model.join():  # noqa: PT012
        if world.rank == 0:
            model(batch(0, 0))
    return str(caught.value)


def test_torch_sync_batch_norm_is_refused_by_name(pools: Pools) -> None:
    for message in pools.run(2, join_with_torch_norm):
        assert "torch's SyncBatchNorm '1'; use paceline.SyncBatchNorm" in message
