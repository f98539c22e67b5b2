"""The script of plain_loop.py, except that training continues without a lost step if a rank is killed. Only the lines
marked with ## differ from an ordinary PyTorch script; plain_loop.py lacks five of them, or does not mark them.

paceline run --nproc 2 examples/resilient_loop.py    two ranks: kill one of them, no completed step is lost
python examples/resilient_loop.py                    one process: run it again, from the newest checkpoint
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline  ##
from paceline.data import DataLoader  ## instead of torch.utils.data's; batch_size is that of all ranks together


def make() -> tuple[TensorDataset, nn.Module]:
    """Return points in a square, labeled by whether they are inside a circle, and a network that learns the labels."""
    x = torch.rand(1024, 2) * 2 - 1
    y = (x.norm(dim=1) < 0.8).long()
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return TensorDataset(x, y), net


def main() -> None:
    """Train, and print the accuracy."""
    world = paceline.init()  ##
    device = world.device  ## instead of one chosen by hand
    with paceline.set_seed(0):  ## instead of torch.manual_seed(0); every rank draws the same in here
        data, net = make()  ## indented
    checkpointer = paceline.Checkpointer("checkpoints", every=50)  ## on disk every 50 steps, if all ranks end at once
    model = checkpointer.register("model", paceline.DistributedDataParallel(net.to(device)))  ## net.to(device)
    optimizer = checkpointer.register("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01))  ##
    loader = checkpointer.register("loader", DataLoader(data, batch_size=64, shuffle=True))  ##

    for _ in range(checkpointer.restore() // len(loader) if checkpointer.steps() else 0, 20):  ## the epochs left
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            with model.weight(len(labels)):  ## the exact mean, also over slices of different size
                F.cross_entropy(model(inputs), labels, reduction="sum").backward()  ## indented; a sum, not a mean
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()  ## everything is consistent here

    x, y = data.tensors
    with torch.no_grad():
        accuracy = (model(x.to(device)).argmax(1).cpu() == y).float().mean().item()
    world.print(f"accuracy {accuracy:.3f}")  ## on rank 0 only
    world.close()  ##


if __name__ == "__main__":
    main()
