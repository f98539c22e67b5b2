"""Small trainings with the Trainer: a :class:`Run` describes the training, an :class:`Outcome` its result.

    [first, second] = pools.run(2, train, Run(TrainConfig(epochs=2)))

The outcome contains everything that determines the bits: weights, optimizer, random generators, order of samples.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, IterableDataset

from insides import rng_state, tensor_digest, training_step, weights_sha256
from paceline import World, set_seed
from paceline.checkpoint import Checkpointer
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import PacelineError
from paceline.train import Evaluation, JsonLines, Result, TrainConfig, Trainer, lr_factor

FEATURES, WIDTH, CLASSES = 6, 16, 3
LR = 0.05


@contextmanager
def scalers_made() -> Iterator[list[GradScaler]]:
    """Collect the gradient scalers of Trainers created in the block."""
    made: list[GradScaler] = []

    class Kept(GradScaler):
        def __init__(self, device: str, init_scale: float) -> None:
            super().__init__(device, init_scale)
            made.append(self)

    with mock.patch.object(training_step, "GradScaler", Kept):
        yield made


class Interrupted(Exception):
    """Simulates an interruption of a run."""


@dataclass(frozen=True)
class Settings(TrainConfig):
    """Settings of the Trainer and of the objects passed to it."""

    virtual_ranks: int | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    keep_best: str | None = None
    best: Any = None
    async_save: bool = False
    metrics_file: str | None = None
    schedule: dict[str, Any] | None = None
    """Arguments of :func:`paceline.train.lr_factor`."""

    def objects(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the Trainer's arguments besides the configuration."""
        objects: dict[str, Any] = {}
        if self.checkpoint_dir is not None:
            keeping = {name: getattr(self, name) for name in ("keep", "keep_best", "best", "async_save")}
            objects["checkpointer"] = Checkpointer(self.checkpoint_dir, every=self.checkpoint_every, **keeping)
        if self.metrics_file is not None:
            objects["loggers"] = [JsonLines(self.metrics_file)]
        if self.schedule is not None:
            objects["scheduler"] = LambdaLR(optimizer, partial(lr_factor, **self.schedule))
        return objects


