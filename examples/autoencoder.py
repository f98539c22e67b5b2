"""The autoencoder of Lightning's README with Paceline's Trainer, on the digits that come with scikit-learn.

python examples/autoencoder.py                              one process
paceline run --nproc 2 examples/autoencoder.py              two ranks, same loss

docs/trainer.md shows this script next to Lightning's. Tests on GPUs: docs/gpu-status.md.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import paceline
from paceline.data import DataLoader
from paceline.train import Evaluation, TrainConfig, Trainer

world = paceline.init()
with paceline.set_seed(0):
    encoder = nn.Sequential(nn.Linear(8 * 8, 128), nn.ReLU(), nn.Linear(128, 3))
    decoder = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 8 * 8))
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32, device=world.device)
    train, val = images[torch.randperm(len(images))].split(1500)


def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """Return the summed squared error of a batch, and its number of pixels."""
    return F.mse_loss(model(x), x, reduction="sum"), x.numel()


model = paceline.DistributedDataParallel(nn.Sequential(encoder, decoder).to(world.device))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
evaluation = Evaluation(DataLoader(val, 99), lambda module, x: ({"loss": loss(module, x)[0]}, x.numel()), ("loss",))
trainer = Trainer(model, optimizer, loss, DataLoader(train, 50, shuffle=True), TrainConfig(epochs=20), evaluation)
world.print(f"loss {trainer.fit().metrics['loss']:.6f}")
world.close()
