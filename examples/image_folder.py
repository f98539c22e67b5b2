"""Train on a folder of images with augmentation, TensorBoard and early stopping, in a plain loop.

paceline run --nproc 2 examples/image_folder.py                    scikit-learn's digits, written as PNG files
paceline run --nproc 2 examples/image_folder.py path/to/images     one subfolder for each class, images of any size
tensorboard --logdir runs/images

Requires Pillow, TensorBoard and scikit-learn: pip install 'paceline[digits,tensorboard]' pillow
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.tensorboard import SummaryWriter

import paceline
from paceline.data import DataLoader
from paceline.train import Evaluation, evaluate

SIDE = 16
"""Width and height of resized images in pixels."""


class Images(Dataset[tuple[Tensor, int]]):
    """Grayscale images in a folder. With `augments`, images are randomly shifted and rotated."""

    def __init__(self, files: list[Path], classes: list[str], augments: bool) -> None:
        self.files, self.classes, self.augments = files, classes, augments

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.open(self.files[index]).convert("L").resize((SIDE, SIDE))
        if self.augments:  # the loader seeds them by epoch, batch and rank
            angle, *shift = (torch.rand(3) * 2 - 1).tolist()
            image = image.rotate(15 * angle, translate=(round(shift[0]), round(shift[1])))
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
        return pixels.unsqueeze(0), self.classes.index(self.files[index].parent.name)


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 digits as PNG files, in one subfolder for each digit."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15.9).astype(np.uint8)).save(folder / str(label) / f"{number:04}.png")


def sums(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return the summed loss and the number of correct predictions of a batch."""
    x, y = batch
    scores = model(x)
    return {"loss": F.cross_entropy(scores, y, reduction="sum"), "accuracy": (scores.argmax(1) == y).sum()}, len(y)


def main() -> None:
    """Train until the validation loss has not improved for three epochs."""
    world = paceline.init()
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/digits-png")
    if world.rank == 0 and len(sys.argv) == 1 and not folder.exists():
        write_digits(folder)
    world.barrier()  # the other ranks read the folder once it is complete
    files = sorted(folder.glob("*/*.*"))
    classes = sorted({file.parent.name for file in files})
    train = Images([file for index, file in enumerate(files) if index % 5], classes, augments=True)
    validation = Images(files[::5], classes, augments=False)
    with paceline.set_seed(0):
        net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, len(classes)),
        )  # fmt: skip
    model = paceline.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(train, batch_size=64, shuffle=True, num_workers=1, persistent_workers=True)
    evaluation = Evaluation(DataLoader(validation, batch_size=128), sums, names=("loss", "accuracy"))
    board = SummaryWriter("runs/images") if world.rank == 0 else None

    best, bad_epochs = float("inf"), 0
    for epoch in range(30):
        for x, y in loader:
            with model.weight(len(y)):
                F.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()
        metrics = evaluate(model, evaluation)
        world.print(f"epoch {epoch}: validation loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.1%}")
        if board is not None:
            for name, value in metrics.items():
                board.add_scalar(f"validation/{name}", value, epoch)
        # The metrics are the same on every rank, so all ranks stop together.
        bad_epochs = 0 if metrics["loss"] < best else bad_epochs + 1
        best = min(best, metrics["loss"])
        if bad_epochs == 3:
            world.print(f"no improvement for 3 epochs: the best validation loss is {best:.3f}")
            break
    if board is not None:
        board.close()
    world.close()


if __name__ == "__main__":
    main()
