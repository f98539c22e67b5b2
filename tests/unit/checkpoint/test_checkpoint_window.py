"""Saving in the middle of an accumulation window is refused, because checkpoints do not hold gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Checkpointer, DistributedDataParallel, accumulate
from paceline.core.world import World
from paceline.errors import UsageError
from twins import Pools


def saved(checkpointer: Checkpointer, step: int) -> bool:
    try:
        checkpointer.save(step)
    except UsageError as error:
        message = str(error)
        if "'model' is in the middle of an accumulation window" in message and "save after optimizer.step()" in message:
            return False
        raise
    return True


def saves(world: World, folder: str, module: nn.Module, batch: Any) -> list[bool]:
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with Checkpointer(folder) as checkpointer:
        checkpointer.register("model", model)
        for number, each in enumerate(accumulate(model, [batch] * 5, every=2)):
            model(each).sum().backward()
            if model.do_sync:
                optimizer.step()
                optimizer.zero_grad()
            found.append(saved(checkpointer, number))
        # One rank is inside a window, so all refuse. Then both ways to drop the accumulated gradients.
        for set_to_none in (False, True):
            if world.rank == 0:
                with model.no_sync():
                    model(batch).sum().backward()
            found.append(saved(checkpointer, 10))
            optimizer.zero_grad(set_to_none=set_to_none)
            found.append(saved(checkpointer, 11))
    return found


MODELS = {
    "dense": (nn.Linear(3, 2), torch.ones(4, 3)),
    "sparse": (nn.Embedding(5, 2, sparse=True), torch.tensor([1, 3])),
}


@pytest.mark.parametrize("kind", MODELS)
def test_saving_is_only_allowed_between_windows(pools: Pools, tmp_path: Path, kind: str) -> None:
    # The resumed run skipped the micro-batches whose gradients were lost.
    for found in pools.run(2, saves, str(tmp_path), *MODELS[kind]):
        assert found == [False, True, False, True, True, False, True, False, True]
