"""Parameters shared by several live wrappers get the sum of all averages exactly once.

Each program below runs twice: on the ranks' slices with wrappers, and on the whole batch with bare modules. Previously
each wrapper's hook on a parameter started a backward and took the gradient away from the others: it became None, was
averaged twice, or the ranks deadlocked.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError, HookError, ReplicaMismatch, UsageError
from twins import Pools, same_gradients, same_weights


class Side:
    """One of the two runs: wrapped on this rank's slice, or unwrapped on the whole batch."""

    def __init__(self, world: World, *, wrapped: bool, **options: Any) -> None:
        self.world, self.wrapped, self.options = world, wrapped, {"unused_parameters": "allow", **options}
        torch.manual_seed(0)
        self.body = nn.Linear(6, 4).double()
        self.actor = nn.Sequential(self.body, nn.Tanh(), nn.Linear(4, 2).double())
        self.critic = nn.Sequential(self.body, nn.Tanh(), nn.Linear(4, 1).double())

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        return DistributedDataParallel(module, **{**self.options, **options}) if self.wrapped else module

    def batch(self, step: int = 0) -> Tensor:
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        return x[self.world.rank :: self.world.size] if self.wrapped else x

    def no_sync(self, *models: nn.Module) -> AbstractContextManager[Any]:
        return models[0].no_sync() if self.wrapped else nullcontext()

    def weighted(self, model: nn.Module, x: Tensor) -> tuple[AbstractContextManager[None], Callable[[Tensor], Tensor]]:
        """Return the context of a micro-batch and its loss: a weighted sum, or the mean over the whole batch."""
        return (model.weight(len(x)), torch.sum) if self.wrapped else (nullcontext(), lambda t: t.sum() / 8)


Program = Callable[[Side], Iterator[nn.Module]]


