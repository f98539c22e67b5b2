"""Memory of gradients: users can keep and change gradients, also in hooks, as if each had its own memory.

Gradients are views of buckets. Scripts that keep gradients across steps, point ``p.grad`` to other memory or assign it
work in one process and with torch DDP's default, but were silently wrong with views. Each test compares two ranks
with one process on the whole batch.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from deep import TINY, Deep, data
from insides import channel_of, pieces_in_use, storage_of
from models import chain
from paceline import World
from paceline.ddp import DistributedDataParallel
from twins import Pools

WHOLE = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net() -> nn.Sequential:
    return chain(6, 8, 8, 3, dtype=torch.float64)


def mine(world: World) -> Tensor:
    return WHOLE.chunk(world.size)[world.rank]


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


# -- changing gradients before the optimizer step ----------------------------------------------------------------------


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def by_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.data = halve(parameter.grad)


def by_data_while_the_old_memory_is_kept(module: nn.Module) -> None:
    # One tensor leaves the bucket's memory and another joins it, so counting tensors does not detect it.
    module.kept = []
    for parameter in module.parameters():
        module.kept.append(parameter.grad.data)
        parameter.grad.data = halve(parameter.grad)


def in_shared_memory(module: nn.Module) -> None:
    module.share_memory()  # moves the memory of the whole bucket


def by_assignment(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = halve(parameter.grad)


def detached_in_place(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.detach_()  # autograd refuses this for views it knows about


def transposed(module: nn.Module) -> None:
    module[2].weight.grad = module[2].weight.grad.t()


def exchanged(module: nn.Module) -> None:
    a, b = module[0].bias, module[2].bias
    a.grad, b.grad = b.grad, a.grad


EDITS = [
    by_data, by_data_while_the_old_memory_is_kept, in_shared_memory, by_assignment, detached_in_place, transposed,
    exchanged,
]  # fmt: skip


def train_with_edit(world: World, edit: Callable[[nn.Module], None], to_none: bool, options: dict[str, Any]) -> None:
    model, twin = DistributedDataParallel(net(), **options), net()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, twin)]
    warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        model(mine(world)).square().mean().backward()
        twin(WHOLE).square().mean().backward()
        if step and edit is in_shared_memory and not to_none:
            assert all(p.grad.is_shared() for p in model.parameters())  # because another process may read it
        close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        edit(model.module)
        edit(twin)
        for optimizer in optimizers:
            optimizer.step()
    close(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize(
    ("to_none", "options"),
    [(False, {"bucket_cap_mb": TINY}), (True, {"gradient_as_bucket_view": True})],
)
def test_replaced_gradient_is_averaged_in_the_next_step(pools: Pools, to_none: bool, options: dict[str, Any]) -> None:
    """After ``p.grad.data = …`` and ``share_memory()`` the reducer mistook the user's memory for its bucket."""
    for edit in EDITS[:3] if to_none else EDITS:
        pools.run(2, train_with_edit, edit, to_none, options)


# -- keeping gradients across steps ------------------------------------------------------------------------------------


def itself(gradient: Tensor) -> Tensor:
    return gradient


def in_storage(gradient: Tensor) -> tuple[Any, ...]:
    return gradient.untyped_storage(), gradient.storage_offset(), gradient.shape


def out_of_storage(held: tuple[Any, ...]) -> Tensor:
    return torch.empty(0, dtype=torch.float64).set_(*held).reshape(-1)


KEPT = {
    "itself": (itself, torch.flatten),
    "data": (lambda gradient: gradient.data, torch.flatten),
    "part": (lambda gradient: gradient[0], torch.flatten),
    "numpy": (lambda gradient: gradient.numpy(), lambda array: torch.from_numpy(array).flatten()),
    "dlpack": (lambda gradient: torch.from_dlpack(gradient), torch.flatten),
    "storage": (in_storage, out_of_storage),
}


def keep(world: World, kind: str, options: dict[str, Any], hooked: bool) -> None:
    make, read = KEPT[kind]
    model, twin = DistributedDataParallel(net(), **options), net()
    if hooked:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    kept: list[tuple[Any, Any]] = []
    for step in range(5):
        for module, x in ((model, mine(world)), (twin, WHOLE)):
            module.zero_grad()
            module(x).pow(2 + step % 2).mean().backward()
        if step != 3:  # keep none in one step, then again
            kept += [
                (make(ours.grad), make(theirs.grad))
                for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True)
            ]
        for module in (model, twin):
            torch.optim.SGD(module.parameters(), lr=0.1).step()
    for ours, theirs in kept:
        close(read(ours), read(theirs))


