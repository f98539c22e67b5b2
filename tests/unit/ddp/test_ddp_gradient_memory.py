"""Whose memory a gradient lies in: what users keep of gradients, or do with them, is as with memory of their own.

Gradients are views of buckets. Scripts that hold gradients across steps, point ``p.grad`` to other memory or give it
their own work in one process and with torch DDP's default; with views they were silently wrong. Each use below is run
on two ranks, and beside it in one process on the whole batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from insides import channel_of, pieces_in_use, storage_of
from models import chain
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from twins import Pools

WHOLE = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TINY = 1e-4
"""MiB that hold about a layer, so that there are several buckets."""


def net() -> nn.Sequential:
    return chain(6, 8, 8, 3, dtype=torch.float64)


def mine(world: World) -> Tensor:
    return WHOLE.chunk(world.size)[world.rank]


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


# -- what is done with gradients before the optimizer steps ------------------------------------------------------------


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def by_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.data = halve(parameter.grad)


def by_data_while_the_old_memory_is_kept(module: nn.Module) -> None:
    # One tensor less in the bucket's memory, and one more: their number alone does not tell.
    module.kept = []
    for parameter in module.parameters():
        module.kept.append(parameter.grad.data)
        parameter.grad.data = halve(parameter.grad)


def in_shared_memory(module: nn.Module) -> None:
    module.share_memory()  # moves the memory of a whole bucket


def by_assignment(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = halve(parameter.grad)


def detached_in_place(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.detach_()  # refused by autograd for views that it knows


def transposed(module: nn.Module) -> None:
    module[2].weight.grad = module[2].weight.grad.t()


def exchanged(module: nn.Module) -> None:
    a, b = module[0].bias, module[2].bias
    a.grad, b.grad = b.grad, a.grad


EDITS = [
    by_data,
    by_data_while_the_old_memory_is_kept,
    in_shared_memory,
    by_assignment,
    detached_in_place,
    transposed,
    exchanged,
]


def edited(world: World, edit: Callable[[nn.Module], None], to_none: bool, options: dict[str, Any]) -> None:
    model, twin = DistributedDataParallel(net(), **options), net()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        model(mine(world)).square().mean().backward()
        twin(WHOLE).square().mean().backward()
        if step and edit is in_shared_memory and not to_none:
            assert all(p.grad.is_shared() for p in model.parameters())  # as another process may read it
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
def test_a_gradient_that_was_replaced_or_pointed_elsewhere_is_averaged_in_the_next_step(
    pools: Pools, to_none: bool, options: dict[str, Any]
) -> None:
    """After ``p.grad.data = …`` and ``share_memory()`` the reducer took the user's memory for its bucket."""
    for edit in EDITS[:3] if to_none else EDITS:
        pools.run(2, edited, edit, to_none, options)


# -- what is kept of gradients across steps ----------------------------------------------------------------------------


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
        for one, x in ((model, mine(world)), (twin, WHOLE)):
            one.zero_grad()
            one(x).pow(2 + step % 2).mean().backward()
        if step != 3:  # and then again
            kept += [
                (make(ours.grad), make(theirs.grad))
                for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True)
            ]
        for one in (model, twin):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
    for ours, theirs in kept:
        close(read(ours), read(theirs))


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_of_gradients_keeps_its_values(pools: Pools, kind: str) -> None:
    """As PCGrad and other gradient surgery do; the next backward used to overwrite it."""
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


def test_one_small_gradient_kept_over_many_steps_does_not_hold_a_bucket_for_each(pools: Pools) -> None:
    """A bucket is 25 MiB, a bias may be a kilobyte: after the first time, gradients that are kept are copies."""
    for used, at_the_end in pools.run(2, keep_one_of_many):
        assert max(used) <= used[0] + 1
        assert at_the_end == used[0]  # given back when nobody refers to it, and gradients are views again


def reference_while_accumulating(world: World) -> None:
    """With the gradient still there, torch accumulates into it, and who refers to it sees the average."""
    model, twin = DistributedDataParallel(net()), net()
    kept: list[list[Tensor]] = []
    for one, x in ((model, mine(world)), (twin, WHOLE)):
        references: list[Tensor] = []
        for step in range(3):
            one(x).pow(2).mean().backward()
            if step == 0:
                references = [p.grad for p in one.parameters()]
            for parameter in one.parameters():
                parameter.grad.mul_(0.5)
        assert all(a is b.grad for a, b in zip(references, one.parameters(), strict=True))
        kept.append(references)
    close(*kept)