class Points(Dataset[Any]):
    """Points with targets; `augment` adds noise from all three random generators on each access."""

    def __init__(self, samples: int, dtype: torch.dtype, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randn(samples, CLASSES, generator=generator, dtype=torch.float64).to(dtype)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x = self.x[index]
        if self.augment:
            x = x + 0.1 * torch.randn(FEATURES, dtype=x.dtype) + 0.1 * random.random() + 0.1 * numpy.random.rand()
        return x, self.y[index], index


class Stream(IterableDataset[Any]):
    """The samples of a dataset as a stream, repeated forever if `endless`."""

    def __init__(self, data: Any, endless: bool = False) -> None:
        self.data, self.endless = data, endless

    def __iter__(self) -> Iterator[Any]:
        yield from (self.data[index] for index in range(len(self.data)))
        while self.endless:
            yield from (self.data[index] for index in range(len(self.data)))


@dataclass(frozen=True)
class Run:
    """A complete training."""

    config: TrainConfig | Settings
    batch_size: int = 8
    """Samples per micro-batch over all ranks."""
    samples: int = 45
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0
    augment: bool = False
    workers: int = 0
    seed: int = 3
    adam: bool = False
    stop_after: int | None = None
    """Number of optimizer steps before an interruption on every rank."""
    poisoned_step: int | None = None
    """Step with a NaN loss on the last rank."""
    evaluate: bool = False
    device: str | torch.device = "cpu"
    loss_factor: float = 1.0
    memory: bool = False
    """Whether the model has a data-dependent buffer that affects its output."""


@dataclass
class Outcome:
    """The result of a training on one rank."""

    result: Result
    weights: dict[str, numpy.ndarray]
    weights_sha256: str
    optimizer_sha256: str
    generators_sha256: str
    seen: list[list[int]] = field(default_factory=list)
    """Indices of this rank's samples, one list per nonempty micro-batch."""
    error: str = ""
    """Type and message of the Paceline error that ended the run."""

    def bits(self) -> tuple[str, str, str]:
        return self.weights_sha256, self.optimizer_sha256, self.generators_sha256


class Memory(nn.Module):
    """Subtracts a running mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))
        return x - self.mean


def net(run: Run) -> nn.Module:
    """Build the model of a run, identical on every rank."""
    with set_seed(run.seed):
        return nn.Sequential(
            *([Memory()] if run.memory else []),
            nn.Linear(FEATURES, WIDTH),
            nn.Tanh(),
            nn.Dropout(run.dropout),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, CLASSES),
        ).to(run.device, run.dtype)


def optimizer_of(run: Run, module: nn.Module) -> torch.optim.Optimizer:
    if run.adam:
        return torch.optim.AdamW(module.parameters(), lr=LR)
    return torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)


def squared(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y) ** 2).sum()


def squared_error(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    """Metric for an evaluation: the summed squared error and the number of samples."""
    x, y, _ = on_device_of(module, batch)
    return {"error": squared(module(x), y)}, len(x)


def squared_loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Loss function for the Trainer."""
    x, y, _ = batch
    return squared(model(x), y), len(x)


def refusal(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return the message of the Paceline error that a call raises; empty if it succeeds."""
    try:
        function(*arguments, **options)
    except PacelineError as error:
        return str(error)
    return ""


def on_device_of(module: nn.Module, batch: Any) -> list[Tensor]:
    device = next(module.parameters()).device
    return [part.to(device) for part in batch]


def random_squared_error(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    """Like :func:`squared_error` with noisy outputs, as in a VAE or with Monte Carlo dropout."""
    x, y, _ = batch
    noise = 0.1 * torch.randn(len(x), CLASSES, dtype=x.dtype) + 0.1 * random.random() + 0.1 * numpy.random.rand()
    return {"error": squared(module(x) + noise, y)}, len(x)


def plain_loop(
    run: Run,
    batches: Iterable[Sequence[int]],
    clip: float | None = None,
    rate: Callable[[int], float] = lambda step: 1.0,
    after: Callable[[nn.Module], Any] = lambda model: None,
) -> nn.Module:
    """Train in one process without Paceline: one step per batch, then `after`; `rate` scales the learning rate."""
    data, model = Points(run.samples, run.dtype), net(run)
    optimizer = optimizer_of(run, model)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = LR * rate(step)
        optimizer.zero_grad()
        (squared(model(data.x[batch]), data.y[batch]) / len(batch)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        after(model)
    return model


def train(world: World, run: Run) -> Outcome:
    """Train on this rank; the outcome includes the error, if any."""
    seen: list[list[int]] = []
    module = net(run)
    model = DistributedDataParallel(module)
    optimizer = optimizer_of(run, model)
    data = Points(run.samples, run.dtype, run.augment)
    loader = DataLoader(data, run.batch_size, shuffle=True, seed=run.seed, num_workers=run.workers)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, y, indices = on_device_of(model, batch)
        seen.append(indices.tolist())
        value = run.loss_factor * squared(model(x), y)
        if run.poisoned_step == trainer.result.steps and world.rank == world.size - 1:
            value = value * float("nan")
        return value, len(x)

    evaluation = Evaluation(DataLoader(data, 16), squared_error, ("error",)) if run.evaluate else None
    error = ""
    trainer = None
    objects: dict[str, Any] = {}
    try:
        objects = run.config.objects(optimizer) if isinstance(run.config, Settings) else {}
        trainer = Trainer(model, optimizer, loss, loader, run.config, evaluation, **objects)
        if run.stop_after is not None:
            optimizer.register_step_post_hook(interruption(run.stop_after))
        trainer.fit()
    except Interrupted:
        pass
    except PacelineError as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        if "checkpointer" in objects:
            objects["checkpointer"].close()
    return Outcome(
        result=trainer.result if trainer else Result(),
        weights=weights_of(module),
        weights_sha256=weights_sha256(model),
        optimizer_sha256=digest(optimizer.state_dict()),
        generators_sha256=digest(rng_state()),
        seen=seen,
        error=error,
    )


def in_silence(world: World, run: Run) -> Outcome:
    """Train without the warning that random generators are not restored on another number of ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(world, run)


def interruption(steps: int) -> Any:
    """Return a hook that raises in the step after `steps`, once the checkpoint of step `steps` is written."""
    remaining = [steps]

    def hook(*_: object) -> None:
        if remaining[0] == 0:
            raise Interrupted
        remaining[0] -= 1

    return hook


def digest(value: Any) -> str:
    """Return the SHA-256 of nested tensors and plain values."""
    return hashlib.sha256(_bytes(value)).hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, dict):
        return b"".join(_bytes(key) + _bytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return b"".join(map(_bytes, value))
    return repr(value).encode() + b"\0"


def weights_of(module: nn.Module) -> dict[str, numpy.ndarray]:
    """Return copies of the weights and buffers by name."""
    return {name: tensor.cpu().numpy().copy() for name, tensor in module.state_dict().items()}


def relative_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference of any tensor, relative to the largest element of that tensor."""
    assert ours.keys() == theirs.keys()
    return max(float(abs(ours[name] - theirs[name]).max() / abs(theirs[name]).max()) for name in ours)
