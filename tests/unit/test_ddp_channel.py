"""The channel's collectives, each against the sum or the rows that one process would compute."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.ddp.transport.channel import open_channel
from paceline.world import World
from ranks import run_ranks

LENGTH = 24  # a multiple of every number of ranks here


def values(rank: int) -> torch.Tensor:
    return torch.arange(LENGTH, dtype=torch.float32) * (rank + 1) + 10 * rank


def collectives(world: World) -> tuple[list[float], list[float], list[list[int]], str]:
    channel = open_channel(dist.group.WORLD, torch.device("cpu"))
    flat = channel.allocate(LENGTH, torch.float32)
    flat.copy_(values(world.rank))
    channel.wait(channel.reduce_scatter(flat), "reduce-scatter")
    shard = channel.shard(flat).tolist()
    channel.wait(channel.all_gather(flat), "all-gather")
    table, launched = channel.gather_rows(torch.tensor([world.rank, 2**53 + world.rank]))
    channel.wait(launched, "gathering of rows")
    with pytest.raises(ValueError, match="5 elements cannot be cut into"):
        channel.reduce_scatter(torch.zeros(5))
    return shard, flat.tolist(), table.tolist(), str(channel.all_gather_object("x" * world.rank))


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_and_rows_are_those_of_one_process(ranks: int, backend: str) -> None:
    total = sum((values(rank) for rank in range(ranks)), torch.zeros(LENGTH)).tolist()
    length = LENGTH // ranks
    for rank, (shard, gathered, rows, objects) in enumerate(run_ranks(ranks, collectives, backend=backend)):
        assert shard == total[rank * length : (rank + 1) * length]
        assert gathered == total
        assert rows == [[other, 2**53 + other] for other in range(ranks)]
        assert objects == str(["x" * other for other in range(ranks)])
