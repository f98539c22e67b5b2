"""The training of chaos tests: dropout, batch normalization, and shuffled data with random augmentation.

    paceline run --nproc 2 chaos_training.py FOLDER '{"feature": "PowerSGD", "backend": "gloo", "steps": 12}'

At the end, each rank writes SHA-256 digests of its whole state and its number of restarts to FOLDER/rank-<n>.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, IterableDataset

import paceline
from paceline import compression
from paceline.core.telemetry.failpoints import strike
from paceline.data import DataLoader, GlobalBatchStream
from paceline.launch.rank.failure_record import LAUNCHER
from paceline.optim import ShardedOptimizer

FEATURES = {
    "PowerSGD": ("bucket rank=1 at=4", "gate rank=0 at=3"),
    "TopK": ("prepared rank=1 at=4", "boundary rank=0 at=3"),
    "static_graph": ("bucket rank=1 at=4", "forward rank=0 at=1"),
    "workers": ("forward rank=0 at=4", "stepped rank=1 at=3"),
    "a second Checkpointer": ("write rank=0 at=1", "forward rank=1 at=3"),
    "two models in turn": ("forward rank=1 at=8", "forward rank=0 at=6"),
    "evaluation between steps": ("evaluation rank=1 at=3", "gate rank=0 at=2"),
    "frozen, then thawed": ("gate rank=1 at=4", "bucket rank=0 at=3"),
    "accumulate": ("forward rank=1 at=8", "gate rank=0 at=2"),
    "bfloat16": ("bucket rank=1 at=4", "optimizer rank=0 at=2"),
    "GradScaler": ("forward rank=1 at=8", "prepared rank=0 at=3"),
    "SyncBatchNorm": ("bucket rank=1 at=4", "forward rank=0 at=3"),
    "an averaged model": ("gate rank=0 at=4", "stepped rank=1 at=3"),
    "a stream": ("forward rank=1 at=10", "bucket rank=0 at=1"),
}
"""Features, with the two failures in the chaos case of each."""
THAWED, DISTURBED = 6, 13
"""First step that trains the frozen parameters, and step of the disturbance."""
BUCKET_MB = 0.005
"""Small enough that the model has several buckets."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run, given as JSON."""

    feature: str = ""
    """One of :data:`FEATURES`, in a loop with weighted losses; if empty, a plain loop with a schedule."""
    wrapper: str = "ours"
    """"ours" or "torch"."""
    backend: str = "paceline"
    device: str = "cpu"
    """Device that all ranks use."""
    steps: int = 10
    every: int | None = None
    background: bool = False
    sharded: bool = False
    disturbance: str = ""
    """What rank 1 does in step 13 of the first start: "stop" sends SIGTERM to the launcher, "kernel" hangs."""


class Optimizer(torch.optim.AdamW):
    """AdamW with a failpoint between the updates of its first and its second parameter group."""

    is_training = False
    """Whether training has begun. Before that, ShardedOptimizer calls the class to inspect it."""

    def _init_group(self, group: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        if self.is_training and len(self.param_groups) > 1 and group is self.param_groups[1]:
            strike("optimizer")
        return super()._init_group(group, *arguments, **options)  # type: ignore[no-untyped-call]


class Augmented(Dataset[tuple[Tensor, int, int]]):
    """Labeled points with random noise that differs at every access."""

    def __init__(self) -> None:
        self._points, self._labels = torch.randn(256, 16), torch.randint(0, 4, (256,))

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        strike("sample")
        return self._points[index] + torch.randn(16) * 0.1, int(self._labels[index]), index


class Stream(IterableDataset[tuple[Tensor, int, int]]):
    """The samples of `data` in order."""

    def __init__(self, data: Augmented) -> None:
        self._data = data

    def __iter__(self) -> Iterator[tuple[Tensor, int, int]]:
        return (self._data[index] for index in range(len(self._data)))


def network() -> nn.Module:
    """Return a network with buffers and dropout."""
    return nn.Sequential(
        *(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)),
    )


