"""A mean loss inside ``model.weight(n)``, which expects a sum, gives a warning; a mean times n does not."""

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
    return F.cross_entropy(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters())


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


def test_no_warning_for_possible_sums(ranks: Ranks) -> None:
    for by_loss in ranks.run(mean_loss_warnings, "NO_MISTAKES", 3):
        assert not any(by_loss.values()), by_loss


@pytest.mark.parametrize("weight", [1, 2.5])
def test_no_warning_if_the_weight_is_not_a_count(ranks: Ranks, weight: float) -> None:
    for by_loss in ranks.run(mean_loss_warnings, "MISTAKES", weight):
        assert not any(by_loss.values()), by_loss
