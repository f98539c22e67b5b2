"""Checks of the Trainer: comparisons with a plain loop in every precision, and resumed runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import trainings
from gpu_checks.bits import compared, deterministic
from gpu_checks.one_rank import shared_folder
from gpu_checks.rows import Place, Row, holds
from gpu_checks.wrapping import difference, same_everywhere
from paceline.data import GlobalBatchSampler

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_of(place: Place, precision: str, **options: Any) -> trainings.Run:
    """Return a training run of three epochs with a short last batch, and gradients in the range of fp16."""
    settings = trainings.Settings(epochs=3, clip_norm=0.5, precision=precision, **options)
    return trainings.Run(settings, dtype=torch.float32, evaluate=True, device=place.device, loss_factor=1 / 64)


def plain_loop(run: trainings.Run, dtype: torch.dtype | None) -> nn.Module:
    """Train on whole batches with plain PyTorch."""
    data = trainings.Points(run.samples, run.dtype)
    module: nn.Module = trainings.net(run)
    optimizer = trainings.optimizer_of(run, module)
    scaler = GradScaler(torch.device(run.device).type, enabled=dtype is torch.float16)
    batches = GlobalBatchSampler(data, run.batch_size, seed=run.seed, rank=0, world_size=1)
    for _ in range(run.config.epochs):
        for numbers in batches:
            x, y = data.x[numbers].to(run.device), data.y[numbers].to(run.device)
            with nullcontext() if dtype is None else torch.autocast(x.device.type, dtype):
                loss = run.loss_factor * trainings.squared(module(x), y) / len(x)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return module


def precisions(place: Place) -> Iterator[Row]:
    """In each precision, weights and evaluation results are as with a plain loop."""
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 3e-2), ("fp16", 1e-2)):
        run = run_of(place, precision)
        outcome = trainings.train(place, run)
        module = plain_loop(run, DTYPES[precision])
        ours = [torch.from_numpy(weight) for weight in outcome.weights.values()]
        error = difference(ours, [tensor.cpu() for tensor in module.state_dict().values()])
        yield holds(f"{precision}: weights differ from a plain loop's by", f"{error:.1e}", error < tolerance)
        loss = evaluated(run, module, DTYPES[precision])
        apart = abs(outcome.result.metrics["error"] / loss - 1)
        yield holds(f"{precision}: the evaluation differs from its loss by", f"{apart:.1e}", apart < 3 * tolerance)
        if place.size > 1:
            yield holds(f"{precision}: bits alike on all ranks", "", same_everywhere(outcome.weights_sha256))


def evaluated(run: trainings.Run, module: nn.Module, dtype: torch.dtype | None) -> float:
    data = trainings.Points(run.samples, run.dtype)
    x, y = data.x.to(run.device), data.y.to(run.device)
    with torch.no_grad(), nullcontext() if dtype is None else torch.autocast(x.device.type, dtype):
        error: Tensor = trainings.squared(module(x), y) / len(x)
    return float(error)


def resumed(place: Place) -> Iterator[Row]:
    """A run with dropout that is interrupted and resumed is bit-identical to an uninterrupted run."""
    for precision in DTYPES:
        folder = shared_folder(place)
        saved: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every": 1}
        with deterministic():
            whole = trainings.train(place, replace(run_of(place, precision), dropout=0.2))
            trainings.train(place, replace(run_of(place, precision, **saved), dropout=0.2, stop_after=7))
            again = trainings.train(place, replace(run_of(place, precision, **saved, resume=True), dropout=0.2))
        right = again.bits() == whole.bits() and bool(again.result.resumed_from_step)
        value = f"{compared(again.weights_sha256, whole.weights_sha256)}, from step {again.result.resumed_from_step}"
        yield holds(f"{precision}, interrupted in step 8: the bits of an undisturbed run", value, right)
        place.barrier()
        if place.rank == 0:
            shutil.rmtree(folder)
