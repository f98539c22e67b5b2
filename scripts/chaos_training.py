"""The training of chaos tests: dropout, batch normalization, and shuffled data with random augmentation.

    paceline run --nproc 2 chaos_training.py FOLDER '{"accumulate": true, "backend": "gloo", "steps": 12}'

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
from pprint import pformat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

import paceline
from paceline.core.digests import tensor_digest
from paceline.core.failpoints import strike
from paceline.data import DataLoader
from paceline.launch.failure_record import LAUNCHER
from paceline.optim import ShardedOptimizer

DISTURBED = 13
"""Step of the disturbance."""
BUCKET_MB = 0.005
"""Small enough that the model has several buckets."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run, given as JSON."""

    accumulate: bool = False
    """Whether a step has three micro-batches, with weighted losses; otherwise one, with a schedule."""
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

    updates_tensors_separately = True  # for ShardedOptimizer

    def _init_group(self, group: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        if len(self.param_groups) > 1 and group is self.param_groups[1]:
            strike("optimizer")
        return super()._init_group(group, *arguments, **options)  # type: ignore[no-untyped-call]


class Augmented(Dataset[tuple[Tensor, int, int]]):
    """Labeled points with random noise that differs at every access."""

    def __init__(self) -> None:
        self._points, self._labels = torch.randn(256, 16), torch.randint(0, 4, (256,))

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return self._points[index] + torch.randn(16) * 0.1, int(self._labels[index]), index


def network() -> nn.Module:
    """Return a network with buffers and dropout."""
    return nn.Sequential(
        *(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)),
    )


def wrap(net: nn.Module, settings: Settings) -> Any:
    """Wrap `net` as in `settings`, with small buckets."""
    if settings.wrapper == "ours":
        return paceline.DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    model.register_forward_pre_hook(lambda *_: strike("forward"))
    # By the time this gradient is ready, the bucket of the later parameters has been launched.
    middle = list(net.parameters())[-3]
    middle.register_post_accumulate_grad_hook(lambda _: strike("bucket"))
    return model


class Run:
    """A training loop."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.device = torch.device(settings.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.world = paceline.init(settings.backend)
        with paceline.set_seed(0):
            data = Augmented()
            self.net = network().to(self.device)
        self.model = wrap(self.net, settings)
        self.optimizer = self._optimizer()
        self.scheduler = StepLR(self.optimizer, 3, 0.5)
        self.loader = DataLoader(data, batch_size=32, shuffle=True)
        self.checkpointer = self._checkpointer()

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters: list[Tensor] = list(self.net.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.02}]
        if self.settings.sharded:
            return ShardedOptimizer(groups, Optimizer, by="tensor", lr=0.01)
        return Optimizer(groups, lr=0.01)

    def _checkpointer(self) -> paceline.Checkpointer:
        every, background = self.settings.every, self.settings.background
        checkpointer = paceline.Checkpointer(self.folder / "checkpoints", every=every, async_save=background)
        for name in ("model", "optimizer", "scheduler", "loader"):
            checkpointer.register(name, getattr(self, name))
        return checkpointer

    def train(self) -> None:
        """Train from the restored step to the last step."""
        if self.checkpointer.steps():
            self.checkpointer.restore()
        turn, done = 0, self.checkpointer.step()
        while done < self.settings.steps:
            for inputs, labels, samples in self._batches():
                self._disturb(done + 1)
                with open(self.folder / f"used-{self.world.rank}", "a") as log:
                    log.write(f"{done + 1} {turn} {time.time()} {samples.tolist()}\n")
                previous, done = done, self._turn(inputs, labels)
                turn = 0 if done > previous else turn + 1
                if done >= self.settings.steps:
                    break
        if done not in self.checkpointer.steps():
            self.checkpointer.save(done)

    def _batches(self) -> Iterator[Any]:
        return paceline.accumulate(self.model, self.loader, every=3) if self.settings.accumulate else iter(self.loader)

    def _disturb(self, step: int) -> None:
        is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if not (self.settings.disturbance and self.world.rank == 1 and step == DISTURBED and is_first_start):
            return
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
        accumulates = self.settings.accumulate
        with self.model.weight(len(labels)) if accumulates else nullcontext():
            scores = self.model((inputs + torch.rand_like(inputs) * 0.1).to(self.device))
            cross_entropy(scores, labels.to(self.device), reduction="sum" if accumulates else "mean").backward()
        if not accumulates or self.model.do_sync:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if not accumulates:
            self.scheduler.step()
        return self.checkpointer.step()

    def report(self) -> None:
        """Write the digests and counts of this rank."""
        used: dict[tuple[int, int], str] = {}
        for line in (self.folder / f"used-{self.world.rank}").read_text().splitlines():
            step, turn, _, samples = line.split(" ", 3)
            used[int(step), int(turn)] = samples
        objects: list[Any] = [self.net, self.optimizer, self.scheduler]
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

    def plain(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.dtype, part.shape, tensor_digest(part)
        if isinstance(part, dict):
            return {key: plain(item) for key, item in part.items()}
        return [plain(item) for item in part] if isinstance(part, list | tuple) else part

    return hashlib.sha256(pformat(plain(value)).encode()).hexdigest()  # pformat() sorts dicts


def main() -> None:
    run = Run(Path(sys.argv[1]), Settings(**json.loads(sys.argv[2])))
    run.train()
    run.report()
    run.checkpointer.close()
    run.world.close()


if __name__ == "__main__":
    main()
