"""Like plain_loop.py, but training continues without losing a completed step if a rank is killed. Only the lines marked
with ## differ from an ordinary PyTorch script. Five of these are not in plain_loop.py, or not marked there.

paceline run --nproc 2 examples/resilient_loop.py    two ranks; if you kill one, no completed step is lost
python examples/resilient_loop.py                    one process; run again to resume from the newest checkpoint
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline  ##
from paceline.data import DataLoader  ## instead of torch.utils.data.DataLoader; batch_size is the total of all ranks


def make() -> tuple[TensorDataset, nn.Module]:
    """Return points in a square, labeled by whether they are inside a circle, and a network that learns the labels."""
    x = torch.rand(1024, 2) * 2 - 1
    y = (x.norm(dim=1) < 0.8).long()
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return TensorDataset(x, y), net


def main() -> None:
    """Train, and print the accuracy."""
    world = paceline.init()  ##
    device = world.device  ## instead of a hard-coded device
    with paceline.set_seed(0):  ## instead of torch.manual_seed(0); all ranks draw the same numbers here
        data, net = make()  ## indented
    checkpointer = paceline.Checkpointer("checkpoints", every=50)  ## on disk every 50 steps, in case all ranks die
    model = checkpointer.register("model", paceline.DistributedDataParallel(net.to(device)))  ## net.to(device)
    optimizer = checkpointer.register("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01))  ##
    loader = checkpointer.register("loader", DataLoader(data, batch_size=64, shuffle=True))  ##

    for _ in range(checkpointer.restore() // len(loader) if checkpointer.steps() else 0, 20):  ## remaining epochs
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            with model.weight(len(labels)):  ## exact mean, even if ranks get different numbers of samples
                F.cross_entropy(model(inputs), labels, reduction="sum").backward()  ## indented; a sum instead of a mean
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()  ## ends the step: state is consistent here

    x, y = data.tensors
    with torch.no_grad():
        accuracy = (model(x.to(device)).argmax(1).cpu() == y).float().mean().item()
    world.print(f"accuracy {accuracy:.3f}")  ## on rank 0 only
    world.close()  ##


if __name__ == "__main__":
    main()
