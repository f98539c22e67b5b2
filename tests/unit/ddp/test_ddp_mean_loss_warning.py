"""A mean loss inside ``model.weight(n)``, which takes a sum, causes a warning; a mean times n does not."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import chain
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from ranks import Ranks

FEATURES, CLASSES = 3, 4
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) + 0.1 * sum(one.square().sum() for one in model.parameters())


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
    "several means times the count": lambda model, x, y: (plain(model, x, y) + model(x).square().mean()) * len(y) / 2,
    "count in a tensor": lambda model, x, y: F.cross_entropy(model(x), y).mul(torch.tensor(len(y))),
    "mean over features": lambda model, x, y: model(x).square().mean(1).sum(),
    "mean of a sum": lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum").mean(),
    "mean of sums": lambda model, x, y: torch.stack([model(x).sum(), model(x).square().sum()]).mean(),
    "sum and a mean penalty": lambda model, x, y: (
        F.cross_entropy(model(x), y, reduction="sum") + next(iter(model.parameters())).square().mean()
    ),
}


def said(world: World, kinds: str, weight: float) -> dict[str, list[tuple[str, int, str]]]:
    """Place and text of the warnings of each loss."""
    found = {}
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
        texts = [(one.filename, one.lineno, str(one.message)) for one in caught]
        found[name] = [warned for warned in texts if "starts from a mean" in warned[2]]
    return found


def test_a_mean_where_a_sum_is_taken_is_named_once_with_its_line(ranks: Ranks) -> None:
    """It would shrink gradients by the weight, and nobody would notice: the likeliest mistake of a conversion."""
    lines, first = inspect.getsourcelines(said)
    line = first + next(index for index, text in enumerate(lines) if ".backward()" in text)
    for found in ranks.run(said, "MISTAKES", 3):
        for name, warned in found.items():
            assert [(file, number) for file, number, _ in warned] == [(__file__, line)], name
            assert 'multiply the mean by 3, or use reduction="sum" in the loss' in warned[0][2]


def test_what_is_a_sum_or_may_be_one_raises_no_alarm(ranks: Ranks) -> None:
    for found in ranks.run(said, "NO_MISTAKES", 3):
        assert not any(found.values()), found


@pytest.mark.parametrize("weight", [1, 2.5])
def test_a_mean_may_be_right_if_the_weight_is_not_a_count(ranks: Ranks, weight: float) -> None:
    for found in ranks.run(said, "MISTAKES", weight):
        assert not any(found.values()), found
