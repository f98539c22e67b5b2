"""The Trainer: precisions, callbacks, predictions, evaluations, and runs that are resumed in the middle."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import TensorDataset

import paceline
from gpu_checks.bits import alone, deterministic, told
from gpu_checks.rows import Place, Row, holds
from gpu_checks.wrapping import alike, between, difference
from paceline.core.state.digests import tensor_digest, weights_sha256
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.optim import ShardedOptimizer
from paceline.train import Evaluation, ExponentialMovingAverage, TrainConfig, Trainer

FEATURES, CLASSES, SAMPLES, BATCH, SEED = 32, 4, 200, 48, 5
"""The last batch of an epoch is short."""
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Interrupted(Exception):
    """Ends a training in the middle."""


class Moments:
    """Counts the moments of a run."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def on_start(self, run: Any) -> None:
        self.seen["start"] += 1

    def on_step(self, run: Any) -> None:
        self.seen["step"] += 1

    def on_evaluation(self, run: Any) -> None:
        self.seen["evaluation"] += 1

    def on_save(self, run: Any) -> None:
        self.seen["save"] += 1

    def on_end(self, run: Any) -> None:
        self.seen["end"] += 1


def samples() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    return x, x[:, :CLASSES].argmax(1)


def network(place: Place, dropout: float) -> nn.Module:
    torch.manual_seed(0)
    width = 256 if place.on_gpu else 32
    layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)).to(place.device)