def wrap(net: nn.Module, settings: Settings) -> Any:
    """Wrap `net` as in `settings`, with small buckets."""
    if settings.wrapper == "ours":
        is_static = settings.feature == "static_graph"
        return paceline.DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB, static_graph=is_static)
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    model.register_forward_pre_hook(lambda *_: strike("forward"))
    # By the time this gradient is ready, the bucket of the later parameters has been launched.
    middle = list(net.parameters())[-3]
    middle.register_post_accumulate_grad_hook(lambda _: strike("bucket"))
    return model


class Run:
    """A training loop with at most one of the features."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings, self.feature = folder, settings, settings.feature
        assert self.feature in ("", *FEATURES)
        self.device = torch.device(settings.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.world = paceline.init(settings.backend)
        with paceline.set_seed(0):
            self.data = Augmented()
            self.nets = [network().to(self.device) for _ in range(1 + (self.feature == "two models in turn"))]
        if self.feature == "SyncBatchNorm":
            self.nets = [paceline.SyncBatchNorm.convert_sync_batchnorm(net) for net in self.nets]
        self.models = [wrap(net, settings) for net in self.nets]
        self.optimizers = [self._optimizer(net) for net in self.nets]
        self.schedulers = [] if self.feature else [StepLR(optimizer, 3, 0.5) for optimizer in self.optimizers]
        is_scaled = self.feature == "GradScaler"
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**127, enabled=is_scaled)
        self.average = AveragedModel(self.nets[0], multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if self.feature == "a stream":
            self.loader = DataLoader(GlobalBatchStream(Stream(self.data), batch_size=32))
        else:
            workers = 2 if self.feature == "workers" else 0
            self.loader = DataLoader(self.data, batch_size=32, shuffle=True, num_workers=workers)
        self.checkpointer = self._checkpointer()
        self.weights_only: paceline.Checkpointer | None = None
        if self.feature == "a second Checkpointer":
            self.weights_only = paceline.Checkpointer(folder / "weights-only", keep=1)
            self.weights_only.register("model", self.models[0])

    def _optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        parameters: list[Tensor] = list(net.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.02}]
        if self.settings.sharded:
            return ShardedOptimizer(groups, Optimizer, by="tensor", lr=0.01)
        return Optimizer(groups, lr=0.01)

    def _checkpointer(self) -> paceline.Checkpointer:
        every, background = self.settings.every, self.settings.background
        checkpointer = paceline.Checkpointer(self.folder / "checkpoints", every=every, async_save=background)
        for kind, objects in (("model", self.models), ("optimizer", self.optimizers), ("scheduler", self.schedulers)):
            for number, value in enumerate(objects):
                checkpointer.register(f"{kind}_{number}", value)
        checkpointer.register("loader", self.loader)
        checkpointer.register("scaler", self.scaler)
        if self.feature == "an averaged model":
            checkpointer.register("average", self.average)
        compressors: dict[str, Any] = {"PowerSGD": compression.PowerSGD, "TopK": compression.TopK}
        if self.feature in compressors:
            state = compressors[self.feature](self.models[0])
            self.models[0].register_comm_hook(state, compression.hook)
            checkpointer.register("hook", state, per_rank=True)
        return checkpointer

    def train(self) -> None:
        """Train from the restored step to the last step."""
        if self.checkpointer.steps():
            self.checkpointer.restore()
        Optimizer.is_training = True
        turn, done = 0, self.checkpointer.step()
        while done < self.settings.steps:
            for inputs, labels, samples in self._batches():
                self._before(done)
                with open(self.folder / f"used-{self.world.rank}", "a") as log:
                    log.write(f"{done + 1} {turn} {time.time()} {samples.tolist()}\n")
                previous, done = done, self._turn(inputs, labels)
                turn = 0 if done > previous else turn + 1
                if self.weights_only is not None and done > previous and done % 4 == 0:
                    self.weights_only.save(done)
                if done >= self.settings.steps:
                    break
        if done not in self.checkpointer.steps():
            self.checkpointer.save(done)

    def _batches(self) -> Iterator[Any]:
        if self.feature == "accumulate":
            return paceline.accumulate(self.models[0], self.loader, every=3)
        return iter(self.loader)

    def _before(self, done: int) -> None:
        """Make the changes that are due before step `done` + 1."""
        is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.settings.disturbance and self.world.rank == 1 and done + 1 == DISTURBED and is_first_start:
            self._disturb()
        if self.feature == "frozen, then thawed":
            for parameter in list(self.nets[0].parameters())[:2]:
                parameter.requires_grad_(done + 1 >= THAWED)
        if self.feature == "evaluation between steps" and done % 3 == 0:
            model = self.models[0].eval()
            with torch.no_grad():
                points = torch.stack([self.data[index][0] for index in torch.randperm(256)[:64].tolist()])
                strike("evaluation")
                paceline.mean_over_ranks(float(model(points).sum()))
            model.train()

    def _disturb(self) -> None:
        if self.settings.disturbance == "stop":
            os.kill(int(os.environ[LAUNCHER]), signal.SIGTERM)
            time.sleep(5)  # the launcher asks the ranks to end while this step is running
            return
        if self.device.type == "cuda":
            for _ in range(20):  # about 3 seconds each
                torch.cuda._sleep(5 * 10**9)
            torch.cuda.synchronize()
        time.sleep(1000)

    def _turn(self, inputs: Tensor, labels: Tensor) -> int:
        """Train on a batch, and return the number of completed steps."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            precision = torch.autocast("cpu", torch.bfloat16) if self.feature == "bfloat16" else nullcontext()
            with model.weight(len(labels)) if self.feature else nullcontext(), precision:
                scores = model((inputs + torch.rand_like(inputs) * 0.1).to(self.device)).float()
                reduction = "sum" if self.feature else "mean"
                self.scaler.scale(cross_entropy(scores, labels.to(self.device), reduction=reduction)).backward()
            if not self.feature or model.do_sync:
                self.scaler.step(optimizer)
                self.scaler.update()
                optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()
        if self.feature == "an averaged model":
            self.average.update_parameters(self.nets[0])
        return self.checkpointer.step()

    def report(self) -> None:
        """Write the digests and counts of this rank."""
        used: dict[tuple[int, int], str] = {}
        for line in (self.folder / f"used-{self.world.rank}").read_text().splitlines():
            step, turn, _, samples = line.split(" ", 3)
            used[int(step), int(turn)] = samples
        objects: list[Any] = [*self.nets, *self.optimizers, *self.schedulers, self.scaler, self.average]
        generators = [torch.get_rng_state()]
        if self.device.type == "cuda":
            generators.append(torch.cuda.get_rng_state())
        history = self.checkpointer.history
        outcome = {
            "states": digest([value.state_dict() for value in objects]),
            "generators": digest(generators),
            "samples": digest(used),
            "steps": max(used)[0],
            "restarts": history.restarts,
            "redone": history.steps_redone,
            "from": history.rescued_from,
        }
        (self.folder / f"rank-{self.world.rank}.json").write_text(json.dumps(outcome))


def digest(value: Any) -> str:
    """Return the SHA-256 of nested tensors and plain values."""
    content = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            content.update(str((part.dtype, tuple(part.shape))).encode())
            content.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in sorted(part, key=str):
                content.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        else:
            content.update(repr(part).encode())

    add(value)
    return content.hexdigest()


def main() -> None:
    run = Run(Path(sys.argv[1]), Settings(**json.loads(sys.argv[2])))
    run.train()
    run.report()
    run.checkpointer.close()
    if run.weights_only is not None:
        run.weights_only.close()
    run.world.close()


if __name__ == "__main__":
    main()