def test_a_reference_sees_what_accumulates_into_its_gradient(pools: Pools) -> None:
    pools.run(2, reference_while_accumulating)


def flat_buffer(world: World, options: dict[str, Any]) -> None:
    results = []
    for one, x in ((DistributedDataParallel(net(), **options), mine(world)), (net(), WHOLE)):
        flat = torch.zeros(sum(p.numel() for p in one.parameters()), dtype=torch.float64)
        for part, parameter in zip(flat.split([p.numel() for p in one.parameters()]), one.parameters(), strict=True):
            parameter.grad = part.view_as(parameter)
        for _ in range(3):
            flat.zero_()
            one(x).square().mean().backward()
            with torch.no_grad():
                for part, parameter in zip(
                    flat.split([p.numel() for p in one.parameters()]), one.parameters(), strict=True
                ):
                    parameter.sub_(part.view_as(parameter), alpha=0.1)
        results.append([flat, *one.parameters()])
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if options else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(*results, **tolerance)


@pytest.mark.parametrize("options", [{}, {"reduce_dtype": torch.float32}], ids=str)
def test_gradients_in_a_flat_buffer_of_the_users_end_as_averages_there(pools: Pools, options: dict[str, Any]) -> None:
    """``p.grad`` became the bucket's view, and the buffer that the user's optimizer reads kept the rank's own."""
    pools.run(2, flat_buffer, options)


def local_by_data(world: World) -> str:
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


def test_local_values_pointed_to_by_an_averaged_gradient_are_refused(pools: Pools) -> None:
    """The guard took the tensor for an average, as it was the same object."""
    for message in pools.run(2, local_by_data):
        assert "'0.weight' that the wrapper has not averaged" in message


def layout_restored(world: World) -> None:
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    model(mine(world)).square().mean().backward()
    kept, before = [p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    model.load_bucket_layout([[name] for name, _ in model.module.named_parameters()])
    close([p.grad for p in model.parameters()], before)
    model.zero_grad()
    model(mine(world)).pow(3).mean().backward()
    close(kept, before)


def test_gradients_kept_while_buckets_are_rebuilt_keep_their_values(pools: Pools) -> None:
    """The old buckets' memory was given back to the host, which reads as zeros."""
    pools.run(2, layout_restored)


# -- gradients that the script averages by itself ----------------------------------------------------------------------


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


def made_by_hand(world: World, make: Callable[..., None]) -> str:
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
    model(mine(world)).square().mean().backward()  # as if nothing had been
    twin(WHOLE).square().mean().backward()
    close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    close(list(model.parameters()), list(twin.parameters()))
    return message


@pytest.mark.parametrize("make", [by_autograd_grad, under_no_sync, from_equal_random_numbers])
def test_gradients_averaged_by_hand_are_stepped_over_once_the_script_says_so(
    pools: Pools, make: Callable[..., None]
) -> None:
    """They were refused, with a message that claimed they were not averaged."""
    for message in pools.run(2, made_by_hand, make):
        assert "call model.gradients_are_averaged() on all of them first" in message


def not_equal(world: World) -> list[str]:
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


def test_gradients_that_differ_are_refused_on_every_rank_when_said_to_be_averaged(pools: Pools) -> None:
    for messages in pools.run(3, not_equal):
        for message in messages:
            assert "that of '2.bias' is not the same on rank 1 as on rank 0" in message


def asked_of_copies_and_alone(world: World) -> None:
    copied = copy.deepcopy(DistributedDataParallel(net()))
    from_equal_random_numbers(copied, world)
    copied.gradients_are_averaged()
    torch.optim.SGD(copied.parameters(), lr=0.1).step()


def test_copies_and_a_world_of_one_take_gradients_made_by_hand(pools: Pools) -> None:
    pools.run(2, asked_of_copies_and_alone)
    pools.run(1, asked_of_copies_and_alone)