@pytest.mark.parametrize("kind", KEPT)
def test_kept_gradients_keep_their_values(pools: Pools, kind: str) -> None:
    """PCGrad and other gradient surgery keep gradients; the next backward used to overwrite them."""
    pools.run(2, keep, kind, {}, False)
    pools.run(2, keep, kind, {"bucket_cap_mb": TINY}, True)


def keep_one_of_many(world: World) -> tuple[list[int], int]:
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    storage, group = storage_of(model), channel_of(model).group
    history, used = [], []
    for _ in range(12):
        model.zero_grad()
        model(mine(world)).square().mean().backward()
        history.append(model.module[0].bias.grad.detach())
        used.append(pieces_in_use(group))
    history.clear()
    for _ in range(2):
        model.zero_grad()
        model(mine(world)).square().mean().backward()
    flats = [(bucket.flat.data_ptr(), bucket.flat.nbytes) for bucket in storage.buckets]
    inside = [any(at <= p.grad.data_ptr() < at + size for at, size in flats) for p in model.parameters()]
    assert all(inside)
    return used, pieces_in_use(group)


def test_keeping_a_small_gradient_does_not_keep_whole_buckets(pools: Pools) -> None:
    """A bucket has 25 MiB, a bias maybe one kilobyte: after the first time, kept gradients are copies."""
    for used, at_the_end in pools.run(2, keep_one_of_many):
        assert max(used) <= used[0] + 1
        assert at_the_end == used[0]  # released without references, and gradients are views again


def reference_while_accumulating(world: World) -> None:
    """Torch accumulates into an existing gradient, so a reference to it sees the average."""
    model, twin = DistributedDataParallel(net()), net()
    kept: list[list[Tensor]] = []
    for module, x in ((model, mine(world)), (twin, WHOLE)):
        references: list[Tensor] = []
        for step in range(3):
            module(x).pow(2).mean().backward()
            if step == 0:
                references = [p.grad for p in module.parameters()]
            for parameter in module.parameters():
                parameter.grad.mul_(0.5)
        assert all(a is b.grad for a, b in zip(references, module.parameters(), strict=True))
        kept.append(references)
    close(*kept)


def test_reference_to_a_gradient_sees_later_accumulation(pools: Pools) -> None:
    pools.run(2, reference_while_accumulating)


def flat_buffer(world: World, options: dict[str, Any]) -> None:
    results = []
    for module, x in ((DistributedDataParallel(net(), **options), mine(world)), (net(), WHOLE)):
        flat = torch.zeros(sum(p.numel() for p in module.parameters()), dtype=torch.float64)
        sizes = [p.numel() for p in module.parameters()]
        pairs = [(p, part.view_as(p)) for p, part in zip(module.parameters(), flat.split(sizes), strict=True)]
        for parameter, part in pairs:
            parameter.grad = part
        for _ in range(3):
            flat.zero_()
            module(x).square().mean().backward()
            with torch.no_grad():
                for parameter, part in pairs:
                    parameter.sub_(part, alpha=0.1)
        results.append([flat, *module.parameters()])
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if options else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(*results, **tolerance)


@pytest.mark.parametrize("options", [{}, {"reduce_dtype": torch.float32}], ids=str)
def test_gradients_in_a_user_flat_buffer_are_averaged_in_place(pools: Pools, options: dict[str, Any]) -> None:
    """``p.grad`` became a view of the bucket, and the buffer read by the user's optimizer kept local gradients."""
    pools.run(2, flat_buffer, options)


def step_with_local_data(world: World) -> str:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(mine(world)).square().mean().backward()
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad.data = torch.full_like(parameter, float(world.rank + 1))
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def test_local_values_assigned_through_grad_data_are_refused(pools: Pools) -> None:
    """The guard mistook the tensor for an average because it was the same object."""
    for message in pools.run(2, step_with_local_data):
        assert "'0.weight' that the wrapper has not averaged" in message


