"""The digits recipe: a small convolutional network on scikit-learn's handwritten digits.

1,797 grey images of 8 × 8 pixels, of which a fifth is held out. Seconds on two cores, so it is the first thing to run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import CheckpointError, MissingExtra, UsageError
from paceline.launch.program import ProgramConfig, option
from paceline.output_files import check_file, write_file
from paceline.recipes.recipe_report import Report, gather_report, print_report
from paceline.rng import set_seed
from paceline.train import Evaluation, Result, TrainConfig, Trainer
from paceline.world import World, init

HELD_OUT = 0.2
LABEL_SMOOTHING = 0.1  # 1,437 images are learnt by heart otherwise: 0.97 instead of 0.99 on the held-out ones


@dataclass(frozen=True)
class DigitsConfig(ProgramConfig):
    """The options of ``paceline train digits``."""

    epochs: int = option(20, "Passes over the training data.")
    batch_size: int = option(32, "Global batch: samples per step, all ranks.")
    lr: float = option(0.1, "Learning rate.")
    seed: int = option(0, "Decides initial weights and the order of samples.")
    accumulate: int = option(1, "Micro-batches per step and rank.")
    checkpoint_dir: str | None = option(None, "Where checkpoints go.", "DIR")
    checkpoint_every: int | None = option(None, "Steps between two checkpoints.")
    resume: bool = option(False, "Go on from the newest checkpoint.")
    allow_changed_settings: bool = option(False, "Resume although settings differ: this run's are taken over.")
    json: str | None = option(None, "Write the results there as JSON.", "FILE")
    backend: str | None = option(None, "Process group: paceline, gloo, nccl, …")

    def check(self) -> None:
        """Refuse what cannot work, before any rank starts.

        Raises:
            UsageError: names the option, its value and the remedy.
            MissingExtra: if scikit-learn is not installed.
        """
        for name in ("epochs", "batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.batch_size % self.accumulate:
            raise UsageError(
                f"--batch-size {self.batch_size} is the whole step's batch and must be a multiple of --accumulate "
                f"{self.accumulate}"
            )
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"--lr must be a finite number greater than 0, not {self.lr}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be at least 0 and below 2**63, not {self.seed}")
        if self.checkpoint_dir == "":
            raise UsageError("--checkpoint-dir must not be empty; name a folder, or leave it out")
        if self.checkpoint_dir is None and self.resume:
            raise UsageError("--resume needs --checkpoint-dir, the folder to resume from")
        if self.allow_changed_settings and not self.resume:
            raise UsageError("--allow-changed-settings is about a checkpoint's settings and needs --resume")
        if self.checkpoint_dir is None and self.checkpoint_every is not None:
            raise UsageError("--checkpoint-every needs --checkpoint-dir, the folder to write to")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise UsageError(f"--checkpoint-every must be at least 1, not {self.checkpoint_every}")
        check_file("--json", self.json)
        if find_spec("sklearn") is None:
            raise MissingExtra("scikit-learn", "digits", "the digits recipe")


class DigitsNet(nn.Sequential):
    """Three convolutions and a linear layer, 30,634 parameters: (batch, 1, 8, 8) to (batch, 10) logits.

    Strides rather than max-pooling: where two of the pooled values are nearly equal, the last bit decides which one
    gets the gradient, and runs with different numbers of ranks part ways.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 2 * 2, 10),
        )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Load training and held-out images, (n, 1, 8, 8) float32 in 0..1, and labels, (n,) int64; always split alike."""
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    images, labels = bundled(return_X_y=True)
    parts = train_test_split(images, labels, test_size=HELD_OUT, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(part / 16.0, dtype=torch.float32).view(-1, 1, 8, 8) for part in parts[:2])
    train_y, test_y = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    """Return the summed cross-entropy of a batch, with smoothed labels, and its number of samples."""
    images, labels = _on_device_of(model, batch)
    loss = F.cross_entropy(model(images), labels, reduction="sum", label_smoothing=LABEL_SMOOTHING)
    return loss, len(labels)


def summed_metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Count how many of a batch are right, and sum their loss."""
    images, labels = _on_device_of(model, batch)
    logits = model(images)
    right = (logits.argmax(1) == labels).sum()
    return {"accuracy": right, "test_loss": F.cross_entropy(logits, labels, reduction="sum")}, len(labels)


def _on_device_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    device = next(model.parameters()).device
    return [part.to(device) for part in batch]


def train_digits(config: DigitsConfig, world: World) -> tuple[Report, Result]:
    """Train on this rank; the report is the same on every rank."""
    train_data, test_data = load_digits()
    with set_seed(config.seed):
        net = DigitsNet().to(world.device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    micro_batch = config.batch_size // config.accumulate
    loader = DataLoader(train_data, batch_size=micro_batch, shuffle=True, seed=config.seed)
    held_out = DataLoader(test_data, batch_size=256)
    settings = TrainConfig(
        epochs=config.epochs,
        accumulate=config.accumulate,
        warmup_steps=10,
        decay="linear",
        checkpoint_dir=config.checkpoint_dir,
        checkpoint_every=config.checkpoint_every,
        resume=config.resume,
        allow_changed_settings=config.allow_changed_settings,
    )
    evaluation = Evaluation(held_out, summed_metrics, ("accuracy", "test_loss"))
    result = Trainer(model, optimizer, summed_loss, loader, settings, evaluation).fit()
    return gather_report(model, result, world), result


def main(text: str) -> None:
    """Train on this rank, and print the report on rank 0.

    Raises:
        CheckpointError: at the end, if what was trained could not be saved.
    """
    config = DigitsConfig.from_json(text)
    with init(config.backend) as world:
        report, result = train_digits(config, world)
        if world.is_main:
            print_report("digits", report, ("accuracy",))
            write_file("--json", config.json, report.to_json())
        if result.steps in result.failed_saves:
            raise CheckpointError(
                f"training has ended at step {result.steps}, but that step is not saved in {config.checkpoint_dir}; "
                "make room there, and --resume goes on from the newest checkpoint"
            )
