"""Ranks that wait for each other in different operations raise long before the timeout; ranks that just wait do not."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel
from paceline.comm import shm_engine
from paceline.core.world import World
from paceline.errors import CommunicationError, DesyncError
from ranks import run_ranks

NAP_S = 0.02
Group = tuple[int, ...]


def join(groups: dict[Group, Any], *ranks: int, count: int = 1) -> None:
    tensor = torch.ones(count)
    dist.all_reduce(tensor, group=groups[ranks])
    assert tensor.eq(len(ranks)).all()


def subgroups(world: World) -> dict[Group, Any]:
    """The groups of two or more ranks."""
    shm_engine._NAP_S = NAP_S  # ranks look for deadlocks often
    every = [ranks for size in range(2, world.size + 1) for ranks in combinations(range(world.size), size)]
    return {ranks: dist.new_group(list(ranks)) for ranks in every}


def train(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def cross(world: World, case: str) -> str:
    """Return the error of ranks that wait for each other."""
    groups, model = subgroups(world), DistributedDataParallel(nn.Linear(3, 2))
    train(model)
    rank, following = world.rank, tuple(sorted((world.rank, (world.rank + 1) % world.size)))
    calls: dict[str, Callable[[], object]] = {
        "an evaluation": lambda: train(model) if rank else dist.all_reduce(torch.ones(1)),
        "a large tensor": lambda: train(model) if rank else dist.all_reduce(torch.ones(3_000_000)),
        "an asynchronous sum": lambda: train(model) if rank else dist.all_reduce(torch.ones(1), async_op=True).wait(),
        "a circle of groups": lambda: join(groups, *following),
    }
    with pytest.raises(DesyncError) as caught:
        calls[case]()
    with pytest.raises(CommunicationError, match="cannot be used any longer, because ranks wait for each other"):
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("case", ["an evaluation", "a large tensor", "an asynchronous sum", "a circle of groups"])
def test_every_deadlocked_rank_names_the_operations(case: str) -> None:
    for rank, message in enumerate(run_ranks(3, cross, case, timeout=60, backend="paceline")):
        assert message.startswith(f"rank {rank}: ranks wait for each other in different operations (rank"), message
        places = re.findall(rf"(ranks? [\d, ]+): [\w ]*all_reduce of [^(]* \({__file__}, line \d+\)", message)
        named = {*re.findall(r"\d", " ".join(places))}
        # Two ranks already form a deadlock without the third. A cycle of groups needs all three.
        third = {"12"[rank == 1]} if "circle" in case else set()
        assert named >= {"0", str(rank)} | third, message
        assert len(named) >= 2, message


def no_deadlock(world: World, seed: int) -> None:
    """Join random groups in the same order on all ranks, often waiting for a late one."""
    groups, order, delays = subgroups(world), random.Random(seed), random.Random(f"{seed} {world.rank}")
    for _ in range(150):
        ranks = order.choice(list(groups))
        count = order.choice([1, 10, 20_000])
        if world.rank in ranks:
            time.sleep(delays.choice([0, 0, 0, 0, 3 * NAP_S]))
            join(groups, *ranks, count=count)
    dist.barrier()


@pytest.mark.parametrize("seed", range(2))
def test_waiting_for_a_late_rank_in_several_groups_is_not_a_deadlock(seed: int) -> None:
    run_ranks(4, no_deadlock, seed, backend="paceline")


def stopped(world: World, pids: Path) -> None:
    """Rank 0 waits for rank 1 and is stopped; meanwhile rank 1 releases it and waits for it in another operation."""
    groups = subgroups(world)
    (pids / str(world.rank)).write_text(str(os.getpid()))
    dist.barrier()
    if world.rank < 2:
        time.sleep(world.rank * 20 * NAP_S)
        join(groups, 0, 1)
    else:
        time.sleep(10 * NAP_S)
        os.kill(int((pids / "0").read_text()), signal.SIGSTOP)
        time.sleep(40 * NAP_S)
        os.kill(int((pids / "0").read_text()), signal.SIGCONT)
    join(groups, 0, 1, 2)


def test_a_stopped_rank_that_could_continue_is_not_in_a_deadlock(tmp_path: Path) -> None:
    run_ranks(3, stopped, tmp_path, backend="paceline")


def threads(world: World) -> None:
    """Main threads wait for each other's second thread, which is computing, and vice versa."""
    groups = subgroups(world)
    groups |= {(0, 1, number): dist.new_group() for number in range(2)}

    def run(number: int) -> None:
        for _ in range(20):
            time.sleep(10 * NAP_S * (number == world.rank))
            dist.all_reduce(torch.ones(1), group=groups[0, 1, number])

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    dist.barrier()


def test_threads_waiting_in_separate_groups_are_not_in_a_deadlock() -> None:
    run_ranks(2, threads, backend="paceline")
