"""``paceline profile --try``: the best advice that needs no change of code is tried, and what it saves is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.data
from paceline import DistributedDataParallel
from paceline.core.processes.world import World
from paceline.profiler.recording.trial import trying
from paceline.profiler.report.report import Advice
from paceline.tools.profile.profile_command import outcome
from processes import paceline as command
from profiles import made_up
from ranks import run_ranks


def test_loaders_get_the_workers_that_are_tried() -> None:
    data = TensorDataset(torch.zeros(8))
    with trying({"num_workers": 2}):
        made: list[Any] = [DataLoader(data, 4), DataLoader(data, num_workers=1), paceline.data.DataLoader(data, 4)]
        assert [loader.num_workers for loader in made] == [2, 2, 2]
        assert len(list(made[2])) == 2
    assert DataLoader(data).num_workers == 0
    assert DataLoader.__init__.__qualname__ == "DataLoader.__init__"


def buckets(world: World) -> list[int]:
    sizes = []
    for settings in ({"bucket_cap_mb": 0.01}, {}):
        with trying(settings):
            layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
            sizes.append(len(DistributedDataParallel(layers, bucket_cap_mb=25).bucket_layout()))
    return sizes


def test_wrappers_get_the_bucket_size_that_is_tried() -> None:
    for tried, usual in run_ranks(2, buckets):
        assert tried > usual


def updates(world: World, wrap: str) -> list[int]:
    wrapper: Any = DistributedDataParallel if wrap == "paceline" else nn.parallel.DistributedDataParallel
    with trying({"accumulate": 4}):
        model = wrapper(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        changed, synchronized = 0, 0
        for _ in range(8):
            before = model.module.weight.detach().clone()
            model(torch.full((2, 4), 1.0 + world.rank)).sum().backward()
            synchronized += model.require_backward_grad_sync
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            changed += not torch.equal(before, model.module.weight)
    was_restored = "__call__" not in vars(nn.parallel.DistributedDataParallel)
    return [changed, synchronized, was_restored]


@pytest.mark.parametrize(("wrap", "backend"), [("paceline", None), ("torch", "gloo")])
def test_one_batch_in_four_synchronizes_and_updates_while_accumulation_is_tried(wrap: str, backend: str | None) -> None:
    assert run_ranks(2, updates, wrap, backend=backend) == [[2, 2, True]] * 2


def test_the_outcome_tells_what_was_predicted_and_what_was_measured() -> None:
    advice = Advice("data-loading", "", "", 0.5, trial={"num_workers": 2})
    before = made_up(slow=None)
    quicker = made_up(slow=None, samples_per_step=2 * (before.samples_per_step or 0))
    assert outcome(advice, before, quicker).startswith(
        "tried num_workers=2: 50% less time for a sample was predicted, 50% less was measured ("
    )
    assert "100% more was measured" in outcome(advice, quicker, before)
    assert "is not known" in outcome(advice, before, made_up(samples_per_step=None))


SCRIPT = """
import time, torch, paceline
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 30 * 8
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(16)
paceline.init()
model = paceline.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Slow(), batch_size=8):
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_workers_are_tried_by_the_command_and_save_time(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = command(tmp_path, "profile", "--nproc", "2", "--no-operators", "--try", "train.py")
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert "tried num_workers=" in last
    assert "less was measured" in last, "eight workers sleep at once, where one slept"
    assert (tmp_path / "profile" / "try" / "summary.json").is_file()
