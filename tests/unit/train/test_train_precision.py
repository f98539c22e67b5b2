"""Training under autocast, and with a GradScaler, against a plain PyTorch loop in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.processes.world import World
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel
from paceline.optim import ShardedOptimizer
from paceline.train import TrainConfig, Trainer
from trainings import LR, Points, Run, Settings, digest, net, refusal, relative_difference, scalers_made, squared
from twins import Pools

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A training in some precision; in the windows `bad`, counted from 0, one sample's loss overflows."""

    precision: str = "fp16"
    bad: tuple[int, ...] = ()
    clip: float | None = 0.01
    config: Any = None
    sharded: bool = False
    cut_after: int | None = None
    folder: str | None = None
    resume: bool = False


RUN = Run(TrainConfig(1), batch_size=8, samples=44, dtype=torch.float32)


def small(out: Tensor, y: Tensor) -> Tensor:
    """Return a loss whose gradient fits into fp16 at the first scale, also as the mean of a slice."""
    return squared(out, y) / 64


def plain_loop(case: Case) -> tuple[nn.Module, float, int]:
    """Return model, scale and steps of one process that trains on whole batches."""
    data, model = Points(RUN.samples, RUN.dtype), net(RUN)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "fp16")
    sampler = GlobalBatchSampler(data, RUN.batch_size, seed=RUN.seed, rank=0, world_size=1)
    window, steps = 0, 0
    optimizer.register_step_post_hook(lambda *_: count())

    def count() -> None:
        nonlocal steps
        steps += 1

    for _ in range(2):
        for batch in list(sampler):
            with torch.autocast("cpu", DTYPES[case.precision]):
                loss = small(model(data.x[batch]), data.y[batch]) / len(batch)
            if window in case.bad:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            window += 1
    return model, scaler.get_scale(), steps


def train(world: World, case: Case) -> tuple[dict[str, Any], str, list[Any]]:
    """Return weights, a digest of all that decides bits, and facts about the run."""
    module = net(RUN)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    windows, dtypes = 0, set()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        nonlocal windows
        x, y, _ = batch
        out = model(x)
        dtypes.add(out.dtype)
        value = small(out, y)
        epoch, position = loader.progress.epoch, loader.progress.position
        if epoch * len(loader) + position - 1 in case.bad and world.rank == world.size - 1:
            value = value * float("inf")
        windows += 1
        if case.cut_after is not None and windows > case.cut_after:
            raise KeyboardInterrupt
        return value, len(x)

    loader = DataLoader(Points(RUN.samples, RUN.dtype), RUN.batch_size, shuffle=True, seed=RUN.seed)
    config = Settings(
        2,
        precision=case.precision,  # type: ignore[arg-type]
        clip_norm=case.clip,
        show_progress=False,
        checkpoint_dir=case.folder,
        checkpoint_every=1 if case.folder else None,
        resume=case.resume,
    )
    if case.sharded:
        optimizer = ShardedOptimizer(optimizer.param_groups, type(optimizer), model.process_group)
    objects = config.objects(optimizer)
    with scalers_made() as scalers:
        trainer = Trainer(model, optimizer, loss, loader, config, **objects)
    scaler = scalers[0] if scalers else None
    try:
        trainer.fit()
    except KeyboardInterrupt:
        objects["checkpointer"].close()
    weights = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    state = None if scaler is None else scaler.state_dict()
    bits = digest([module.state_dict(), trainer.optimizer.state_dict() if not case.sharded else 0, state])
    facts = [trainer.result.steps, scaler and scaler.get_scale(), dtypes, trainer.result.samples]
    return weights, bits, facts


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_precision_trains_as_a_plain_loop_under_autocast(pools: Pools, precision: str, size: int) -> None:
    case = Case(precision)
    plain, scale, steps = plain_loop(case)
    exact = plain_loop(replace(case, precision="fp16" if precision == "bf16" else "bf16"))[0]
    reference = {name: tensor.numpy() for name, tensor in plain.state_dict().items()}
    other = {name: tensor.numpy() for name, tensor in exact.state_dict().items()}
    for weights, _, facts in pools.run(size, train, case):
        assert facts == [steps, None if precision == "bf16" else scale, {DTYPES[precision]}, 2 * RUN.samples]
        # Slices round differently from the whole batch, by less than the other precision does.
        bound = 0.0 if size == 1 else relative_difference(other, reference)
        assert relative_difference(weights, reference) <= max(bound, 1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_the_scaler_skips_is_skipped_on_every_rank_and_counts_for_nothing(pools: Pools, size: int) -> None:
    case = Case(bad=(0, 1, 5, 9, 11))  # also the last window of an epoch, and of the training
    plain, scale, steps = plain_loop(case)
    assert steps == 12 - 5
    reference = {name: tensor.numpy() for name, tensor in plain.state_dict().items()}
    for weights, _, facts in pools.run(size, train, case):
        assert facts[:2] == [steps, scale]
        assert relative_difference(weights, reference) < (1e-6 if size == 1 else 1e-2)


def overflows_forever(world: World) -> str:
    model = DistributedDataParallel(net(RUN))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        return squared(model(batch[0]), batch[1]) * float("nan"), len(batch[0])

    loader = DataLoader(Points(8, RUN.dtype), 8)
    config = TrainConfig(max_steps=5, precision="fp16", show_progress=False)
    return refusal(Trainer(model, optimizer, loss, loader, config).fit)


def test_a_loss_that_always_overflows_ends_the_training(pools: Pools) -> None:
    # With max_steps nothing would ever end it.
    for message in pools.run(2, overflows_forever):
        assert message.startswith("every step is skipped, because the gradient has NaN or Inf")
