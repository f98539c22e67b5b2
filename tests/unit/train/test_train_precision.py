"""Training under autocast and with a GradScaler, compared with a plain PyTorch loop in one process."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import World
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel
from paceline.train import Evaluation, Result, TrainConfig, Trainer
from trainings import (
    LR,
    Points,
    Run,
    net,
    refusal,
    relative_difference,
    scalers_made,
    squared,
    squared_error,
    weights_of,
)
from twins import Pools

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Training in some precision; one sample's loss overflows in each of the windows `bad`, counted from 0."""

    precision: str = "fp16"
    bad: tuple[int, ...] = ()


RUN = Run(TrainConfig(1), batch_size=8, samples=44, dtype=torch.float32)
WINDOWS, CLIP = 12, 0.01


def small(out: Tensor, y: Tensor) -> Tensor:
    """Return a loss whose gradient fits in fp16 at the initial scale, even for the mean of a slice."""
    return squared(out, y) / 64


def plain_loop(case: Case) -> tuple[nn.Module, float]:
    """Return the model and scale of a single process that trains on whole batches."""
    data, model = Points(RUN.samples, RUN.dtype), net(RUN)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "fp16")
    sampler = GlobalBatchSampler(data, RUN.batch_size, seed=RUN.seed, rank=0, world_size=1)
    for window, batch in enumerate([*list(sampler), *list(sampler)]):
        with torch.autocast("cpu", DTYPES[case.precision]):
            loss = small(model(data.x[batch]), data.y[batch]) / len(batch)
        if window in case.bad:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, scaler.get_scale()


def train(world: World, case: Case) -> tuple[dict[str, Any], list[Any]]:
    """Return the weights and facts about the run."""
    module = net(RUN)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    dtypes = set()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, y, _ = batch
        out = model(x)
        dtypes.add(out.dtype)
        value = small(out, y)
        epoch, position = loader.progress.epoch, loader.progress.position
        if epoch * len(loader) + position - 1 in case.bad and world.rank == world.size - 1:
            value = value * float("inf")
        return value, len(x)

    loader = DataLoader(Points(RUN.samples, RUN.dtype), RUN.batch_size, shuffle=True, seed=RUN.seed)
    config = TrainConfig(2, precision=case.precision, clip_norm=CLIP)  # type: ignore[arg-type]
    with scalers_made() as scalers:
        result = Trainer(model, optimizer, loss, loader, config).fit()
    samples = RUN.batch_size / world.size  # part of the loss, which is a sum
    scale = scalers[0].get_scale() * samples if scalers else None
    return weights_of(module), [result.steps, scale, dtypes, result.samples]


@pytest.mark.parametrize(("precision", "size"), [("bf16", 1), ("fp16", 2)])
def test_precision_matches_a_plain_loop_under_autocast(pools: Pools, precision: str, size: int) -> None:
    case = Case(precision)
    plain, scale = plain_loop(case)
    exact = plain_loop(replace(case, precision="fp16" if precision == "bf16" else "bf16"))[0]
    reference, other = weights_of(plain), weights_of(exact)
    for weights, facts in pools.run(size, train, case):
        assert facts == [WINDOWS, None if precision == "bf16" else scale, {DTYPES[precision]}, 2 * RUN.samples]
        # Slices and whole batches round differently, but by less than the difference between precisions.
        bound = 0.0 if size == 1 else relative_difference(other, reference)
        assert relative_difference(weights, reference) <= max(bound, 1e-6)


def test_step_skipped_by_the_scaler_is_skipped_and_uncounted_on_every_rank(pools: Pools) -> None:
    case = Case(bad=(0, 1, 5, 9, 11))  # including the last window of an epoch and of the run
    plain, scale = plain_loop(case)
    reference = weights_of(plain)
    for size, bound in ((1, 1e-6), (2, 1e-2)):
        for weights, facts in pools.run(size, train, case):
            assert facts[:2] == [WINDOWS - 5, scale]
            assert relative_difference(weights, reference) < bound


def fit(loss: Any, samples: int, config: TrainConfig, evaluation: Evaluation | None = None) -> Result:
    model = DistributedDataParallel(net(RUN))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return Trainer(model, optimizer, loss, DataLoader(Points(samples, RUN.dtype), 8), config, evaluation).fit()


def warned(world: World, precision: Any) -> list[tuple[str, str]]:
    """Return file and text of the warnings about a mean loss."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        return nn.functional.mse_loss(model(batch[0]), batch[1]), len(batch[0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loss, 8, TrainConfig(1, precision=precision))
    return [(item.filename, str(item.message)) for item in caught if "from a mean" in str(item.message)]


def test_mean_loss_is_reported_at_the_user_line_in_every_precision(pools: Pools) -> None:
    # The warning pointed to training_step.py, and fp16 hid the mean behind the scale.
    plain = pools.run(2, warned, "fp32")
    assert [file for [(file, _)] in plain] == [__file__] * 2
    assert [pools.run(2, warned, precision) for precision in DTYPES] == [plain] * 2


def skipping(world: World, skipped: int) -> tuple[int, bool, list[str]]:
    """Train for 4 steps, skipping the first `skipped`; return the steps, whether it was evaluated, and the warnings."""
    factors = iter([float("inf")] * skipped + [1.0] * (4 - skipped))

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        return small(model(batch[0]), batch[1]) * next(factors), len(batch[0])

    evaluation = Evaluation(DataLoader(Points(16, RUN.dtype), 16), squared_error, ("error",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(loss, 16, TrainConfig(2, precision="fp16"), evaluation)
    texts = [str(warning.message) for warning in caught]
    return result.steps, "error" in result.metrics, [text for text in texts if "skipped" in text]


def test_run_that_mostly_skips_steps_is_evaluated_and_rank_0_warns(pools: Pools) -> None:
    # The run silently ended as a success, without metrics.
    outcomes = pools.run(2, skipping, 4)
    assert [outcome[:2] for outcome in outcomes] == [(0, True)] * 2
    [text], others = (texts for *_, texts in outcomes)
    assert text.startswith("4 of 4 steps were skipped, because ")
    assert others == []
    assert pools.run(2, skipping, 2) == [(2, True, [])] * 2


@pytest.mark.ranks(2)
def test_permanently_overflowing_loss_ends_the_run(world: World) -> None:
    # With max_steps the run would never end.

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        return squared(model(batch[0]), batch[1]) * float("nan"), len(batch[0])

    message = refusal(fit, loss, 8, TrainConfig(max_steps=5, precision="fp16"))
    assert message.startswith("every step is skipped, because the gradient has NaN or Inf")
