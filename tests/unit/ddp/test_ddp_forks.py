"""Forked children, such as DataLoader workers, may free anything without affecting the rank and its peers."""

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

from forked import REAL_END
from insides import channel_of, keep_in_children, storage_of
from paceline import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import CommunicationError
from processes import paceline, script
from twins import Pools

HANGS_S = 60.0


@pytest.fixture(scope="module", params=["paceline", "gloo"])
def either(request: pytest.FixtureRequest) -> Iterator[Pools]:
    with Pools(request.param) as pools:
        yield pools


def run_in_child(function: Callable[[], Any]) -> None:
    """Run `function` in a forked child, which must succeed in time."""
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


def make_trained_model(group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
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


class Cycle:
    """A reference cycle that only the garbage collector frees."""

    def __init__(self, held: Any) -> None:
        self.held, self.me = held, self


def free_in_child(world: World) -> None:
    box: list[Any] = [make_trained_model(), make_trained_model()]

    def delete() -> None:
        box.clear()
        gc.collect()

    def destroy() -> None:
        box.clear()
        dist.destroy_process_group()
        gc.collect()

    def destroy_in_grandchild() -> None:
        run_in_child(destroy)
        delete()

    for how in (delete, destroy, destroy_in_grandchild):
        run_in_child(how)
        for model in box:
            step(model)


@pytest.mark.slow
def test_a_child_may_delete_the_model_and_destroy_the_group(either: Pools) -> None:
    # The child hung: Gloo's destructor waits for a thread that does not exist in a forked child.
    either.run(2, free_in_child)


def collect_in_child(world: World) -> None:
    gc.disable()
    try:
        Cycle(make_trained_model())
        group = dist.new_group([0, 1])
        Cycle(make_trained_model(group))
        dist.destroy_process_group(group)  # still referenced by the wrapper
        del group
        model = make_trained_model()
        run_in_child(gc.collect)
        step(model)
    finally:
        gc.enable()
    gc.collect()
    step(model)


def test_child_may_garbage_collect_wrappers(either: Pools) -> None:
    # The child died with a segmentation fault.
    either.run(2, collect_in_child)


class CollectsFirst(logging.Handler):
    """A handler whose lock logging reinitializes in a child before the fork hooks of groups run."""

    def _at_fork_reinit(self) -> None:
        gc.collect()


class Group:
    """Stands for a process group whose destructor waits for threads that a child does not have."""

    def __init__(self) -> None:
        self.rank, self.me = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.rank:
            os._exit(3)


def collect_in_earlier_hook(world: World) -> None:
    handler = CollectsFirst()
    gc.collect()
    gc.disable()
    try:
        keep_in_children(Group())
        run_in_child(gc.collect)
    finally:
        gc.enable()
        handler.close()


def test_earlier_fork_hook_may_garbage_collect_groups(either: Pools) -> None:
    # In about one of ten runs a DataLoader worker died with a segmentation fault in Gloo's destructor.
    either.run(2, collect_in_earlier_hook)


def write_in_child(world: World) -> None:
    model = make_trained_model()

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

    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for how in (overwrite, free):
        run_in_child(how)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.equal(gradient)
    step(model)


def test_gradient_writes_in_a_child_do_not_reach_the_ranks(either: Pools) -> None:
    # Gradients are in memory that a fork shares.
    either.run(2, write_in_child)


def communicate_in_child(world: World) -> None:
    model = make_trained_model()
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True) if world.rank == 0 else None
    group: Any = dist.group.WORLD

    def use() -> None:
        uses = [lambda: model(torch.ones(2, 3)), model.sync_gradients, lambda: dist.reduce(tensor, 0)]
        if work is not None:
            uses.append(work.wait)
        for use_model in uses:
            with pytest.raises(CommunicationError, match="forked from a rank"):
                use_model()
        model.eval()
        model(torch.ones(2, 3))  # needs no other rank
        group.shutdown()

    run_in_child(use)
    dist.barrier(dist.new_group([0, 1]))
    if world.rank == 1:
        dist.all_reduce(tensor)
    if work is not None:
        work.wait()
    assert tensor.eq(2).all()


def test_communication_from_a_child_is_refused_immediately(pools: Pools) -> None:
    pools.run(2, communicate_in_child)


@pytest.mark.slow
def test_child_may_exit_through_interpreter_shutdown(tmp_path: Path) -> None:
    # Not by os._exit: interpreter shutdown frees all remaining objects.
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
