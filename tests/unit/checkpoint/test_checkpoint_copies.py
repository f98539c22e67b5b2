"""`paceline checkpoint verify A B`: copies of a checkpoint are compared, every tensor, bit by bit."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from test_checkpoint_command import Command, command  # noqa: F401
from test_checkpoint_roundtrip import Holder
from torch import nn
from torch.utils.data import TensorDataset

from paceline.checkpoint import Checkpointer
from paceline.core.processes.world import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from twins import Pools

SAMPLES, BATCH = 45, 8


def train(world: World, folder: str, steps: int, resume: bool = False) -> None:
    """Train up to `steps`, saving every fourth."""
    data = TensorDataset(torch.arange(float(SAMPLES)).view(-1, 1), torch.arange(SAMPLES))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, seed=3)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    with Checkpointer(folder, keep=99) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, each in {"model": model, "optimizer": optimizer, "loader": loader}.items():
            checkpointer.register(name, each)
        step = checkpointer.restore() if resume else 0
        while step < steps:
            for batch in loader:
                if batch is None:
                    model.sync_gradients()
                else:
                    model(batch[0]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % 4 == 0:
                    checkpointer.save(step)
                if step >= steps:
                    break


@pytest.fixture
def copies(pools: Pools, tmp_path: Path) -> tuple[Path, Path]:
    pools.run(1, train, str(tmp_path / "a"), 4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def test_equal_copies_pass(copies: tuple[Path, Path], command: Command) -> None:  # noqa: F811
    done = command("verify", *map(str, copies))
    assert (done.code, done.err) == (0, "")
    assert "the copies are equal: every tensor bit by bit" in done.out


def test_a_flipped_bit_is_found_in_its_tensor(copies: tuple[Path, Path], command: Command) -> None:  # noqa: F811
    path = copies[1] / "step-00000004" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    done = command("verify", *map(str, copies))
    assert done.code == 1
    assert "does not have the SHA-256" in done.out
    assert "tensor 'weight' of 'model' differs: from byte 3 of 4" in done.out


def test_runs_that_ended_with_other_bits_differ(pools: Pools, tmp_path: Path, command: Command) -> None:  # noqa: F811
    # Each is whole in itself.
    for fill in (1.0, 2.0):
        with Checkpointer(tmp_path / str(fill)) as checkpointer:
            model = checkpointer.register("model", nn.Linear(2, 1))
            nn.init.constant_(model.weight, 1.0)
            nn.init.constant_(model.bias, fill)
            checkpointer.register("value", Holder({"a": fill}))
            checkpointer.save(1)
    done = command("verify", str(tmp_path / "1.0"), str(tmp_path / "2.0"))
    assert done.code == 1
    assert "tensor 'bias' of 'model' differs" in done.out
    assert "'weight'" not in done.out
    assert "plain values of 'value' differ" in done.out
