"""Three claims of tutorials about data parallelism, tested with torch DDP.

torchrun --standalone --nproc-per-node 2 examples/tutorial_claims.py

1. "Nondeterministic operations make replicas diverge." Each rank adds its own noise to every gradient in backward.
2. "The model must be built with the same seed on every rank." Each rank uses its own seed.
3. "Summing gradients over N ranks, instead of averaging, multiplies the learning rate by N." Weights after ten steps.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LR = 0.01


def train(optimizer_class: Any, *, lr: float = LR, scale: float = 1.0, noise: float = 0.0) -> nn.Module:
    """Train for ten steps; multiply each rank's loss by `scale`, and add relative noise to its gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())  # for batches and noise
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: grad * (1 + noise * torch.randn(grad.shape, generator=generator)))
    model = DistributedDataParallel(net)
    optimizer = optimizer_class(net.parameters(), lr=lr)
    for _ in range(10):
        x = torch.randn(16, 8, generator=generator)
        (scale * nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def weights(net: nn.Module) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def spread(net: nn.Module) -> float:
    """Return the largest difference of a parameter from rank 0's, over all ranks."""
    mine = weights(net)
    first = mine.clone()
    dist.broadcast(first, src=0)
    largest = (mine - first).abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def main() -> None:
    """Print the result for each claim."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("start at least two ranks, with torchrun")
    dist.init_process_group("gloo")
    ranks, lines = dist.get_world_size(), []
    lines.append(
        f"1. with 1% noise in each rank's gradients, replicas differ by {spread(train(torch.optim.SGD, noise=0.01))}"
    )
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(8, 4)
    before = spread(net)
    DistributedDataParallel(net)
    lines.append(
        f"2. built with different seeds, replicas differ by {before:.2f} before wrapping and by {spread(net)} after it"
    )
    for optimizer_class in (torch.optim.SGD, torch.optim.AdamW):
        runs: list[dict[str, float]] = [{}, {"scale": ranks}, {"lr": LR * ranks}]
        averaged, summed, faster = (weights(train(optimizer_class, **options)) for options in runs)
        from_averaged, from_faster = ((summed - other).norm() for other in (averaged, faster))
        lines.append(
            f"3. {optimizer_class.__name__}: between averaging (0) and a learning rate {ranks} times as high (1), "
            f"summing is at {from_averaged / (from_averaged + from_faster):.2f}"
        )
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
