"""An ordinary PyTorch script, made data-parallel. Only the lines marked with ## differ.

python examples/plain_loop.py                               one process
paceline run --nproc 2 examples/plain_loop.py               two ranks on this machine
torchrun --standalone --nproc-per-node 2 examples/plain_loop.py     the same
"""

import torch
import torch.nn.functional as F
from torch import nn

import paceline  ##
from paceline.data import DataLoader  ## instead of torch.utils.data's; batch_size is that of all ranks together


def main() -> None:
    world = paceline.init()  ##
    torch.manual_seed(0)
    x = torch.rand(1000, 2) * 2 - 1
    y = (x.norm(dim=1) < 0.8).long()  # inside the circle or not
    data = torch.utils.data.TensorDataset(x, y)

    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = paceline.DistributedDataParallel(net.to(world.device))  ## instead of net.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=64, shuffle=True)

    for epoch in range(20):
        for batch in loader:
            if batch is None:  ## a short last batch may leave this rank without a sample
                model.sync_gradients()  ##
            else:
                inputs, labels = (part.to(world.device) for part in batch)
                with model.weight(len(labels)):  ## the exact mean, also over slices of different size
                    F.cross_entropy(model(inputs), labels, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        accuracy = (model(x.to(world.device)).argmax(1).cpu() == y).float().mean().item()
    world.print(f"{world.size} rank(s): accuracy {accuracy:.3f}")  ## on rank 0 only
    world.close()  ##


if __name__ == "__main__":
    main()
