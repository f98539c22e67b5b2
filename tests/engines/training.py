"""A training for the engine tests that ends with a weights digest and records its progress in files.

From the tenth step on it is slow until a file ``go`` exists, so that tests can intervene.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.core.digests import weights_sha256
from paceline.data import DataLoader

EPOCHS = 15


def main() -> None:
    world = paceline.init()
    with paceline.set_seed(0):
        data = TensorDataset(torch.rand(256, 8), torch.randint(0, 3, (256,)))
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    checkpointer = paceline.Checkpointer("checkpoints", every=1000)
    model = checkpointer.register("model", paceline.DistributedDataParallel(net))
    optimizer = checkpointer.register("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = checkpointer.register("loader", DataLoader(data, batch_size=16, shuffle=True))
    done = checkpointer.restore() if checkpointer.steps() else 0
    world.print(f"begins after step {done} as one of {world.size} ranks")
    for _ in range(done // len(loader), EPOCHS):
        for inputs, labels in loader:
            with model.weight(len(labels)):
                F.cross_entropy(model(inputs), labels, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()
            done = checkpointer.step()
            if done >= 10 and not Path("go").exists():
                Path(f"trains-{world.rank}").touch()
                time.sleep(1)
    checkpointer.close()
    world.print(f"weights {weights_sha256(model)} after step {done}")
    world.close()


if __name__ == "__main__":
    main()
