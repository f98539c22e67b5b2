"""Which ``model.weight()`` blocks count, and how a weighted backward treats an existing gradient."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from device_watch import queued_operations
from models import Trip, chain
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from ranks import Ranks
from twins import same_gradients


def net() -> nn.Module:
    return chain(3, 4, 2, dtype=torch.float64)


class Side:
    """A model and its optimizer: wrapped, on uneven parts of each batch, or one process on the whole batch."""

    def __init__(self, world: World, *, wrapped: bool) -> None:
        self.world, self.wrapped, self.net = world, wrapped, net()
        self.model: Any = DistributedDataParallel(self.net) if wrapped else self.net
        self.as_weight: Callable[[float], Any] = float
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def part(self, batch: Tensor) -> Tensor:
        first = 2 + len(batch) % 2
        parts = batch.split([first, len(batch) - first]) if self.wrapped and self.world.size == 2 else [batch] * 2
        return parts[self.world.rank]

    def weight(self, count: float) -> Any:
        return self.model.weight(self.as_weight(count)) if self.wrapped else nullcontext()

    def local(self) -> Any:
        return self.model.no_sync() if self.wrapped else nullcontext()

    def loss(self, x: Tensor) -> Tensor:
        out = self.model(x)
        return F.mse_loss(out, torch.ones_like(out)) * (len(x) if self.wrapped else 1)

    def backward(self, batch: Tensor) -> None:
        """Run a weighted backward over this rank's part of a batch."""
        x = self.part(batch)
        with self.weight(len(x)):
            self.loss(x).backward()

    def plain(self, batch: Tensor) -> None:
        """Run an unweighted backward over an even part of a batch."""
        x = batch.chunk(self.world.size)[self.world.rank] if self.wrapped else batch
        F.mse_loss(self.model(x), torch.ones_like(x[:, :2])).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare_with_twin(world: World, case: str, as_weight: Callable[[float], Any] = float) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(5, 7 if "plain" not in case else 8, 3, generator=generator, dtype=torch.float64)
    ours, twin = Side(world, wrapped=True), Side(world, wrapped=False)
    ours.as_weight = as_weight
    for side in ours, twin:
        for number, batch in enumerate(batches):
            CASES[case](side, batch, number)
        if side.wrapped:
            assert side.model.total_weight in (0, 7, 8, 14, 16)
    for mine, expected in zip(ours.net.parameters(), twin.net.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-9, atol=1e-12)


def on_a_device(world: World, case: str) -> None:
    """Pass weights in tensors, which the host reads only when the rank reports."""
    with queued_operations():
        compare_with_twin(world, case, torch.tensor)


# -- unusual backwards -------------------------------------------------------------------------------------------------


def in_eval_mode(side: Side, batch: Tensor, number: int) -> None:
    """Train in eval mode, as fine-tuning with frozen BatchNorm does."""
    side.model.eval()
    side.backward(batch)
    side.step()


def with_inputs(side: Side, batch: Tensor, number: int) -> None:
    x = side.part(batch)
    with side.weight(len(x)):
        side.loss(x).backward(inputs=list(side.net.parameters()))
    side.step()


def after_unweighted_gradients_were_dropped(side: Side, batch: Tensor, number: int) -> None:
    """Like a discriminator in the generator's step: its gradients are discarded."""
    with side.local():
        side.loss(batch).backward()
    side.optimizer.zero_grad()
    side.backward(batch)
    side.step()


