"""Time that `checkpointer.step()` and the gate before the optimizer add to a training step.

Two models of each size train in the same job, one with a Checkpointer and one without. Their steps alternate. "added"
is the difference of the medians, in wall time, which includes waiting at the gate, and in CPU time of the thread, which
is steadier on shared cores.

Run by: paceline run --nproc 2 benchmarks/step_boundary.py --help
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table
from torch import nn

import paceline
from harness import between, medians, now, parser_of, report, without_collections

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "digits": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 16, 10),
        ),
        (32, 1, 8, 8),
    ),
    "mlp-4M": (lambda: nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)), (64, 1024)),
    "mlp-25M": (lambda: nn.Sequential(nn.Linear(2048, 6144), nn.ReLU(), nn.Linear(6144, 2048)), (64, 2048)),
}


class Side:
    """A model in training, with a Checkpointer if `folder` is given."""

    def __init__(self, name: str, folder: str | None) -> None:
        make, shape = MODELS[name]
        with paceline.set_seed(0):
            net = make()
        self.model = paceline.DistributedDataParallel(net)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)
        self.inputs = torch.randn(shape)
        self.checkpointer = None
        if folder is not None:
            self.checkpointer = paceline.Checkpointer(folder)
            for part, each in vars(self).items():
                if part in ("model", "optimizer", "scheduler"):
                    self.checkpointer.register(part, each)
            self.checkpointer.step()

    def step(self) -> list[int]:
        """Train for one step, and return its duration by clock."""
        began = now()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        if self.checkpointer is not None:
            self.checkpointer.step()
        return between(began, now())


def main() -> None:
    """Measure every size, and print the table on rank 0."""
    parser = parser_of(__doc__, None)
    parser.add_argument("--steps", type=int, default=200, help="Steps of each model. Default 200.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with paceline.init() as world, tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            sides = {"marked": Side(name, f"{folder}/{name}"), "bare": Side(name, None)}
            times: dict[str, list[list[int]]] = {side: [] for side in sides}
            with without_collections():
                for turn in range(options.steps + 20):
                    for side in sorted(sides, reverse=bool(turn % 2)):
                        times[side].append(sides[side].step())
            marked, bare = (medians(times[side][20:]) for side in ("marked", "bare"))
            added = {clock: marked[clock] - bare[clock] for clock in ("wall", "thread")}
            share = {clock: added[clock] / bare["wall"] for clock in added}
            rows.append({"model": name, "step": bare["wall"], "added": added, "share": share})
        if world.is_main:
            table = Table("model", "step ms", "added µs, wall", "of a step", "added µs, thread", "of a step")
            for row in rows:
                cells = [f"{1e3 * row['step']:.2f}"]
                for clock in ("wall", "thread"):
                    cells += [f"{1e6 * row['added'][clock]:.0f}", f"{row['share'][clock]:.2%}"]
                table.add_row(row["model"], *cells)
            report(table, "step-boundary", rows)


if __name__ == "__main__":
    main()
