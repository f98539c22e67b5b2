"""Accelerate and Lightning Fabric on our process group train as they do on Gloo."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm.c10d.process_group import PacelineProcessGroup
from paceline.core.processes.world import World
from ranks import run_ranks


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 2))


def data() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :2].sum(1, keepdim=True).expand(-1, 2)), batch_size=4)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def accelerate(world: World) -> Tensor:
    from accelerate import Accelerator

    # It starts torch.distributed only where there is none, and takes the group that there is as it is.
    os.environ["OMP_NUM_THREADS"] = "1"  # or it warns that it sets it
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == world.size
    module = model()
    module, optimizer, batches = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01), data())
    for inputs, targets in batches:
        with accelerator.accumulate(module):
            accelerator.backward(nn.functional.mse_loss(module(inputs), targets))
            accelerator.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    gathered = accelerator.gather_for_metrics(torch.tensor([float(world.rank)]))
    assert gathered.tolist() == [float(rank) for rank in range(world.size)]
    accelerator.wait_for_everyone()
    return flat(module)


def fabric(world: World) -> Tensor:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=dist.get_backend())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The `srun` command is available")  # on some machines
        lightning = Fabric(accelerator="cpu", devices=world.size, strategy=strategy)
    lightning.launch()
    assert lightning.world_size == world.size
    plain = model()
    module, optimizer = lightning.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    batches = lightning.setup_dataloaders(data())
    for inputs, targets in batches:
        optimizer.zero_grad()
        lightning.backward(nn.functional.mse_loss(module(inputs), targets))
        optimizer.step()
    everyone = lightning.all_gather(torch.tensor([float(world.rank)]))
    assert everyone.flatten().tolist() == [float(rank) for rank in range(world.size)]
    lightning.barrier()
    return flat(module)


def on(world: World, trainer: Callable[[World], Tensor]) -> tuple[bool, Tensor]:
    with warnings.catch_warnings():
        # Theirs, not ours: functions of torch that it is about to rename.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        result = trainer(world)
    return isinstance(dist.group.WORLD, PacelineProcessGroup), result


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [accelerate, fabric])
def test_results_equal_gloos(trainer: Callable[[World], Tensor]) -> None:
    pytest.importorskip("accelerate" if trainer is accelerate else "lightning_fabric")
    ours = run_ranks(2, on, trainer, backend="paceline")
    gloos = run_ranks(2, on, trainer, backend="gloo")
    assert [is_ours for is_ours, _ in ours + gloos] == [True, True, False, False]
    for (_, mine), (_, theirs) in zip(ours, gloos, strict=True):
        assert torch.equal(mine, ours[0][1])
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
