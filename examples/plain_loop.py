"""An ordinary PyTorch script, made data-parallel. Only the lines marked with ## differ.

python examples/plain_loop.py                               one process
paceline run --nproc 2 examples/plain_loop.py               two ranks on this machine
torchrun --standalone --nproc-per-node 2 examples/plain_loop.py     the same
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
    model = paceline.DistributedDataParallel(net.to(device))  ## instead of net.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=64, shuffle=True)

    for _ in range(20):
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            with model.weight(len(labels)):  ## exact mean, even if ranks get different numbers of samples
                F.cross_entropy(model(inputs), labels, reduction="sum").backward()  ## indented; a sum instead of a mean
            optimizer.step()
            optimizer.zero_grad()

    x, y = data.tensors
    with torch.no_grad():
        accuracy = (model(x.to(device)).argmax(1).cpu() == y).float().mean().item()
    world.print(f"accuracy {accuracy:.3f}")  ## on rank 0 only
    world.close()  ##


if __name__ == "__main__":
    main()
