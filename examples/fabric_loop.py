"""Lightning Fabric with Paceline's wrapper: a strategy with one method.

paceline run --nproc 2 examples/fabric_loop.py                          two ranks on this machine
torchrun --standalone --nproc-per-node 2 examples/fabric_loop.py        the same
srun -K -N 2 python examples/fabric_loop.py                             one rank on each of two Slurm nodes

Fabric wraps a model in ``DDPStrategy.setup_module``. The rest of the strategy works with Paceline's wrapper, because it
is a subclass of torch DDP. Call ``paceline.init()`` first, because Fabric uses the existing process group. On CPUs,
this is Paceline's own group. Fabric reads the rank and world size from torchrun's variables. If srun or mpirun started
the ranks, ``init()`` sets these variables.

Tested with lightning-fabric 2.6 on CPUs (docs/clusters.md). Not tested: precision="bf16-mixed". Tests on GPUs:
docs/gpu-status.md.
"""

from typing import Any

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


class PacelineStrategy(DDPStrategy):
    """The "ddp" strategy with Paceline's wrapper. Keyword arguments are passed to the wrapper."""

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap `module`, which is already on its device."""
        device_ids = [self.root_device.index] if self.root_device.type == "cuda" else None
        return paceline.DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)


def main() -> None:
    """Learn which points of a square are inside a circle, and print the accuracy."""
    world = paceline.init()  # before launch()
    several = world.size > 1
    fabric = Fabric(
        accelerator="cpu" if world.device.type == "cpu" else "cuda",
        devices=world.local_size,  # on each node
        num_nodes=world.size // world.local_size,
        strategy=PacelineStrategy(),
        plugins=TorchElasticEnvironment() if several else LightningEnvironment(),  # overrides Fabric's detection
    )
    fabric.launch()
    with paceline.set_seed(0):
        x = torch.rand(1024, 2) * 2 - 1
        y = (x.norm(dim=1) < 0.8).long()
        net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))

    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))  # 16 per rank
    for _ in range(12):
        for number, (inputs, labels) in enumerate(loader):
            accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                fabric.backward(F.cross_entropy(model(inputs), labels) / 2)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=10.0)
                optimizer.step()
                optimizer.zero_grad()

    with torch.no_grad():
        accuracy = (model.module(x.to(fabric.device)).argmax(1).cpu() == y).float().mean().item()
    world.print(f"accuracy {accuracy:.3f} on {fabric.world_size} ranks")  # fabric.print would print on every node
    world.close()


if __name__ == "__main__":
    main()
