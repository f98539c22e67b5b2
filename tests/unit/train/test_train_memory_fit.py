"""The search for a micro-batch that fits every rank's memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.processes.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.nn import SyncBatchNorm
from paceline.tools.recipes.memory_fit import find_accumulation, is_out_of_memory, next_divisor
from paceline.tools.recipes.training_options import TrainingOptions
from processes import paceline
from twins import Pools


class Small(nn.Module):
    """Has memory for so many rows, on rank 1 only."""

    def __init__(self, limit: int, rank: int, where: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), SyncBatchNorm(4), nn.Dropout(0.5))
        self.limit, self.rank, self.where = limit, rank, where

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        if self.rank == 1 and len(x) > self.limit:
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory")
            out.register_hook(lambda _: _raise(RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")))
        return out


def _raise(error: Exception) -> None:
    raise error


def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    return model(x).square().sum(), len(x)


def broken(model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    raise ZeroDivisionError


def find(world: World, limit: int, where: str) -> Any:
    torch.manual_seed(0)
    module = Small(limit, world.rank, where)
    model = DistributedDataParallel(module)
    before = [buffer.clone() for buffer in module.buffers()], torch.get_rng_state()
    try:
        found: Any = find_accumulation(model, loss, lambda rows: torch.ones(rows, 3), 24)
    except UsageError as error:
        found = str(error)
    assert all(map(torch.equal, module.buffers(), before[0]))
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(part.training for part in module.modules())
    rows = 24 // found // world.size if isinstance(found, int) else 0
    if rows:  # and the model trains as if nothing had happened
        model(torch.ones(rows, 3)).sum().backward()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_ranks_cut_their_batch_where_one_of_them_has_no_memory(pools: Pools, where: str) -> None:
    assert pools.run(2, find, 12, where) == [1, 1]
    assert pools.run(2, find, 7, where) == [2, 2]
    assert pools.run(2, find, 1, where) == [24, 24]


def test_with_nothing_left_to_split_every_rank_says_whose_memory_is_short(pools: Pools) -> None:
    answers = pools.run(2, find, 0, "forward")
    assert all(answer.startswith("rank 1 runs out of memory with a micro-batch of one sample") for answer in answers)


def test_other_errors_are_the_users() -> None:
    with pytest.raises(ZeroDivisionError):
        find_accumulation(nn.Linear(1, 1), broken, torch.ones, 4)


def test_memory_is_tried_in_the_precision_of_the_training() -> None:
    seen = []

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        outputs = model(batch)
        seen.append(outputs.dtype)
        return outputs.sum(), len(batch)

    for precision in ("fp32", "bf16", "fp16"):
        options = TrainingOptions(micro_batch="auto", precision=precision)
        assert options.fitted(nn.Linear(3, 1), loss, lambda rows: torch.ones(rows, 3)) == options
    assert seen == [torch.float32, torch.bfloat16, torch.float16]


def test_divisors_at_least_double() -> None:
    assert [next_divisor(24, each) for each in (1, 2, 3, 4, 8, 12, 24)] == [2, 4, 6, 8, 24, 24, 24]
    assert [next_divisor(7, each) for each in (1, 7)] == [7, 7]


REAL = """
import resource, torch
from paceline.tools.recipes.memory_fit import find_accumulation
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
model(torch.zeros(1, 64)).sum().backward()
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 200 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
loss = lambda model, x: (model(x).square().sum(), len(x))
print(find_accumulation(model, loss, lambda rows: torch.ones(rows, 64), 2**21))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS") or sys.platform != "linux", reason="needs a limit of memory")
def test_a_cpu_that_really_has_no_memory_left_is_recognised(tmp_path: Path) -> None:
    done = paceline(tmp_path, program=("-c", REAL), fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    *notes, found = done.stdout.splitlines()
    assert int(found) >= 8, "a layer's output of the whole batch alone takes 512 MiB"
    assert notes[0].startswith(
        "out of memory on rank 0 with 2097152 samples; the global batch of 2097152 is cut into 2"
    )


def test_only_errors_of_memory_count() -> None:
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
