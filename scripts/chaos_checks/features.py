"""Training as in loop.py, with one thing more that scripts have, which has state or takes turns of its own.

paceline run --nproc 2 features.py FOLDER '{"feature": "PowerSGD", "steps": 12}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from loop import Optimizer, network, report
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, IterableDataset

import paceline
from paceline import compression
from paceline.core.telemetry.failpoints import strike
from paceline.data import DataLoader, GlobalBatchStream

FEATURES = (
    "PowerSGD",
    "TopK",
    "static_graph",
    "workers",
    "a second Checkpointer",
    "two models in turn",
    "evaluation between steps",
    "frozen, then thawed",
    "accumulate",
    "bfloat16",
    "GradScaler",
    "SyncBatchNorm",
    "an averaged model",
    "a stream",
)
THAWED = 6
"""The step from which frozen parameters are trained."""


class Augmented(Dataset[tuple[Tensor, int, int]]):
    """Points with labels, changed at random whenever they are fetched."""

    def __init__(self) -> None:
        self._points, self._labels = torch.randn(256, 16), torch.randint(0, 4, (256,))

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        strike("sample")
        return self._points[index] + torch.randn(16) * 0.1, int(self._labels[index]), index


class Stream(IterableDataset[tuple[Tensor, int, int]]):
    """The samples of `data`, one after the other."""

    def __init__(self, data: Augmented) -> None:
        self._data = data

    def __iter__(self) -> Iterator[tuple[Tensor, int, int]]:
        return (self._data[index] for index in range(len(self._data)))


class Run:
    """A training that uses one feature of the library."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.feature, self.folder, self.steps = settings["feature"], folder, settings["steps"]
        assert self.feature in FEATURES
        self.world = paceline.init()
        with paceline.set_seed(0):
            self.data = Augmented()
            self.nets = [network() for _ in range(1 + (self.feature == "two models in turn"))]
        if self.feature == "SyncBatchNorm":
            self.nets = [paceline.SyncBatchNorm.convert_sync_batchnorm(net) for net in self.nets]
        is_static = self.feature == "static_graph"
        self.models = [
            paceline.DistributedDataParallel(net, bucket_cap_mb=0.005, static_graph=is_static) for net in self.nets
        ]
        self.optimizers = [self._optimizer(net) for net in self.nets]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, enabled=self.feature == "GradScaler")
        self.average = AveragedModel(self.nets[0], multi_avg_fn=get_ema_multi_avg_fn(0.9))
        workers = 2 if self.feature == "workers" else 0
        if self.feature == "a stream":
            self.loader = DataLoader(GlobalBatchStream(Stream(self.data), batch_size=32))
        else:
            self.loader = DataLoader(self.data, batch_size=32, shuffle=True, num_workers=workers)
        self.checkpointer = self._checkpointer(settings["every"])
        self.seldom: paceline.Checkpointer | None = None
        """A second one, for the weights alone, now and then."""
        if self.feature == "a second Checkpointer":
            self.seldom = paceline.Checkpointer(folder / "seldom", keep=1)
            self.seldom.register("model", self.models[0])

    def _optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        parameters: list[Tensor] = list(net.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.02}]
        return Optimizer(groups, lr=0.01)

    def _checkpointer(self, every: int | None) -> paceline.Checkpointer:
        checkpointer = paceline.Checkpointer(self.folder / "checkpoints", every=every)
        for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            checkpointer.register(f"model_{number}", model)
            checkpointer.register(f"optimizer_{number}", optimizer)
        checkpointer.register("loader", self.loader)
        checkpointer.register("scaler", self.scaler)
        if self.feature == "an averaged model":
            checkpointer.register("average", self.average)
        kinds: dict[str, Any] = {"PowerSGD": compression.PowerSGD, "TopK": compression.TopK}
        if self.feature in kinds:
            state = kinds[self.feature](self.models[0])
            self.models[0].register_comm_hook(state, compression.hook)
            checkpointer.register("hook", state, per_rank=True)
        return checkpointer

    def train(self) -> None:
        """Train from where it was to the last step."""
        if self.checkpointer.steps():
            self.checkpointer.restore()
        turn, done = 0, self.checkpointer.step()
        while done < self.steps:
            for inputs, labels, samples in self._batches():
                self._before(done)
                with open(self.folder / f"used-{self.world.rank}", "a") as log:
                    log.write(f"{done + 1} {turn} {time.time()} {samples.tolist()}\n")
                before, done = done, self._turn(inputs, labels)
                turn = 0 if done > before else turn + 1
                if self.seldom is not None and done > before and done % 4 == 0:
                    self.seldom.save(done)
                if done >= self.steps:
                    break

    def _batches(self) -> Iterator[Any]:
        if self.feature == "accumulate":
            return paceline.accumulate(self.models[0], self.loader, every=3)
        return iter(self.loader)

    def _before(self, done: int) -> None:
        """Prepare the training of step `done` + 1."""
        if self.feature.startswith("frozen"):
            for parameter in list(self.nets[0].parameters())[:2]:
                parameter.requires_grad_(done + 1 >= THAWED)
        if self.feature.startswith("evaluation") and done % 3 == 0:
            model: nn.Module = self.models[0]
            model.eval()
            with torch.no_grad():
                chosen = torch.randperm(256)[:64].tolist()
                points = torch.stack([self.data[index][0] for index in chosen])
                strike("evaluation")
                paceline.mean_over_ranks(float(model(points).sum()))
            model.train()

    def _turn(self, inputs: Tensor, labels: Tensor) -> int:
        """Train with a batch; return the steps done."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            low = torch.autocast("cpu", torch.bfloat16) if self.feature == "bfloat16" else nullcontext()
            with model.weight(len(labels)), low:
                loss = cross_entropy(model(inputs + torch.rand_like(inputs) * 0.1).float(), labels, reduction="sum")
                self.scaler.scale(loss).backward()
            if model.do_sync:
                self.scaler.step(optimizer)
                self.scaler.update()
                optimizer.zero_grad()
        if self.feature == "an averaged model":
            self.average.update_parameters(self.nets[0])
        return self.checkpointer.step()


def main() -> None:
    """Train, and write the digests."""
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    run = Run(folder, {"steps": 12, "every": None, **given})
    run.train()
    everything: list[Any] = [*run.nets, *run.optimizers, run.scaler, run.average]
    report(folder, run.world.rank, run.checkpointer, [each.state_dict() for each in everything])
    run.checkpointer.close()
    if run.seldom is not None:
        run.seldom.close()
    run.world.close()


if __name__ == "__main__":
    main()
