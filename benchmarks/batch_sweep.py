"""Accuracy on MNIST against the global batch: the same learning rate for all of them, and the linear rule with warm-up.

Global batches of 32, 64, … 4,096 are trained for equally many epochs, with the rule of Goyal et al., "Accurate, Large
Minibatch SGD: Training ImageNet in 1 Hour", 2017, and without. A run whose gradient is no number is shown as diverged.

Run by: paceline run --nproc 2 benchmarks/batch_sweep.py --data DIR --plot sweep.svg (pip install -e '.[notebook]')
"""

from __future__ import annotations

import argparse
import gzip
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import paceline
from dated_results import save
from paceline.core.output.charts import check_chart, new_figure, write_chart
from paceline.data import DataLoader
from paceline.errors import NonFiniteGradient, UsageError
from paceline.nn import SyncBatchNorm
from paceline.train import Evaluation, TrainConfig, Trainer, lr_factor, scaled_lr

MEAN, SPREAD = 0.1307, 0.3081  # of MNIST's training pixels
BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
WARM_UP = 0.3
"""Share of a run in which the rule's learning rate rises."""
RULES = {False: "the same rate", True: "linear rule, warm-up"}
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Point:
    """One run of the sweep."""

    batch: int
    """Global batch, in samples."""
    is_scaled: bool
    """Whether the learning rate followed the linear rule, with warm-up."""
    lr: float
    """Highest learning rate."""
    accuracy: float | None
    """Accuracy on the held-out images; None if the gradient was no number."""
    steps: int
    seconds: float


def read(folder: Path, part: str, limit: int | None = None) -> TensorDataset:
    """Read images, (n, 1, 28, 28), and labels from MNIST's idx files in `folder`, plain or compressed."""
    found = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        path = folder / f"{part}-{kind}-ubyte"
        raw = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
        found.append(torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8))
    images = (found[0].view(-1, 1, 28, 28)[:limit].float() / 255 - MEAN) / SPREAD
    return TensorDataset(images, found[1][:limit].long())


def network() -> nn.Sequential:
    """Return three convolutions with SyncBatchNorm and a linear layer: (batch, 1, 28, 28) to (batch, 10) logits."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64)):
        conv = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        layers += [conv, SyncBatchNorm(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 64, 10))


def summed_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
    """Return the summed cross-entropy of a batch, and its number of samples."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def right(model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
    """Count how many of a batch are right."""
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).sum()}, len(labels)


def run(batch: int, is_scaled: bool, options: argparse.Namespace, data: TensorDataset, test: TensorDataset) -> Point:
    """Train with a global `batch`; the same on every rank."""
    with paceline.set_seed(0):
        model = paceline.DistributedDataParallel(network())
    rate = scaled_lr(options.lr, "linear" if is_scaled else "none", batch, BATCHES[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=1e-4)
    steps = options.epochs * -(-len(data) // batch)
    schedule = partial(
        lr_factor, warmup_steps=int(WARM_UP * steps) if is_scaled else 0, decay="linear", total_steps=steps
    )
    config = TrainConfig(options.epochs, show_progress=False)
    loader = DataLoader(data, batch_size=batch, shuffle=True, seed=0)
    evaluation = Evaluation(DataLoader(test, batch_size=1000), right, ("accuracy",))
    try:
        result = Trainer(model, optimizer, summed_loss, loader, config, evaluation, LambdaLR(optimizer, schedule)).fit()
    except NonFiniteGradient:  # on every rank, because all have the same gradient
        return Point(batch, is_scaled, rate, None, 0, 0.0)
    return Point(batch, is_scaled, rate, result.metrics["accuracy"], result.steps, result.seconds)


def plot(points: list[Point], path: str) -> None:
    """Draw accuracy against the logarithm of the batch; runs that diverged lie on the axis."""
    figure = new_figure(7, 4)
    axes = figure.add_subplot(xlabel="global batch", ylabel="accuracy", xscale="log")
    axes.set_xticks(BATCHES, [f"{batch:,}" for batch in BATCHES], minor=False)
    axes.minorticks_off()
    for is_scaled, name in RULES.items():
        line = [point for point in points if point.is_scaled is is_scaled]
        axes.plot([point.batch for point in line], [point.accuracy or 0.0 for point in line], "o-", label=name)
    axes.legend(frameon=False)
    write_chart("--plot", path, figure)


def main() -> None:
    """Train once for every batch size and rule, and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder with MNIST's four idx files, plain or .gz.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05, help="Learning rate of batch 32. Default 0.05.")
    parser.add_argument("--limit", type=int, help="Train on so many images only, the first ones.")
    parser.add_argument("--plot", metavar="FILE", help="Draw accuracy against batch there (.svg, .png, .pdf).")
    options = parser.parse_args()
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        if not any((options.data / f"{part}-ubyte{end}").exists() for end in ("", ".gz")):
            parser.error(
                f"{options.data} has no {part}-ubyte, plain or .gz; give --data the folder of MNIST's four files"
            )
    try:
        check_chart("--plot", options.plot)
    except UsageError as error:
        parser.error(str(error))
    points = []
    with paceline.init() as world:
        data, held_out = read(options.data, "train", options.limit), read(options.data, "t10k")
        for batch in (each for each in BATCHES if each <= len(data)):
            for is_scaled, rule in RULES.items():
                point = run(batch, is_scaled, options, data, held_out)
                points.append(point)
                said = "diverged" if point.accuracy is None else f"{point.accuracy:.4f}"
                world.print(f"batch {batch:>5}, {rule:<20} accuracy {said:>8}   {point.seconds:6.1f} s", flush=True)
        if world.is_main:
            table = Table("global batch", "steps", *RULES.values(), "rate of the rule")
            for plain, scaled in zip(points[::2], points[1::2], strict=True):
                shown = ["diverged" if each.accuracy is None else f"{each.accuracy:.4f}" for each in (plain, scaled)]
                table.add_row(f"{plain.batch:,}", f"{plain.steps:,}", *shown, f"{scaled.lr:g}")
            Console().print(table)
            print("kept in", save("mnist-batch-sweep", [asdict(point) for point in points]))
            if options.plot:
                plot(points, options.plot)


if __name__ == "__main__":
    main()
