"""Tests of a wrapper as courses have them: every test starts two processes, which import torch and make a group.

python -m pytest tests/ported/with_spawn.py
"""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from averaging import Averaging
from torch import nn


def setup(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.barrier()
    dist.destroy_process_group()


def build(seed, tied=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    if tied:
        model[2].weight = model[0].weight
    model[3].bias.requires_grad = False
    return model


def worker_weights_equal(rank, world_size, overlap):
    setup(rank, world_size)
    model = Averaging(build(seed=rank), overlap)
    for value in model.state_dict().values():
        everyone = [torch.empty_like(value) for _ in range(world_size)]
        dist.all_gather(everyone, value)
        assert all(torch.equal(value, other) for other in everyone)
    cleanup()


def worker_like_one_process(rank, world_size, overlap, tied):
    setup(rank, world_size)
    alone = build(seed=0, tied=tied)
    model = Averaging(build(seed=rank, tied=tied), overlap)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    torch.manual_seed(1)
    x, y = torch.randn(16, 8), torch.randn(16, 2)
    share = 16 // world_size
    mine = slice(rank * share, (rank + 1) * share)
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        model.finish()
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(alone.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    cleanup()


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_are_equal_at_the_start(overlap):
    mp.spawn(worker_weights_equal, args=(2, overlap), nprocs=2)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_training_is_that_of_one_process(overlap, tied):
    mp.spawn(worker_like_one_process, args=(2, overlap, tied), nprocs=2)