class Halves(nn.Sequential):
    """Returns two outputs."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).chunk(2, 1)


def of_two_outputs(side: Side, batch: Tensor, number: int) -> None:
    if number == 0:
        side.model = DistributedDataParallel(Halves(*side.net)) if side.wrapped else Halves(*side.net)
    x = side.part(batch)
    with side.weight(len(x)):
        left, right = side.model(x)
        loss = (left.square().sum() + right.sin().sum()) / (1 if side.wrapped else len(x))
    loss.backward()
    side.step()


# -- blocks without a backward -----------------------------------------------------------------------------------------


def after(unused: Callable[[Side, Tensor], object]) -> Callable[[Side, Tensor, int], None]:
    """Return a step that follows a block without a backward."""

    def run(side: Side, batch: Tensor, number: int) -> None:
        if side.wrapped and number == 2:
            unused(side, batch)
        side.backward(batch)
        if side.wrapped and number == 3:
            unused(side, batch)
        side.step()

    return run


def evaluate(side: Side, x: Tensor) -> None:
    with torch.no_grad(), side.weight(100):
        side.loss(x)
    with side.weight(100), torch.no_grad():
        side.loss(x)


def evaluate_on_rank_0(side: Side, x: Tensor) -> None:
    if side.world.rank == 0:
        side.model.eval()
        evaluate(side, x)
        with side.weight(50):  # with gradients enabled
            side.loss(x)
        side.model.train()


def differentiate(side: Side, x: Tensor) -> None:
    with side.weight(100):
        torch.autograd.grad(side.model(x.clone().requires_grad_()).sum(), list(side.net.parameters()))


def unweighted_after_evaluation(side: Side, batch: Tensor, number: int) -> None:
    if side.wrapped and number % 2 and side.world.rank == 0:
        evaluate(side, batch)
    side.plain(batch)
    side.step()


def skipped_micro_batch(side: Side, batch: Tensor, number: int) -> None:
    with side.local():
        side.backward(batch)
    if side.wrapped:
        with side.weight(100):
            if number % 2:
                side.loss(batch)
            side.model.sync_gradients()
    side.step()


def in_two_blocks(backward: Callable[[Side, list[Tensor], int], None]) -> Callable[[Side, Tensor, int], None]:
    """Return a step whose part of a batch is cut in two, with a block around each forward alone."""

    def run(side: Side, batch: Tensor, number: int) -> None:
        if not side.wrapped:
            side.backward(batch)
        else:
            losses = []
            for x in side.part(batch).split([1, len(side.part(batch)) - 1]):
                with side.weight(100):
                    side.loss(x)
                with side.weight(len(x)):
                    losses.append(side.loss(x))
            backward(side, losses, number)
        side.step()

    return run


def one_after_the_other(side: Side, losses: list[Tensor], number: int) -> None:
    with side.local():
        losses[0].backward()
    losses[1].backward()


def in_one_backward(side: Side, losses: list[Tensor], number: int) -> None:
    with side.local() if number % 2 else nullcontext():
        sum(losses).backward()  # type: ignore[union-attr]
    if number % 2:
        side.model.sync_gradients()


# -- micro-batches under no_sync() whose gradients are dropped or changed ----------------------------------------------


def dropped(drop: Callable[[nn.Parameter], object], factor: float = 1) -> Callable[[Side, Tensor, int], None]:
    """Drop the first micro-batch and multiply the gradient of the second by `factor`."""

    def run(side: Side, batch: Tensor, number: int) -> None:
        x, share = side.part(batch), 1 if side.wrapped else 0.5
        with side.local():
            side.backward(batch + 1)
        for parameter in side.net.parameters():
            drop(parameter)
        for sync, times in (side.local(), factor), (nullcontext(), 1):
            with sync, side.weight(len(x)):
                (share * times * side.loss(x)).backward()
        side.step()

    return run


def changed(change: Callable[[nn.Module], object], factor: float = 1) -> Callable[[Side, Tensor, int], None]:
    """Multiply the gradient of the first micro-batch by `factor`, then change it; the micro-batch still counts."""

    def run(side: Side, batch: Tensor, number: int) -> None:
        x, share = side.part(batch), 1 if side.wrapped else 0.5
        for sync, times in (side.local(), factor), (nullcontext(), 1):
            with sync, side.weight(len(x)):
                (share * times * side.loss(x)).backward()
            if times == factor and number % 2:
                change(side.net)
            number = 0
        side.step()

    return run


def to_none(parameter: nn.Parameter) -> None:
    parameter.grad = None


def mask(net: nn.Module) -> None:
    for place, parameter in enumerate(net.parameters()):
        parameter.grad.mul_(place != 0)  # type: ignore[union-attr]


def clone(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]


def drop_one(net: nn.Module) -> None:
    next(net.parameters()).grad = None


# -- kept gradients ----------------------------------------------------------------------------------------------------


def two_losses_whose_forwards_come_first(side: Side, batch: Tensor, number: int) -> None:
    losses, x = [], side.part(batch)
    for factor in 1, 0.5:
        with side.weight(len(x)):
            losses.append(side.loss(x * factor))
    for loss in losses:
        loss.backward()
    side.step()


def used_by_the_loss_alone(side: Side, batch: Tensor, number: int) -> None:
    """Use a parameter only in the loss, so it gets its gradient before the backward reaches an output."""
    if not hasattr(side.net, "scale"):
        side.net.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        side.optimizer.add_param_group({"params": [side.net.scale]})
        side.model = DistributedDataParallel(side.net, unused_parameters="allow") if side.wrapped else side.net
    x = side.part(batch)
    penalty = side.net.scale.square().sum() * (len(x) if side.wrapped else 1)  # type: ignore[operator,union-attr]
    with side.weight(len(x)):
        (side.loss(x) + penalty).backward()
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=number < 2)


def plain_then_weighted(side: Side, batch: Tensor, number: int) -> None:
    side.plain(batch)
    side.backward(batch / 2)
    side.step()


def weight_decay_first(side: Side, batch: Tensor, number: int) -> None:
    (0.1 * sum(p.square().sum() for p in side.net.parameters())).backward()  # type: ignore[union-attr]
    side.backward(batch)
    side.step()


def decay_in_place(side: Side, batch: Tensor, number: int) -> None:
    side.backward(batch)
    side.optimizer.step()
    for parameter in side.net.parameters():
        parameter.grad.mul_(0.9)  # type: ignore[union-attr]


def decay_by_new_tensors(side: Side, batch: Tensor, number: int) -> None:
    """Replace gradients between forward and backward, so that the forward saw other tensors."""
    x = side.part(batch)
    with side.weight(len(x)):
        loss = side.loss(x)
        for parameter in side.net.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * 0.9
        loss.backward()
    side.optimizer.step()


def decay_in_place_after_the_forward(side: Side, batch: Tensor, number: int) -> None:
    x = side.part(batch)
    with side.weight(len(x)):
        loss = side.loss(x)
        for parameter in side.net.parameters() if number else ():
            parameter.grad.mul_(0.9)  # type: ignore[union-attr]
        loss.backward()
    side.optimizer.step()


def weight_decay_after_a_local_forward(side: Side, batch: Tensor, number: int) -> None:
    x = side.part(batch)
    for is_last in False, True:
        weight = side.model.weight(len(x)) if side.wrapped else nullcontext()
        with weight, nullcontext() if is_last else side.local():
            loss = side.model(x).square().sum() / (1 if side.wrapped else 2 * len(x))
            if not is_last:
                (0.1 * sum(p.square().sum() for p in side.net.parameters())).backward()  # type: ignore[union-attr]
            loss.backward()
    side.step()


def kept_while_accumulating(side: Side, batch: Tensor, number: int) -> None:
    if not side.wrapped:
        side.backward(batch)
    else:
        *first, last = side.part(batch).split(1)
        for x in (*first, last):
            with side.local() if x is not last else nullcontext(), side.weight(len(x)):
                side.loss(x).backward()
    side.optimizer.step()
    if number == 3:
        side.optimizer.zero_grad()


UNUSUAL: dict[str, Callable[[Side, Tensor, int], None]] = {
    "in eval mode": in_eval_mode,
    "with inputs": with_inputs,
    "after unweighted gradients were dropped": after_unweighted_gradients_were_dropped,
    "of two outputs": of_two_outputs,
}
UNUSED: dict[str, Callable[[Side, Tensor, int], None]] = {
    "evaluation on rank 0": after(evaluate_on_rank_0),
    "autograd.grad": after(differentiate),
    "evaluation beside plain training": unweighted_after_evaluation,
    "skipped micro-batch": skipped_micro_batch,
    "left before their backwards": in_two_blocks(one_after_the_other),
    "one backward of two blocks": in_two_blocks(in_one_backward),
}
DROPPED: dict[str, Callable[[Side, Tensor, int], None]] = {
    "None": dropped(to_none),
    "zeroed": dropped(lambda parameter: parameter.grad.zero_()),  # type: ignore[union-attr]
    "data zeroed": dropped(lambda parameter: parameter.grad.data.zero_()),  # type: ignore[union-attr]
    "data replaced": dropped(lambda parameter: setattr(parameter.grad, "data", torch.zeros_like(parameter))),
    "numpy": dropped(lambda parameter: parameter.grad.numpy().fill(0)),  # type: ignore[union-attr]
    "zeroed before a zero gradient": dropped(lambda parameter: parameter.grad.zero_(), 0),  # type: ignore[union-attr]
    "None before a zero gradient": dropped(to_none, 0),
}
CHANGED: dict[str, Callable[[Side, Tensor, int], None]] = {
    "one masked": changed(mask),
    "one None": changed(drop_one),
    "replaced": changed(clone),
    "zero, masked": changed(mask, 0),
    "zero, clipped": changed(lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0), 0),
    "zero, replaced": changed(clone, 0),
    "zero, one None": changed(drop_one, 0),
}
KEPT: dict[str, Callable[[Side, Tensor, int], None]] = {
    "two losses whose forwards come first": two_losses_whose_forwards_come_first,
    "used by the loss alone": used_by_the_loss_alone,
    "plain, then weighted": plain_then_weighted,
    "weight decay first": weight_decay_first,
    "decay in place": decay_in_place,
    "decay by new tensors": decay_by_new_tensors,
    "decay in place after the forward": decay_in_place_after_the_forward,
    "weight decay after a local forward": weight_decay_after_a_local_forward,
    "kept while accumulating": kept_while_accumulating,
}
CASES = UNUSUAL | UNUSED | DROPPED | CHANGED | KEPT


@pytest.mark.parametrize("case", UNUSUAL)
def test_weight_counts_once_in_unusual_backwards(ranks: Ranks, case: str) -> None:
    ranks.run(compare_with_twin, case)


@pytest.mark.parametrize("case", UNUSED)
def test_block_without_a_backward_affects_no_step(ranks: Ranks, case: str) -> None:
    """Its weight stayed pending, so the next step was divided by it as well."""
    ranks.run(compare_with_twin, case)


@pytest.mark.parametrize("case", DROPPED)
def test_micro_batch_with_dropped_gradients_does_not_count(ranks: Ranks, case: str) -> None:
    """If gradients were dropped through ``p.grad.data``, the weight still divided the mean."""
    ranks.run(compare_with_twin, case)
    ranks.run(on_a_device, case)


@pytest.mark.parametrize("case", CHANGED)
def test_micro_batch_counts_if_any_gradient_remains_or_all_were_zero(ranks: Ranks, case: str) -> None:
    """The weight was forgotten after a clip without effect, and masking some gradients was refused."""
    ranks.run(compare_with_twin, case)
    ranks.run(on_a_device, case)


@pytest.mark.parametrize("case", KEPT)
def test_a_weighted_mean_is_added_to_a_kept_gradient(ranks: Ranks, case: str) -> None:
    """Kept gradients used to be summed over the ranks again and divided by the weights."""
    ranks.run(compare_with_twin, case)


def kept_and_two_blocks(world: World) -> str:
    side = Side(world, wrapped=True)
    batch = torch.ones(7, 3, dtype=torch.float64)
    side.backward(batch)
    losses = []
    for x in batch.split([3, 4]):
        with side.weight(len(x)):
            losses.append(side.loss(x))
    with pytest.raises(UsageError) as caught:
        sum(losses).backward()  # type: ignore[union-attr]
    return str(caught.value)


def test_backward_through_two_blocks_over_a_kept_gradient_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(kept_and_two_blocks):
        assert "p.grad already held gradients" in message


def kept_and_added_to_before_an_output(world: World) -> str:
    side = Side(world, wrapped=True)
    side.net.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
    side.model = DistributedDataParallel(side.net, unused_parameters="allow")
    for _ in range(2):
        with side.weight(7):
            loss = side.loss(torch.ones(7, 3, dtype=torch.float64)) + side.net.scale.sum()  # type: ignore[operator]
            try:
                loss.backward()
            except UsageError as error:
                return str(error)
    return ""


def test_adding_to_a_kept_gradient_before_reaching_an_output_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(kept_and_added_to_before_an_output):
        assert "'scale' had a gradient before this weighted step" in message


def weight_decay_after_the_forward(world: World) -> str:
    ours, twin = Side(world, wrapped=True), Side(world, wrapped=False)
    batch = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for side in ours, twin:
        with side.weight(len(side.part(batch))):
            loss = side.loss(side.part(batch))
            try:
                (0.1 * sum(p.square().sum() for p in side.net.parameters())).backward()  # type: ignore[union-attr]
            except UsageError as error:
                return str(error)
            loss.backward()
    same_gradients(ours.net, twin.net)
    return ""


def test_penalty_between_forward_and_weighted_backward_is_exact_or_refused(ranks: Ranks) -> None:
    """It was divided by the weights because it was mistaken for the backward of the forward."""
    for message in ranks.run(weight_decay_after_the_forward):
        if ranks.size == 2:
            assert "a forward pass inside model.weight() awaits its own" in message
        else:
            assert message == ""


def bypass_the_wrapper(world: World) -> None:
    model, twin = DistributedDataParallel(net()), net()
    batch = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = batch.split([2, 5])[world.rank] if world.size == 2 else batch
    for part in x.split([1, len(x) - 1]):
        with model.weight(len(part)):
            model.module(part).sum().backward()
    model.sync_gradients()
    (twin(batch).sum() / 7).backward()
    same_gradients(model.module, twin)


def test_sync_gradients_divides_bypassing_gradients_by_their_weights(ranks: Ranks) -> None:
    ranks.run(bypass_the_wrapper)


def weight_without_a_forward_of_the_wrapper(world: World) -> str:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError) as caught, model.weight(4):  # noqa: PT012
        model.module(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return str(caught.value)


def test_step_with_an_unused_weight_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(weight_without_a_forward_of_the_wrapper):
        assert "call the wrapper and not model.module" in message


def backward_after_a_new_gradient(model: Any, first: nn.Parameter, x: Tensor) -> None:
    with model.no_sync(), model.weight(4):
        loss = model(x).sum()
        first.grad = torch.ones_like(first)
        loss.backward()


def failure_after_a_new_gradient(world: World) -> None:
    module = net()
    model = DistributedDataParallel(module)
    first, x = next(module.parameters()), torch.ones(2, 3, dtype=torch.float64)
    hook = next(module.children()).register_forward_hook(lambda *arguments: Trip.apply(arguments[-1]))
    with pytest.raises(ArithmeticError, match=r"^tripped$"):
        backward_after_a_new_gradient(model, first, x)
    hook.remove()
    first.grad = None
    model(x).sum().backward()
    expected, *_ = torch.autograd.grad(module(x).sum(), [first])
    torch.testing.assert_close(first.grad, expected)


def test_failed_weighted_backward_leaves_no_parameter_hook(ranks: Ranks) -> None:
    """A gradient assigned after the forward left a hook behind, which failed in the next backward."""
    ranks.run(failure_after_a_new_gradient)


# -- mean losses -------------------------------------------------------------------------------------------------------


FEATURES, CLASSES = 3, 4
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


MISTAKES: dict[str, Loss] = {
    "cross_entropy": plain,
    "accumulated": lambda model, x, y: F.cross_entropy(model(x), y) / 2,
    "mean": lambda model, x, y: F.cross_entropy(model(x), y, reduction="none").mean(),
    "mean over dims": lambda model, x, y: model(x).square().mean((0, 1)),
    "mse": lambda model, x, y: F.mse_loss(model(x), model(x).detach() + 1),
    "binary": lambda model, x, y: F.binary_cross_entropy_with_logits(model(x), torch.ones(len(x), CLASSES).double()),
    "other dtype": lambda model, x, y: F.cross_entropy(model(x), y).float(),
    "mean of a mean": lambda model, x, y: F.cross_entropy(model(x), y).mean(),
}
NO_MISTAKES: dict[str, Loss] = {
    "sum": lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum"),
    "sum with smoothed labels": lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum", label_smoothing=0.1),
    "smoothed labels times the count": lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1) * len(y),
    "times the count": lambda model, x, y: F.cross_entropy(model(x), y) * len(y),
    "several means times the count": lambda model, x, y: (plain(model, x, y) + model(x).square().mean()) * len(y) / 2,
    "count in a tensor": lambda model, x, y: F.cross_entropy(model(x), y).mul(torch.tensor(len(y))),
    "mean over features": lambda model, x, y: model(x).square().mean(1).sum(),
    "mean of a sum": lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum").mean(),
    "mean of sums": lambda model, x, y: torch.stack([model(x).sum(), model(x).square().sum()]).mean(),
    "sum and a mean penalty": lambda model, x, y: (
        F.cross_entropy(model(x), y, reduction="sum") + next(iter(model.parameters())).square().mean()
    ),
}


def mean_loss_warnings(world: World, kinds: str, weight: float) -> dict[str, list[tuple[str, int, str]]]:
    """Return file, line and text of the warnings about each loss."""
    result = {}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (3,), generator=generator)
    for name, loss in globals()[kinds].items():
        model = DistributedDataParallel(chain(FEATURES, 5, CLASSES, dtype=torch.float64))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model.zero_grad()
                with model.weight(weight):
                    loss(model, x, y).backward()
        texts = [(warning.filename, warning.lineno, str(warning.message)) for warning in caught]
        result[name] = [warned for warned in texts if "starts from a mean" in warned[2]]
    return result


def test_mean_loss_is_reported_once_with_its_line(ranks: Ranks) -> None:
    """The most likely mistake when converting a script; it silently divides gradients by the weight."""
    lines, first = inspect.getsourcelines(mean_loss_warnings)
    line = first + next(index for index, text in enumerate(lines) if ".backward()" in text)
    for by_loss in ranks.run(mean_loss_warnings, "MISTAKES", 3):
        for name, warned in by_loss.items():
            assert [(file, number) for file, number, _ in warned] == [(__file__, line)], name
            assert 'multiply the mean by 3, or use reduction="sum" in the loss' in warned[0][2]


@pytest.mark.parametrize(("kinds", "weight"), [("NO_MISTAKES", 3), ("MISTAKES", 1), ("MISTAKES", 2.5)])
def test_no_warning_for_possible_sums_and_weights_that_are_no_counts(ranks: Ranks, kinds: str, weight: float) -> None:
    for by_loss in ranks.run(mean_loss_warnings, kinds, weight):
        assert not any(by_loss.values()), by_loss
