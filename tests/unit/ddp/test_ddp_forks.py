"""Forked children, as DataLoader workers are: whatever they let go of, the rank and its peers do not notice."""

from __future__ import annotations

import gc
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from forked import REAL_END
from insides import channel_of, storage_of
from paceline.comm.forking import keep_in_children
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import CommunicationError
from processes import paceline, script
from twins import Pools

HANGS_S = 60.0


@pytest.fixture(scope="module", params=["paceline", "gloo"])
def either(request: pytest.FixtureRequest) -> Iterator[Pools]:
    with Pools(request.param) as pools:
        yield pools


def forked(function: Callable[[], Any]) -> None:
    """Run `function` in a forked child, which has to end well, and in time."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + HANGS_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.005)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def trained(group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    step(model)
    return model


def step(model: DistributedDataParallel) -> None:
    model.zero_grad()
    model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    assert gradient.eq(2 * (dist.get_world_size() - 1) / 2).all()


class Tangle:
    """A reference cycle that only the garbage collector ends."""

    def __init__(self, held: Any) -> None:
        self.held, self.me = held, self


def let_go(world: World) -> None:
    box: list[Any] = [trained(), trained()]

    def delete() -> None:
        box.clear()
        gc.collect()

    def destroy() -> None:
        box.clear()
        dist.destroy_process_group()
        gc.collect()

    def destroy_in_grandchild() -> None:
        forked(destroy)
        delete()

    for how in (delete, destroy, destroy_in_grandchild):
        forked(how)
        for model in box:
            step(model)


@pytest.mark.slow
def test_a_child_may_delete_the_model_and_destroy_the_group(either: Pools) -> None:
    # It hung: Gloo's destructor waits for a thread that a forked child does not have.
    either.run(2, let_go)


def garbage(world: World) -> None:
    gc.disable()
    try:
        Tangle(trained())
        group = dist.new_group([0, 1])
        Tangle(trained(group))
        dist.destroy_process_group(group)  # which the wrapper still holds
        del group
        model = trained()
        forked(gc.collect)
        step(model)
    finally:
        gc.enable()
    gc.collect()
    step(model)


def test_a_child_may_collect_wrappers_that_are_garbage(either: Pools) -> None:
    # It ended with a segmentation fault.
    either.run(2, garbage)


class CollectsFirst(logging.Handler):
    """A handler whose lock logging renews in a child, before the hooks of groups run there."""

    def _at_fork_reinit(self) -> None:
        gc.collect()


class Group:
    """Stands for a process group whose destructor waits for its threads, which a child has not."""

    def __init__(self) -> None:
        self.rank, self.me = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.rank:
            os._exit(3)


def garbage_for_an_earlier_hook(world: World) -> None:
    handler = CollectsFirst()
    gc.collect()
    gc.disable()
    try:
        keep_in_children(Group())
        forked(gc.collect)
    finally:
        gc.enable()
        handler.close()


def test_an_earlier_hook_of_a_child_may_collect_groups_that_are_garbage(either: Pools) -> None:
    # Once in some ten runs a DataLoader worker ended with a segmentation fault in Gloo's destructor.
    either.run(2, garbage_for_an_earlier_hook)


def writes(world: World) -> None:
    model = trained()

    def overwrite() -> None:
        model.zero_grad(set_to_none=False)
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()
            parameter.grad.fill_(7)

    def free() -> None:
        for bucket in storage_of(model).buckets:
            channel_of(model).free(bucket.flat)
        channel_of(model).close()

    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for how in (overwrite, free):
        forked(how)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.equal(gradient)
    step(model)


def test_what_a_child_does_to_gradients_does_not_reach_the_ranks(either: Pools) -> None:
    # They lie in memory that a fork shares.
    either.run(2, writes)


class Examples(Dataset[Any]):
    """Holds the model, as datasets that make features do, and drops it in the worker."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model: DistributedDataParallel | None = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.model = None
        gc.collect()
        return index


def loads(world: World) -> None:
    model = trained()
    loader = DataLoader(
        Examples(model), num_workers=2, persistent_workers=True, multiprocessing_context="fork", timeout=HANGS_S
    )
    Tangle(trained())
    for _ in range(2):
        assert sorted(batch.item() for batch in loader) == list(range(8))
        step(model)


@pytest.mark.slow
def test_persistent_workers_may_drop_a_model_that_their_dataset_holds(either: Pools) -> None:
    either.run(2, loads)


def talks(world: World) -> None:
    model = trained()
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True) if world.rank == 0 else None
    own: Any = dist.group.WORLD

    def use() -> None:
        uses = [lambda: model(torch.ones(2, 3)), model.sync_gradients, lambda: dist.reduce(tensor, 0)]
        if work is not None:
            uses.append(work.wait)
        for one in uses:
            with pytest.raises(CommunicationError, match="forked from a rank"):
                one()
        model.eval()
        model(torch.ones(2, 3))  # needs no other rank
        own.shutdown()

    forked(use)
    dist.barrier(dist.new_group([0, 1]))
    if world.rank == 1:
        dist.all_reduce(tensor)
    if work is not None:
        work.wait()
    assert tensor.eq(2).all()


def test_a_child_that_communicates_is_refused_at_once(pools: Pools) -> None:
    pools.run(2, talks)


@pytest.mark.slow
def test_a_child_may_end_as_scripts_do(tmp_path: Path) -> None:
    # Not by os._exit: at the end of the interpreter everything goes that is left.
    text = """
import os, sys, time
import torch, paceline
paceline.init()
model = paceline.DistributedDataParallel(torch.nn.Linear(3, 2))
model(torch.ones(2, 3)).sum().backward()
if (child := os.fork()) == 0:
    sys.exit(0)
deadline = time.monotonic() + 60
while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
    time.sleep(0.01)
if not ended[0]:
    os.kill(child, 9)
assert ended == (child, 0), ended
model(torch.ones(2, 3)).sum().backward()
"""
    done = paceline(tmp_path, "run", "--nproc", "2", script(tmp_path, text), fork="all", **{REAL_END: "1"})
    assert done.returncode == 0, done.stderr
