"""The Trainer: every precision against a plain loop, and runs that are resumed in the middle."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

import trainings
from gpu_checks.bits import deterministic, told
from gpu_checks.rows import Place, Row, holds
from gpu_checks.wrapping import difference
from paceline.data import GlobalBatchSampler

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_of(place: Place, precision: str, **options: Any) -> trainings.Run:
    """Return a training of three epochs, whose last batch is short and whose gradients fit into fp16."""
    settings = trainings.Settings(epochs=3, clip_norm=0.5, precision=precision, show_progress=False, **options)
    return trainings.Run(settings, dtype=torch.float32, evaluate=True, device=place.device, loss_factor=1 / 64)


def plain_loop(run: trainings.Run, dtype: torch.dtype | None) -> nn.Module:
    """Train with PyTorch alone on whole batches."""
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
    """Weights and evaluations are those of a plain loop, in each precision."""
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
            yield holds(f"{precision}: bits alike on all ranks", "", alike_everywhere(outcome))


def evaluated(run: trainings.Run, module: nn.Module, dtype: torch.dtype | None) -> float:
    data = trainings.Points(run.samples, run.dtype)
    x, y = data.x.to(run.device), data.y.to(run.device)
    with torch.no_grad(), nullcontext() if dtype is None else torch.autocast(x.device.type, dtype):
        error: Tensor = trainings.squared(module(x), y) / len(x)
    return float(error)


def alike_everywhere(outcome: trainings.Outcome) -> bool:
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, outcome.weights_sha256)
    return len(set(digests)) == 1


def resumed(place: Place) -> Iterator[Row]:
    """A run that is interrupted and resumed ends with the bits of one that was not, dropout included."""
    for precision in DTYPES:
        folder = shared_folder(place)
        saved: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every": 1}
        with deterministic():
            whole = trainings.train(place, replace(run_of(place, precision), dropout=0.2))
            trainings.train(place, replace(run_of(place, precision, **saved), dropout=0.2, stop_after=7))
            again = trainings.train(place, replace(run_of(place, precision, **saved, resume=True), dropout=0.2))
        right = again.bits() == whole.bits() and bool(again.result.resumed_from_step)
        value = f"{told(again.weights_sha256, whole.weights_sha256)}, from step {again.result.resumed_from_step}"
        yield holds(f"{precision}, interrupted in step 8: the bits of an undisturbed run", value, right)
        place.barrier()
        if place.rank == 0:
            shutil.rmtree(folder)


def shared_folder(place: Place) -> str:
    """Make a folder for all ranks, which share a host."""
    box: list[Any] = [tempfile.mkdtemp() if place.rank == 0 else None]
    dist.broadcast_object_list(box)
    return str(box[0])
