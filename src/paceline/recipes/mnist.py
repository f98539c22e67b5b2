"""The mnist recipe: a convolutional network with SyncBatchNorm on MNIST's idx files, and the large-batch experiment.

``--sweep batch`` trains with global batches from 32 to 4,096, with the same learning rate for all of them and with the
linear rule and warm-up of Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import NonFiniteGradient
from paceline.nn import SyncBatchNorm
from paceline.output_files import write_file
from paceline.output_tables import print_table
from paceline.recipes.batch_sweep import Point, draw, sweep_json, sweep_table
from paceline.recipes.configs import SMALLEST_BATCH, MnistConfig
from paceline.recipes.idx_files import read_mnist
from paceline.recipes.image_classification import METRICS, summed_loss, summed_metrics
from paceline.recipes.recipe_report import Report, expect_saved, gather_report, print_report
from paceline.rng import set_seed
from paceline.train import Evaluation, Result, Trainer
from paceline.world import World, init

MEAN, SPREAD = 0.1307, 0.3081  # of MNIST's training pixels
BATCHES = (SMALLEST_BATCH, 64, 128, 256, 512, 1024, 2048, 4096)
WARM_UP = 0.3
"""Share of a run in which the rule's learning rate rises; of 2 epochs, where Goyal et al. take 5 of 90."""
Data = tuple[TensorDataset, TensorDataset]


def load(config: MnistConfig) -> Data:
    """Read the data: images scaled to mean 0 and spread 1, and labels.

    Raises:
        UsageError: if they cannot be read.
    """
    assert config.data is not None
    training, held_out = read_mnist(Path(config.data))
    training = training[0][: config.limit], training[1][: config.limit]
    return TensorDataset(_scaled(training[0]), training[1]), TensorDataset(_scaled(held_out[0]), held_out[1])


def swept(config: MnistConfig) -> Iterator[tuple[int, bool, MnistConfig]]:
    """Yield every batch size, whether the linear rule is followed, and the settings of that run."""
    for batch in BATCHES:
        steps = config.epochs * -(-(config.limit or 60_000) // batch)
        plain = replace(config, batch_size=batch, accumulate=1, warmup_steps=0, lr_scaling="none")
        yield batch, False, plain
        scaled = replace(plain, lr_scaling="linear", base_batch_size=BATCHES[0], warmup_steps=int(WARM_UP * steps))
        yield batch, True, scaled


def _scaled(images: Tensor) -> Tensor:
    return (images.float() / 255 - MEAN) / SPREAD


class MnistNet(nn.Sequential):
    """Three convolutions with BatchNorm and a linear layer: (batch, 1, 28, 28) to (batch, 10) logits."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in ((1, 16), (16, 32), (32, 64)):
            conv = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
            layers += [conv, SyncBatchNorm(after), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 64, 10))


def train_mnist(
    config: MnistConfig, data: Data, world: World, *, show_progress: bool = True
) -> tuple[DistributedDataParallel, Result]:
    """Train on this rank; returns the model and what the Trainer saw."""
    training, held_out = data
    with set_seed(config.seed):
        net = MnistNet()
    model = DistributedDataParallel(net.to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    config = config.fitted(model, summed_loss, lambda rows: training[:rows])
    loader = DataLoader(training, batch_size=config.samples_per_micro_batch, shuffle=True, seed=config.seed)
    evaluation = Evaluation(DataLoader(held_out, batch_size=1000), summed_metrics, METRICS)
    settings = replace(config.train_config(), show_progress=show_progress)
    return model, Trainer(model, optimizer, summed_loss, loader, settings, evaluation).fit()


def sweep(config: MnistConfig, data: Data, world: World) -> list[Point]:
    """Train once for every batch size and rule; every rank returns the same points."""
    points = []
    for batch, is_scaled, settings in swept(config):
        if batch > len(data[0]):
            continue
        try:
            _, result = train_mnist(settings, data, world, show_progress=False)
        except NonFiniteGradient:  # on every rank alike
            accuracy, steps, seconds = None, 0, 0.0
        else:
            accuracy, steps, seconds = result.metrics["accuracy"], result.steps, result.seconds
        rate = settings.lr * (batch / BATCHES[0] if is_scaled else 1)
        points.append(Point(batch, is_scaled, rate, accuracy, steps, seconds))
        if world.is_main:
            said = "diverged" if accuracy is None else f"{accuracy:.4f}"
            rule = "linear rule and warm-up" if is_scaled else "the same rate"
            print(f"batch {batch:>5}, {rule:<24} accuracy {said:>8}   {seconds:6.1f} s", flush=True)
    return points


def main(text: str) -> None:
    """Train on this rank, and print the report on rank 0.

    Raises:
        CheckpointError: at the end, if what was trained could not be saved.
    """
    config = MnistConfig.from_json(text)
    with init(config.backend) as world:
        data = load(config)
        if config.sweep is not None:
            points = sweep(config, data, world)
            if world.is_main:
                print_table(sweep_table(points, world.size))
                write_file("--json", config.json, sweep_json(points, world.size))
                if config.plot is not None:
                    write_file("--plot", config.plot, draw(points))
            return
        model, result = train_mnist(config, data, world)
        report: Report = gather_report(model, result, world)
        if world.is_main:
            print_report("mnist", report, ("accuracy",))
            write_file("--json", config.json, report.to_json())
        expect_saved(result, config.checkpoint_dir)