def compare_with_twin(world: World, program: Program, options: dict[str, Any]) -> None:
    """Compare parameters and gradients of each module that `program` yields."""
    wrapped, bare = Side(world, wrapped=True, **options), Side(world, wrapped=False)
    for moment, (mine, twin) in enumerate(zip(program(wrapped), program(bare), strict=True)):
        same_gradients(mine, twin, where=f"{program.__name__}, moment {moment}:")
        same_weights(mine, twin, where=f"{program.__name__}, moment {moment}:")


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def one_backward(side: Side) -> Iterator[nn.Module]:
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    optimizer = torch.optim.SGD(dict.fromkeys([*actor.parameters(), *critic.parameters()]), 0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        x = side.batch(step)
        (square(actor(x)) + 0.5 * square(critic(x))).backward()
        yield from (side.actor, side.critic)
        optimizer.step()


def zeroed_in_place(side: Side) -> Iterator[nn.Module]:
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    for step in range(4):
        actor.zero_grad(set_to_none=False), critic.zero_grad(set_to_none=False)
        x = side.batch(step)
        (square(actor(x)) + square(critic(x))).backward()
        square(critic(x.flip(0))).backward()
        yield from (side.actor, side.critic)


def averages_kept_over_steps(side: Side) -> Iterator[nn.Module]:
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    for step in range(6):
        x = side.batch(step)
        if step % 3 == 0:
            (square(actor(x)) + square(critic(x))).backward()
        else:
            square((actor, critic)[step % 2](x)).backward()
        yield from (side.actor, side.critic)


def accumulated(side: Side) -> Iterator[nn.Module]:
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    for step in range(4):
        actor.zero_grad(), critic.zero_grad()
        with side.no_sync(actor), side.no_sync(critic):
            x = side.batch(step)
            (square(actor(x)) + square(critic(x))).backward()
        x = side.batch(step + 10)
        (square(actor(x)) + square(critic(x))).backward()
        yield from (side.actor, side.critic)


def accumulated_by_one_over_the_others_average(side: Side) -> Iterator[nn.Module]:
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    for step in range(4):
        actor.zero_grad(), critic.zero_grad()
        square(actor(side.batch(step))).backward()
        with side.no_sync(critic):
            square(critic(side.batch(step + 10))).backward()
        square(critic(side.batch(step + 20))).backward()
        yield from (side.actor, side.critic)


def weighted_in_one_backward(side: Side) -> Iterator[nn.Module]:
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    for step in range(4):
        actor.zero_grad(), critic.zero_grad()
        x = side.batch(step)
        (outer, loss), (inner, _) = side.weighted(actor, x), side.weighted(critic, x)
        with outer, inner:
            (loss(actor(x).square()) + loss(critic(x).square())).backward()
        yield from (side.actor, side.critic)


def weighted_in_a_backward_each(side: Side) -> Iterator[nn.Module]:
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    for step in range(4):
        actor.zero_grad(), critic.zero_grad()
        for model in (actor, critic):
            x = side.batch(step)
            block, loss = side.weighted(model, x)
            with block:
                loss(model(x).square()).backward()
        yield from (side.actor, side.critic)


def trained_in_turn_inside_both_blocks(side: Side) -> Iterator[nn.Module]:
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    optimizer = torch.optim.SGD({p: None for model in (actor, critic) for p in model.parameters()}, 0.1)
    for step in range(4):
        x = side.batch(step)
        (outer, loss), (inner, _) = side.weighted(actor, x), side.weighted(critic, x)
        with outer, inner:
            loss((actor, critic)[step % 2](x).square()).backward()
        optimizer.step(), optimizer.zero_grad()
        yield from (side.actor, side.critic)


def wrapped_again(side: Side) -> Iterator[nn.Module]:
    old = side.wrap(side.actor)
    square(old(side.batch())).backward()
    new = side.wrap(side.actor, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(new.parameters(), 0.1)
    for step in range(5):
        optimizer.zero_grad()
        square(new(side.batch(step))).backward()
        yield side.actor
        optimizer.step()
    for step in range(2):  # a notebook goes back to the old one
        optimizer.zero_grad()
        square(old(side.batch(step))).backward()
        yield side.actor
        optimizer.step()


class IslandOptimizer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def a_wrapper_inside_a_wrapped_module(side: Side) -> Iterator[nn.Module]:
    torch.manual_seed(1)
    inner = side.wrap(side.actor)
    outer = side.wrap(IslandOptimizer(inner))
    head = outer.module.head if side.wrapped else outer.head
    for step in range(4):
        outer.zero_grad()
        x = side.batch(step)
        block, loss = side.weighted(outer, x)
        if step % 2:
            square(outer(x)).backward()
        else:
            with block:
                loss(outer(x).square()).backward()
        yield from (side.actor, head)


def in_turn(side: Side, models: list[nn.Module], step: int) -> list[nn.Module]:
    """Return the models in the order of this rank's forwards, which differs between ranks."""
    shift = (side.world.rank + step) % len(models) if side.wrapped else 0
    return models[shift:] + models[:shift]


def averages_kept_in_another_order_on_each_rank(side: Side) -> Iterator[nn.Module]:
    torch.manual_seed(1)
    third = nn.Sequential(side.body, nn.ReLU(), nn.Linear(4, 3).double())
    models = [side.wrap(module) for module in (side.actor, side.critic, third)]
    for step in range(6):
        if step % 3 == 0:
            for model in models:
                model.zero_grad()
        x = side.batch(step)
        sum(square(model(x)) for model in in_turn(side, models[: 2 + step % 2], step)).backward()
        yield from (side.actor, side.critic, third)


def old_wrapper_gone_on_one_rank(side: Side) -> Iterator[nn.Module]:
    old: Any = side.wrap(side.actor)
    for step in range(3):
        old.zero_grad()
        square(old(side.batch(step))).backward()
    if side.world.rank == 1:
        del old
        gc.collect()
    new = side.wrap(side.actor)
    for step in range(5):
        new.zero_grad()
        square(new(side.batch(step))).backward()
        yield side.actor


PROGRAMS = [
    one_backward, zeroed_in_place, averages_kept_over_steps, accumulated, accumulated_by_one_over_the_others_average,
    weighted_in_one_backward, weighted_in_a_backward_each, trained_in_turn_inside_both_blocks, wrapped_again,
    a_wrapper_inside_a_wrapped_module, averages_kept_in_another_order_on_each_rank, old_wrapper_gone_on_one_rank,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_shared_parameters_equal_one_process(pools: Pools, program: Program) -> None:
    pools.run(2, compare_with_twin, program, {})


@pytest.mark.parametrize(
    "program", [averages_kept_over_steps, weighted_in_a_backward_each, trained_in_turn_inside_both_blocks]
)
def test_shared_parameters_equal_one_process_in_tiny_buckets_on_one_and_four_ranks(
    pools: Pools, program: Program
) -> None:
    for size in (1, 4):
        pools.run(size, compare_with_twin, program, {"bucket_cap_mb": 1e-4})


def a_rank_without_data(world: World) -> None:
    """Rank 1 has no data for one or both models and calls sync_gradients()."""
    wrapped, bare = Side(world, wrapped=True), Side(world, wrapped=False)
    actor, critic = wrapped.wrap(wrapped.actor), wrapped.wrap(wrapped.critic)
    for step in range(6):
        for module in (actor, critic, bare.actor, bare.critic):
            module.zero_grad()
        x = bare.batch(step)[:4]
        has_actor, has_critic = world.rank == 0 or step % 3 == 1, world.rank == 0 or step % 3 == 2
        if has_actor and has_critic:
            (square(actor(x)) + square(critic(x))).backward()
        else:
            for model, has_data in ((actor, has_actor), (critic, has_critic)):
                if has_data:
                    square(model(x)).backward()
                else:
                    model.sync_gradients()
        shares = (2 if step % 3 == 1 else 1) / 2, (2 if step % 3 == 2 else 1) / 2
        (square(bare.actor(x)) * shares[0] + square(bare.critic(x)) * shares[1]).backward()
        same_gradients(wrapped.actor, bare.actor)
        same_gradients(wrapped.critic, bare.critic)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 6, sparse=True).double(), nn.Linear(6, 2).double()
        self.extra = nn.Linear(6, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(x + self.words(torch.tensor([0, 3])))
        return head


def syncs_in_turn(world: World, first: int) -> list[str]:
    """Run one backward through both models per step on rank 0; rank 1 has data only in the first step.

    Ranks compare replicas after some steps. The second pass reduces the sparse gradients in every step.
    """
    torch.manual_seed(0)
    models = [DistributedDataParallel(Words(), unused_parameters="warn") for _ in range(2)]
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(9):
            for model in models:
                model.zero_grad()
            if step == 4 and world.rank == 1:
                models[1].module.head.bias.data += 1
            for backward in (
                [lambda model=model: model.sync_gradients() for model in models]
                if step and world.rank == 1
                else [lambda: sum(square(m(torch.ones(2, 6).double())) for m in models[:: 1 - 2 * first]).backward()]
            ):
                try:
                    backward()
                except ReplicaMismatch as error:
                    messages.append(f"{step}: {error}")
    assert len(caught) == 2 * (world.rank == 0)
    return messages


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_without_data_syncs_models_one_after_the_other(pools: Pools, first: int) -> None:
    """Rank 0 waited for buckets of the second model while rank 1 waited for a collective of the first."""
    for messages in pools.run(2, syncs_in_turn, first):
        assert len(messages) == 1
        assert messages[0].startswith("7: ")
        assert "parameter 'head.bias' has different bits on rank 1" in messages[0]


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()

    def forward(self, x: Tensor, has_extra: bool = True) -> Tensor:
        return self.body(x) + self.extra(x) if has_extra else self.body(x)


def adds_to_an_average_on_one_rank(world: World) -> None:
    """A kept average counts once even if only one rank has added to it."""
    side, ours, twin = Side(world, wrapped=True), Optional(), Optional()
    twin.load_state_dict(ours.state_dict())
    model = side.wrap(ours)
    side.wrap(IslandOptimizer(ours))  # shares the parameters
    for step in range(4):
        for module in (ours, twin):
            module.zero_grad()
        for micro, sync in enumerate((nullcontext(), model.no_sync(), nullcontext())):
            with sync:
                square(model(side.batch(10 * micro + step), micro != 1 or world.rank == 0)).backward()
            whole = Side(world, wrapped=False).batch(10 * micro + step)
            for rank in range(world.size):
                (square(twin(whole[rank :: world.size], micro != 1 or rank == 0)) / world.size).backward()
        same_gradients(ours, twin)


def other_wrapper_gone_in_backward(world: World) -> None:
    """A wrapper with a visible average is freed during the backward that sets it aside; the average was lost."""
    wrapped, bare = Side(world, wrapped=True), Side(world, wrapped=False)
    actor = wrapped.wrap(wrapped.actor)
    for step in range(20):  # until no control blocks are exchanged
        actor.zero_grad()
        square(actor(wrapped.batch(step))).backward()
    actor.zero_grad()
    gone: Any = wrapped.wrap(wrapped.critic)
    gone.itself = [gone]  # a cycle, for example through a traceback
    square(gone(wrapped.batch())).backward()
    del gone
    handle = wrapped.actor[2].weight.register_hook(lambda _: gc.collect() and None)
    square(actor(wrapped.batch())).backward()
    handle.remove()
    (square(bare.actor(bare.batch())) + square(bare.critic(bare.batch()))).backward()
    torch.testing.assert_close(wrapped.body.weight.grad, bare.body.weight.grad, rtol=1e-9, atol=1e-12)
    # A new wrapper that is used first does not attribute the body to the actor.
    new = wrapped.wrap(wrapped.critic)
    for module in (new, actor, bare.actor, bare.critic):
        module.zero_grad()
    square(new(wrapped.batch())).backward()
    square(bare.critic(bare.batch())).backward()
    torch.testing.assert_close(wrapped.body.weight.grad, bare.body.weight.grad, rtol=1e-9, atol=1e-12)


def wrapped_again_after_a_failure(world: World) -> None:
    """A failed wrapper was treated as still in backward, so other wrappers left gradients to it."""
    wrapped, bare = Side(world, wrapped=True), Side(world, wrapped=False)
    critic, failed = wrapped.wrap(wrapped.critic), wrapped.wrap(wrapped.actor)
    failed.register_comm_hook(None, lambda *_: 1 / 0)
    with pytest.raises(HookError):
        square(failed(wrapped.batch())).backward()
    actor = wrapped.wrap(wrapped.actor)  # in a notebook, a traceback keeps the old one alive
    for step in range(3):
        for module in (actor, critic, bare.actor, bare.critic):
            module.zero_grad()
        square(actor(wrapped.batch(step))).backward()
        square(critic(wrapped.batch(step))).backward()
        (square(bare.actor(bare.batch(step))) + square(bare.critic(bare.batch(step)))).backward()
        same_gradients(wrapped.actor, bare.actor)
        same_gradients(wrapped.critic, bare.critic)


def accumulate(side: Side, passes: str) -> Tensor:
    """Run a backward pass for each word of `passes` and return the body's gradient.

    The letters are the models in the pass. Capitals synchronize, "u" omits the weights, and "-" sets gradients to None
    instead of running a pass.
    """
    models, count = {"a": side.wrap(side.actor), "b": side.wrap(side.critic)}, 0
    for step, word in enumerate(passes.split()):
        if word == "-":
            side.actor.zero_grad(), side.critic.zero_grad()
            count = 0
            continue
        count += 1
        x, chosen = side.batch(step), [model for name, model in models.items() if name in word.lower()]
        with ExitStack() as blocks:
            for model in chosen:
                block, loss = side.weighted(model, x)
                blocks.enter_context(nullcontext() if "u" in word else block)
                blocks.enter_context(nullcontext() if word.isupper() else side.no_sync(model))
            sum(loss(model(x).square()) for model in chosen).backward()
    assert side.body.weight.grad is not None
    return side.body.weight.grad / (1 if side.wrapped else count)


def weighted_accumulation(world: World, passes: str) -> str:
    twin = accumulate(Side(world, wrapped=False), passes)
    try:
        torch.testing.assert_close(accumulate(Side(world, wrapped=True), passes), twin)
    except UsageError as error:
        return str(error)
    return "exact"


@pytest.mark.parametrize("size", [1, 2])
def test_weighted_accumulation_through_two_wrappers_is_exact_or_refused(pools: Pools, size: int) -> None:
    for passes in ("ab ab AB", "b B", "a - b B"):
        assert {*pools.run(size, weighted_accumulation, passes)} == {"exact"}
    for passes in ("a b A B", "a B", "ua B", "ab B", "a b AB", "ab A b", "A b"):
        assert all("0.weight'" in message for message in pools.run(size, weighted_accumulation, passes))


def older_average_on_a_rank_without_data(world: World, drops: bool) -> None:
    wrapped, bare = Side(world, wrapped=True), Side(world, wrapped=False)
    actor, x = wrapped.wrap(wrapped.actor), bare.batch()
    with actor.weight(2):
        (2 * square(actor(x))).backward()
    if drops:
        actor.zero_grad()
    if world.rank == 0:
        with actor.weight(2):
            (2 * square(actor(x))).backward()
    else:
        actor.sync_gradients()
    square(bare.actor(x)).backward()
    same_gradients(wrapped.actor, bare.actor)


def test_older_average_on_a_rank_without_data_ignores_other_weights(pools: Pools) -> None:
    pools.run(2, older_average_on_a_rank_without_data, True)
    with pytest.raises(Exception, match=r"rank 1 averaged gradients computed outside model.weight\(\)"):
        pools.run(2, older_average_on_a_rank_without_data, False)


def different_weights(world: World) -> list[str]:
    side = Side(world, wrapped=True)
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    x = side.batch()
    messages = []
    for has_both in (True, False):
        outer = actor.weight(3) if has_both else nullcontext()
        with pytest.raises(UsageError) as caught, outer, critic.weight(4):
            (actor(x).sum() + critic(x).sum()).backward()
        messages.append(str(caught.value))
        actor.zero_grad(), critic.zero_grad()
    for _ in range(2):  # training continues
        actor.zero_grad(), critic.zero_grad()
        (square(actor(x)) + square(critic(x))).backward()
    return messages


def test_one_backward_with_different_weights_is_refused_by_name(pools: Pools) -> None:
    """Autograd has already summed both parts of the shared gradient, so they cannot have different divisors."""
    for both, unweighted in pools.run(2, different_weights):
        assert "share '0.weight'" in both
        assert "model.weight(4)" in both
        assert "model.weight(3)" in both
        assert "no weight" in unweighted


def bypass_every_wrapper(world: World) -> None:
    side = Side(world, wrapped=True)
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    optimizer = torch.optim.SGD(dict.fromkeys([*actor.parameters(), *critic.parameters()]), 0.1)
    x = side.batch()
    for _ in range(2):
        optimizer.zero_grad()
        (square(actor(x)) + square(critic(x))).backward()
        optimizer.step()
    optimizer.zero_grad()
    square(side.actor(x)).backward()
    with pytest.raises(UsageError, match="the wrapper has not averaged"):
        optimizer.step()


def test_step_over_unaveraged_shared_gradients_is_refused(pools: Pools) -> None:
    pools.run(2, bypass_every_wrapper)


# -- an exception in a backward through several wrappers ---------------------------------------------------------------


class Boom(Exception):
    pass


def raise_in_one_of_several(world: World, which: int, order: str, size: int) -> list[str]:
    """Fail in module `which` on rank 0; all ranks get an error in that step and then continue exactly."""
    ours = [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)).double() for _ in range(size)]
    for module, seed in zip(ours, range(size), strict=True):
        torch.manual_seed(seed)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    models = [DistributedDataParallel(module) for module in ours]
    fails = [False]

    def fail(*_: object) -> None:
        if fails[0]:
            raise Boom

    ours[which][2].register_full_backward_hook(fail)
    log = []
    for step in range(5):
        for model in models:
            model.zero_grad()
        fails[0] = step == 2 and world.rank == 0
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + world.rank))
        in_turn = models if order == "forth" or step % 2 else models[::-1]
        try:
            if order == "chained":
                out = x
                for model in models:
                    out = model(out)
                square(out).backward()
            else:
                sum(square(model(x)) for model in in_turn).backward()
            log.append("fine")
        except (Boom, DesyncError) as error:
            log.append(type(error).__name__)
            continue
        for module in ours:
            for parameter in module.parameters():
                everyone = [torch.empty_like(parameter.grad) for _ in range(world.size)]
                dist.all_gather(everyone, parameter.grad)
                assert torch.equal(*everyone)
    return log