def rebuild_buckets(world: World) -> None:
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    model(mine(world)).square().mean().backward()
    kept, expected = [p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    model.load_bucket_layout([[name] for name, _ in model.module.named_parameters()])
    close([p.grad for p in model.parameters()], expected)
    model.zero_grad()
    model(mine(world)).pow(3).mean().backward()
    close(kept, expected)


def test_kept_gradients_survive_a_bucket_rebuild(pools: Pools) -> None:
    """The memory of the old buckets was returned to the operating system and read as zeros."""
    pools.run(2, rebuild_buckets)


# -- gradients averaged by the script ----------------------------------------------------------------------------------


def average(module: nn.Module, world: World) -> None:
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world.size


def by_autograd_grad(model: DistributedDataParallel, world: World) -> None:
    loss = model(mine(world)).square().mean()
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient
    average(model, world)


def under_no_sync(model: DistributedDataParallel, world: World) -> None:
    with model.no_sync():
        model(mine(world)).square().mean().backward()
    average(model, world)


def from_equal_random_numbers(model: DistributedDataParallel, world: World) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def train_by_hand(world: World, make: Callable[..., None]) -> str:
    model, twin = DistributedDataParallel(net()), net()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    message = ""
    for step in range(3):
        optimizer.zero_grad()
        make(model, world)
        if step == 0:
            with pytest.raises(ValueError, match="the wrapper has not averaged") as caught:
                optimizer.step()
            message = str(caught.value)
        model.gradients_are_averaged()
        optimizer.step()
        other.zero_grad()
        if make is from_equal_random_numbers:
            make(twin, world)
        else:
            twin(WHOLE).square().mean().backward()
        other.step()
    model.zero_grad()
    twin.zero_grad()
    model(mine(world)).square().mean().backward()  # back to normal steps
    twin(WHOLE).square().mean().backward()
    close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    close(list(model.parameters()), list(twin.parameters()))
    return message


@pytest.mark.parametrize("make", [by_autograd_grad, under_no_sync, from_equal_random_numbers])
def test_manually_averaged_gradients_are_accepted_once_declared(pools: Pools, make: Callable[..., None]) -> None:
    """They were refused with a message claiming that they were not averaged."""
    for message in pools.run(2, train_by_hand, make):
        assert "call model.gradients_are_averaged() on all of them first" in message


def declare_unequal_gradients(world: World) -> list[str]:
    model = DistributedDataParallel(net())
    messages = []
    for change in (1.0, None):
        from_equal_random_numbers(model, world)
        if world.rank == 1:
            model.module[2].bias.grad = None if change is None else model.module[2].bias.grad + change
        with pytest.raises(ValueError, match="differ between ranks") as caught:
            model.gradients_are_averaged()
        messages.append(str(caught.value))
    return messages


def test_differing_gradients_declared_as_averaged_are_refused_on_every_rank(pools: Pools) -> None:
    for messages in pools.run(3, declare_unequal_gradients):
        for message in messages:
            assert "that of '2.bias' is not the same on rank 1 as on rank 0" in message


def declare_on_a_copy(world: World) -> None:
    copied = copy.deepcopy(DistributedDataParallel(net()))
    from_equal_random_numbers(copied, world)
    copied.gradients_are_averaged()
    torch.optim.SGD(copied.parameters(), lr=0.1).step()


def test_copies_and_single_ranks_accept_manually_set_gradients(pools: Pools) -> None:
    pools.run(2, declare_on_a_copy)
    pools.run(1, declare_on_a_copy)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.table(rows))


def check_nothing_is_retained(world: World) -> None:
    made: list[Any] = []

    def hook(_: object, bucket: Any) -> Any:
        mean = bucket.buffer().clone()
        dist.all_reduce(mean)
        made.append(weakref.ref(mean))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(mean.div_(world.size))
        return future

    model = DistributedDataParallel(Lookup())
    model.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([1, 2])).square().sum().backward()
    sparse = weakref.ref(model.module.table.weight.grad)
    model.zero_grad()
    gc.collect()
    assert sparse() is None
    assert all(reference() is None for reference in made)


def test_sparse_gradients_and_hook_results_are_freed_between_steps(pools: Pools) -> None:
    pools.run(2, check_nothing_is_retained)


# -- hooks -------------------------------------------------------------------------------------------------------------


STEPS, REMOVED = 7, 6
Log = list[tuple[str, Tensor | None]]


def accumulated(log: Log, name: str, change: Callable[[Tensor], Tensor], parameter: Tensor) -> None:
    log.append((name, None if parameter.grad is None else parameter.grad.clone()))
    if parameter.grad is not None:
        parameter.grad = change(parameter.grad)


def on_each(net: nn.Module, log: Log, change: Callable[[Tensor], Tensor], label: str = "") -> list[Any]:
    return [
        parameter.register_post_accumulate_grad_hook(partial(accumulated, log, label + name, change))
        for name, parameter in net.named_parameters()
    ]