class Training:
    """A Trainer and its parts.

    With `until` an exception ends it in the step after so many, and with `averages` it ends with averaged weights.
    """

    def __init__(
        self,
        place: Place,
        dropout: float = 0.0,
        until: int = 0,
        averages: bool = False,
        folder: str | None = None,
        sharded: bool = False,
        **options: Any,
    ) -> None:
        self.module = network(place, dropout)
        model = paceline.DistributedDataParallel(self.module)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if sharded:
            optimizer = ShardedOptimizer.of(optimizer, model.process_group)
        sampler = GlobalBatchSampler(SAMPLES, BATCH, seed=SEED)
        data = TensorDataset(*samples())
        self.moments, self.device, self.left = Moments(), place.device, until
        evaluation = Evaluation(DataLoader(data, 64), self.sums, ("loss", "right"))
        config = TrainConfig(epochs=3, clip_norm=0.5, show_progress=False, log_every=2, **options)
        loader = DataLoader(data, batch_sampler=sampler)
        self.rows = DataLoader(data, 64, shuffle=True)
        callbacks = [self.moments, *([ExponentialMovingAverage(model, decay=0.5)] if averages else [])]
        self.checkpointer = None if folder is None else paceline.Checkpointer(folder, every=1)
        self.trainer = Trainer(
            *(model, optimizer, self.loss, loader, config, evaluation),
            callbacks=callbacks,
            checkpointer=self.checkpointer,
        )
        if until:
            optimizer.register_step_post_hook(self.interrupt)

    def interrupt(self, *_: object) -> None:
        if self.left == 0:
            raise Interrupted
        self.left -= 1

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = (part.to(self.device) for part in batch)
        return F.cross_entropy(model(x).float(), y, reduction="sum"), len(y)

    def sums(self, module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
        x, y = (part.to(self.device) for part in batch)
        logits = module(x).float()
        return {"loss": F.cross_entropy(logits, y, reduction="sum"), "right": (logits.argmax(1) == y).sum()}, len(y)

    def predict(self) -> Tensor:
        rows: Tensor = self.trainer.predict(self.rows, lambda module, batch: module(batch[0].to(self.device)).float())
        return rows

    def fit(self) -> Any:
        try:
            return self.trainer.fit()
        except Interrupted:
            return None
        finally:
            if self.checkpointer is not None:
                self.checkpointer.close()


def averaged_by_a_plain_loop(place: Place, dtype: torch.dtype | None) -> nn.Module:
    """Train by PyTorch alone on whole batches; returns a module with the averaged weights."""
    module, (x, y) = network(place, 0.0), (part.to(place.device) for part in samples())
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler(place.device.type, enabled=dtype is torch.float16)
    batches = GlobalBatchSampler(SAMPLES, BATCH, seed=SEED, rank=0, world_size=1)
    for _ in range(3):
        for numbers in batches:
            at = torch.tensor(list(numbers), device=place.device)
            with nullcontext() if dtype is None else torch.autocast(place.device.type, dtype):
                loss = F.cross_entropy(module(x[at]).float(), y[at])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= scale:  # the step was not skipped
                average.update_parameters(module)
    averaged: nn.Module = average.module
    return averaged


def precisions(place: Place) -> Iterator[Row]:
    """Weights, evaluations, averages and predictions are those of a plain loop, in each precision."""
    x, y = (part.to(place.device) for part in samples())
    for name, tolerance in (("fp32", 1e-5), ("bf16", 3e-2), ("fp16", 1e-2)):
        dtype = DTYPES[name]
        training = Training(place, averages=True, precision=name)
        result = training.fit()
        average = averaged_by_a_plain_loop(place, dtype)
        error = between(training.module, average)
        yield holds(f"{name}: averaged weights differ from a plain loop's by", f"{error:.1e}", error < tolerance)
        average.eval()
        with torch.no_grad(), nullcontext() if dtype is None else torch.autocast(place.device.type, dtype):
            logits = average(x).float()
            own = training.module.eval()(x).float()
        apart = abs(result.metrics["loss"] / float(F.cross_entropy(logits, y)) - 1)
        value = f"{apart:.1e} ({result.metrics['loss']:.4f})"
        yield holds(f"{name}: the evaluation's loss differs from its loss by", value, apart < tolerance)
        rows = training.predict()
        error = difference([rows], [own.cpu()])
        right = error < tolerance and rows.device.type == "cpu"
        yield holds(f"{name}: predict() differs from the module's forward by", f"{error:.1e}", right)
        if place.size > 1:
            yield holds(f"{name}: bits alike on all ranks", "", alike(training.module))
    counts = dict(training.moments.seen)
    expected = {"start": 1, "step": result.steps, "evaluation": 3, "end": 1}
    yield holds("callbacks are called", str(counts), counts == expected)


def resumed(place: Place) -> Iterator[Row]:
    """A run that is interrupted and resumed ends with the bits of one that was not, dropout included."""
    for name in ("fp32", "bf16", "fp16"):
        with deterministic():
            whole = Training(place, 0.2, precision=name)
            whole.fit()
            folder = shared_folder(place)
            options: dict[str, Any] = {"precision": name, "folder": folder}
            Training(place, 0.2, until=6, **options).fit()
            after = Training(place, 0.2, resume=True, **options)
            result = after.fit()
        bits, expected = weights_sha256(after.module), weights_sha256(whole.module)
        value = f"{told(bits, expected)}, resumed from step {result.resumed_from_step}"
        right = bits == expected and bool(result.resumed_from_step) and after.moments.seen["save"] > 0
        yield holds(f"{name}, interrupted in step 7: SHA-256 as of an undisturbed run", value, right)
        place.barrier()
        if place.rank == 0:
            shutil.rmtree(folder)
    sharded, ordinary = (Training(place, sharded=flag) for flag in (True, False))
    for training in (sharded, ordinary):
        training.fit()
    error = between(sharded.module, ordinary.module)
    yield holds("a ShardedOptimizer: weights differ by", f"{error:.1e}", error < 1e-5)


def shared_folder(place: Place) -> str:
    """Make a folder for all ranks, which share a host."""
    box: list[Any] = [tempfile.mkdtemp() if place.rank == 0 else None]
    dist.broadcast_object_list(box)
    return str(box[0])


def same_bits(place: Place) -> Iterator[Row]:
    """With ``virtual_ranks`` weights have the bits of a loop on one rank, and predictions are alike on all ranks."""
    for name in DTYPES:
        with deterministic():
            one = looped_alone(place, name)
            several = Training(place, 0.2, virtual_ranks=4, precision=name)
            several.fit()
        bits, expected = weights_sha256(several.module), weights_sha256(one)
        what = f"virtual_ranks=4, {name}: SHA-256 as of a loop on one rank"
        yield holds(what, told(bits, expected), bits == expected)
        rows: list[Any] = [None] * place.size
        dist.all_gather_object(rows, tensor_digest(several.predict()))
        yield holds(f"virtual_ranks=4, {name}: predictions alike on all ranks", "", len(set(rows)) == 1)


def looped_alone(place: Place, precision: str) -> nn.Module:
    """Train over slices as the Trainer does, on this rank alone, in a loop of one's own."""
    module, dtype = network(place, 0.2), DTYPES[precision]
    model = paceline.DistributedDataParallel(module, virtual_ranks=4, process_group=alone(place))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler(place.device.type, enabled=precision == "fp16")
    reduction: Any = "mean" if precision == "fp16" else "sum"
    sampler = GlobalBatchSampler(SAMPLES, BATCH, seed=SEED, virtual_ranks=4, rank=0, world_size=1)
    loader = DataLoader(TensorDataset(*samples()), batch_sampler=sampler)
    for _ in range(3):
        for batch in paceline.accumulate(model, loader):
            x, y = (part.to(place.device) for part in batch)
            with nullcontext() if dtype is None else torch.autocast(place.device.type, dtype):
                loss = F.cross_entropy(model(x).float(), y, reduction="sum")
            with model.weight(len(y), reduction=reduction):
                scaler.scale(loss / len(y) if reduction == "mean" else loss).backward()
            if model.do_sync:
                scaler.unscale_(optimizer)
                paceline.clip_grad_norm_(model, 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return module
