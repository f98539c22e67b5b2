"""Mean losses inside ``model.weight(n, reduction="mean")``, and those inside a ``weight(n)`` that takes a sum."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models import chain
from paceline.core.processes.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from ranks import Pools, Ranks

FEATURES, CLASSES = 3, 4
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def net() -> nn.Module:
    return chain(FEATURES, 5, CLASSES, dtype=torch.float64)


def batch(seed: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches, uneven over ranks and among each other."""
    return [batch(2 * rank, rank + 2), batch(2 * rank + 1, 5 - rank)]


def whole(size: int) -> tuple[Tensor, Tensor]:
    parts = [part for rank in range(size) for part in batches(rank)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def check_equal(model: nn.Module, twin: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


# -- gradients equal one process's over the whole batch ----------------------------------------------------------------


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def two_forwards(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) + model(2 * x).square().mean()


def own_output_as_input(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    first = model(x)
    return F.cross_entropy(model(first[:, :FEATURES]), y) + first.square().mean()


def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) + 0.1 * sum(one.square().sum() for one in model.parameters())


def gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, y) + slope.square().sum(1).mean()


class Reentrant(nn.Module):
    """Its layers in reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def mean_over_uneven_slices(world: World, loss: Loss, make: Callable[[], nn.Module], ends_inside: bool) -> None:
    model, twin = DistributedDataParallel(make(), unused_parameters="allow"), make()
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        mine = batches(world.rank)
        for index, (x, y) in enumerate(mine):
            with nullcontext() if index == len(mine) - 1 else model.no_sync():
                with model.weight(len(y), reduction="mean"):
                    value = loss(model, x, y)
                    if ends_inside:
                        value.backward()
                if not ends_inside:
                    value.backward()
        loss(twin, *whole(world.size)).backward()
        check_equal(model, twin)


@pytest.mark.parametrize(
    ("loss", "ends_inside"),
    [
        (plain, True),
        (two_forwards, False),
        (own_output_as_input, True),
        (own_output_as_input, False),
        (penalty, False),
        (gradient_penalty, True),
    ],
)
def test_means_of_uneven_micro_batches_equal_one_process(ranks: Ranks, loss: Loss, ends_inside: bool) -> None:
    """An output that is an input of the same model would be multiplied twice if outputs' gradients were."""
    ranks.run(mean_over_uneven_slices, loss, net, ends_inside)


def test_gradients_that_come_in_parts_are_multiplied_once(ranks: Ranks) -> None:
    ranks.run(mean_over_uneven_slices, plain, Reentrant, True)


def chained(world: World, weighted: tuple[bool, bool]) -> None:
    """A generator and a discriminator; without a mean block, a wrapper's summed loss is the rank's n times the mean."""
    make_second = lambda: nn.Linear(CLASSES, 1).double()  # noqa: E731
    torch.manual_seed(1)
    second = make_second()
    models = DistributedDataParallel(net()), DistributedDataParallel(copy.deepcopy(second))
    twins = net(), second
    x, _ = batches(world.rank)[0]
    blocks = [
        model.weight(len(x), reduction="mean") if on else nullcontext()
        for model, on in zip(models, weighted, strict=True)
    ]
    with blocks[0], blocks[1]:
        models[1](models[0](x)).mean().backward()
    parts = [batches(rank)[0][0] for rank in range(world.size)]
    twins[1](twins[0](torch.cat(parts))).mean().backward()
    means = net(), copy.deepcopy(second)
    sum(means[1](means[0](part)).mean() for part in parts).div(world.size).backward()
    for model, twin, mean, on in zip(models, twins, means, weighted, strict=True):
        check_equal(model, twin if on else mean)


@pytest.mark.parametrize("weighted", [(True, True), (True, False), (False, True)])
def test_each_wrapper_of_a_chain_multiplies_what_is_its_own(ranks: Ranks, weighted: tuple[bool, bool]) -> None:
    ranks.run(chained, weighted)


def nothing_on_the_last_rank(world: World) -> None:
    model, twin = DistributedDataParallel(net()), net()
    x, y = batch(world.rank, 0 if world.rank == world.size - 1 > 0 else 3)
    with model.weight(len(y), reduction="mean"):
        F.cross_entropy(model(x), y).backward()
    parts = [batch(rank, 3) for rank in range(max(1, world.size - 1))]
    F.cross_entropy(twin(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
    check_equal(model, twin)


def test_a_mean_over_nothing_counts_as_zero(ranks: Ranks) -> None:
    """It is NaN, and 0 times NaN is NaN."""
    ranks.run(nothing_on_the_last_rank)


def scaled(world: World) -> None:
    model, twin = DistributedDataParallel(net()), net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batches(world.rank)[0]
    with model.weight(len(y), reduction="mean"):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    parts = [batches(rank)[0] for rank in range(world.size)]
    F.cross_entropy(twin(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
    check_equal(model, twin)
    scaler.step(optimizer)


def test_a_scaled_mean_is_multiplied_all_the_same(ranks: Ranks) -> None:
    ranks.run(scaled)


# -- what has no one number is refused ---------------------------------------------------------------------------------


def one_backward_for_two_blocks(world: World) -> None:
    model, losses = DistributedDataParallel(net()), []
    for x, y in batches(world.rank):
        with model.weight(len(y), reduction="mean"):
            losses.append(F.cross_entropy(model(x), y))
    with pytest.raises(UsageError, match="one backward pass covers several"):
        sum(losses).backward()


def shared_parameters(world: World) -> None:
    body = net()
    actor, critic = DistributedDataParallel(body), DistributedDataParallel(body)
    x, y = batches(0)[0]
    with pytest.raises(UsageError, match="share a parameter"), actor.weight(len(y), "mean"), critic.weight(len(y)):
        (F.cross_entropy(actor(x), y) + F.cross_entropy(critic(x), y) * len(y)).mul(1.0).backward()


@pytest.mark.parametrize("attempt", [one_backward_for_two_blocks, shared_parameters])
def test_a_backward_with_several_factors_is_refused(pools: Pools, attempt: Callable[[World], None]) -> None:
    pools.run(1, attempt)


@pytest.mark.ranks(1)
def test_another_reduction_is_refused() -> None:
    model = DistributedDataParallel(net())
    with pytest.raises(UsageError, match='takes "sum" or "mean", not \'none\''):
        model.weight(3, reduction="none")  # type: ignore[arg-type]


# -- a mean where a sum is taken is found ------------------------------------------------------------------------------

MISTAKES: dict[str, Loss] = {
    "cross_entropy": plain,
    "smoothed labels with weights": lambda model, x, y: F.cross_entropy(
        model(x), y, weight=torch.ones(CLASSES).double(), label_smoothing=0.1
    ),
    "accumulated": lambda model, x, y: F.cross_entropy(model(x), y) / 2,
    "mean": lambda model, x, y: F.cross_entropy(model(x), y, reduction="none").mean(),
    "mean over dims": lambda model, x, y: model(x).square().mean((0, 1)),
    "mse": lambda model, x, y: F.mse_loss(model(x), model(x).detach() + 1),
    "binary": lambda model, x, y: F.binary_cross_entropy_with_logits(model(x), torch.ones(len(x), CLASSES).double()),
    "two terms": lambda model, x, y: F.cross_entropy(model(x), y) + model(x).square().mean(),
    "with a penalty": penalty,
    "other dtype": lambda model, x, y: F.cross_entropy(model(x), y).float(),
    "mean of a mean": lambda model, x, y: F.cross_entropy(model(x), y).mean(),
}
NO_MISTAKES: dict[str, Loss] = {
    "sum": lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum"),
    "sum with smoothed labels": lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum", label_smoothing=0.1),
    "smoothed labels times the count": lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1) * len(y),
    "times the count": lambda model, x, y: F.cross_entropy(model(x), y) * len(y),
    "count in a tensor": lambda model, x, y: F.cross_entropy(model(x), y).mul(torch.tensor(len(y))),
    "mean over features": lambda model, x, y: model(x).square().mean(1).sum(),
    "mean of a sum": lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum").mean(),
    "mean of sums": lambda model, x, y: torch.stack([model(x).sum(), model(x).square().sum()]).mean(),
    "sum and a mean penalty": lambda model, x, y: (
        F.cross_entropy(model(x), y, reduction="sum") + next(iter(model.parameters())).square().mean()
    ),
}


def said(world: World, kinds: str, weight: float, reduction: str) -> dict[str, list[tuple[str, int, str]]]:
    """Place and text of the warnings of each loss."""
    found = {}
    x, y = batch(0, 3)
    for name, loss in globals()[kinds].items():
        model = DistributedDataParallel(net())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model.zero_grad()
                with model.weight(weight, reduction=reduction):  # type: ignore[arg-type]
                    loss(model, x, y).backward()
        texts = [(one.filename, one.lineno, str(one.message)) for one in caught]
        found[name] = [warned for warned in texts if "starts from a mean" in warned[2]]
    return found


def test_a_mean_where_a_sum_is_taken_is_named_once_with_its_line(ranks: Ranks) -> None:
    """It would shrink gradients by the weight, and nobody would notice: the likeliest mistake of a conversion."""
    lines, first = inspect.getsourcelines(said)
    line = first + next(index for index, text in enumerate(lines) if ".backward()" in text)
    for found in ranks.run(said, "MISTAKES", 3, "sum"):
        for name, warned in found.items():
            assert [(file, number) for file, number, _ in warned] == [(__file__, line)], name
            assert f"{__file__}:{line}" in warned[0][2]
            assert 'model.weight(3, reduction="mean")' in warned[0][2]


def test_what_is_a_sum_or_may_be_one_raises_no_alarm(ranks: Ranks) -> None:
    for found in ranks.run(said, "NO_MISTAKES", 3, "sum"):
        assert not any(found.values()), found


@pytest.mark.parametrize(("weight", "reduction"), [(1, "sum"), (2.5, "sum"), (3, "mean")])
def test_a_mean_is_right_where_the_weight_is_no_count_or_says_so(ranks: Ranks, weight: float, reduction: str) -> None:
    for found in ranks.run(said, "MISTAKES", weight, reduction):
        assert not any(found.values()), found