@pytest.mark.parametrize(
    ("order", "which"), [("forth", 2), ("back and forth", 0), ("back and forth", 1), ("chained", 1)]
)
def test_exception_in_one_of_several_models_ends_only_that_step(pools: Pools, order: str, which: int) -> None:
    """Models not reached by the failed backward missed the error: ranks got out of step or hung."""
    first, second = pools.run(2, raise_in_one_of_several, which, order, 3)
    assert first == ["fine", "fine", "Boom", "fine", "fine"]
    assert second == ["fine", "fine", "DesyncError", "fine", "fine"]


# -- deleted wrappers --------------------------------------------------------------------------------------------------


def other_wrapper_gone_before_an_exception(world: World) -> None:
    side = Side(world, wrapped=True)
    actor, critic = side.wrap(side.actor), side.wrap(side.critic)
    square(actor(side.batch())).backward()
    square(critic(side.batch())).backward()  # sets the actor's average aside
    del actor
    gc.collect()
    critic.zero_grad()
    out = critic(side.batch())
    out.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        square(out).backward()
    assert all(parameter.grad is None for parameter in side.critic.parameters())


def test_exception_does_not_restore_a_gradient_set_aside_earlier(pools: Pools) -> None:
    pools.run(2, other_wrapper_gone_before_an_exception)


# -- ranks with different numbers of forwards --------------------------------------------------------------------------


def chunks_by_rank(world: World) -> None:
    """Different numbers of forwards were refused; only the number of synchronizations must be equal."""
    wrapped, bare = Side(world, wrapped=True), Side(world, wrapped=False)
    actor = wrapped.wrap(wrapped.actor)
    optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (wrapped.actor, bare.actor)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if world.rank == 0:
            actor(bare.batch(step))  # for logging
        chunks = wrapped.batch(step).chunk(1 + (world.rank + step) % 3)
        (sum(actor(chunk).square().sum() for chunk in chunks) / 4 / 2).backward()
        square(bare.actor(bare.batch(step))).backward()
        same_gradients(wrapped.actor, bare.actor)
        for optimizer in optimizers:
            optimizer.step()


EXACT = [a_rank_without_data, adds_to_an_average_on_one_rank, other_wrapper_gone_in_backward]
EXACT += [wrapped_again_after_a_failure, chunks_by_rank]


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.__name__)
def test_gradients_equal_one_process_when_ranks_or_wrappers_differ(pools: Pools, case: Callable[[World], None]) -> None:
    pools.run(2, case)