def clipping(net: nn.Module, log: Log) -> list[Any]:
    return on_each(net, log, lambda gradient: gradient.clamp_(-0.1, 0.1))


def replacing(net: nn.Module, log: Log) -> list[Any]:
    return on_each(net, log, lambda gradient: gradient / 2)


def two_of_them(net: nn.Module, log: Log) -> list[Any]:
    return [
        *on_each(net, log, lambda gradient: gradient.add_(1), "first "),
        *on_each(net, log, lambda gradient: gradient.mul_(2), "second "),
    ]


def on_tensors(net: nn.Module, log: Log) -> list[Any]:
    def arrived(name: str, gradient: Tensor) -> Tensor:
        log.append((name, gradient.clone()))
        return gradient * 3

    return [parameter.register_hook(partial(arrived, name)) for name, parameter in net.named_parameters()]


def on_all_together(net: nn.Module, log: Log) -> list[Any]:
    def arrived(gradients: Any) -> None:
        log.extend((f"all {place}", gradient.clone()) for place, gradient in enumerate(gradients))

    return [register_multi_grad_hook(list(net.parameters()), arrived)]


def from_within_backward(net: nn.Module, log: Log, *, prepend: bool = False) -> list[Any]:
    """Register hooks once the last layer's outputs have gradients; remove them in every step."""
    handles: list[Any] = []

    def begins(*_: Any) -> None:
        while handles:
            handles.pop().remove()
        handles.extend(clipping(net, log))

    hook = net.layers[-1].register_full_backward_pre_hook(begins, prepend=prepend)  # type: ignore[index,union-attr]
    return [hook, *handles]


def from_another_hook(net: nn.Module, log: Log) -> list[Any]:
    """Register hooks on all earlier layers when the last layer's gradient arrives."""
    layers: Any = net.layers
    return [layers[-1].weight.register_post_accumulate_grad_hook(lambda _: clipping(layers[:3], log) and None)]


CASES = [
    clipping,
    replacing,
    two_of_them,
    on_tensors,
    on_all_together,
    from_within_backward,
    partial(from_within_backward, prepend=True),
    from_another_hook,
]


def train(model: Any, rank: int, install: Callable[[nn.Module, Log], list[Any]], between: bool) -> tuple[Log, Any]:
    """Return the log of the hooks and all gradients; hooks are installed in step 2, `between` micro-batches or not."""
    net, log, handles, gradients = model.module, [], [], []
    for step in range(STEPS):
        batches = 3 if between and step == 2 else 1
        for batch in range(batches):
            if (step, batch) == (2, int(between)):
                handles = install(net, log)
            log.append((f"step {step}, batch {batch}", None))
            with nullcontext() if batch == batches - 1 else model.no_sync():
                model(data(rank, 10 * step + batch)).sin().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in net.parameters()])
        model.zero_grad(set_to_none=step != 3)
        if step == REMOVED - 1:
            for handle in handles:
                handle.remove()
    return log, gradients


def compare(where: str, ours: tuple[Log, Any], theirs: tuple[Log, Any]) -> None:
    assert [name for name, _ in ours[0]] == [name for name, _ in theirs[0]], where
    for (name, mine), (_, other) in zip(ours[0], theirs[0], strict=True):
        assert (mine is None) == (other is None), f"{where} {name}"
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{where} {name}: {text}")
    torch.testing.assert_close(ours[1], theirs[1], msg=lambda text: f"{where}: {text}")


def compare_with_torch(world: World) -> None:
    for number, case in enumerate(CASES):
        for between, megabytes in ((False, (TINY, 25)[number % 2]), (True, TINY)):
            torch.manual_seed(0)
            net = Deep()
            theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=megabytes)
            ours = DistributedDataParallel(net, bucket_cap_mb=megabytes)
            compare(
                f"{case}, between={between}, {megabytes} MB:",
                train(ours, world.rank, case, between),
                train(theirs, world.rank, case, between),
            )


@pytest.mark.slow
def test_gradient_hooks_run_as_with_torch_ddp_whenever_registered(pools: Pools) -> None:
    """They run on every gradient, before averaging.

    Our own hook on a parameter launches a bucket, after which ``p.grad`` is None. A user hook registered later silently
    skipped the parameter of each bucket that carries our hook.
    """
    pools.run(2, compare_with_torch)
