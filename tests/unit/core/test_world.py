from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.core import world
from paceline.core.stores import is_one_host
from paceline.core.torch_distributed import get_default_store
from paceline.core.world import World, current, init
from paceline.errors import CommunicationError, UsageError, WorldError
from processes import paceline
from ranks import Ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
COMPLETE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "0"}, "the environment has RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({**COMPLETE, "RANK": "x"}, "RANK='x' is not a whole number"),
        ({**COMPLETE, "LOCAL_RANK": "y"}, "LOCAL_RANK='y' is not a whole number"),
        ({**COMPLETE, "RANK": "1"}, "RANK=1 is not in 0..0 (WORLD_SIZE=1)"),
        ({**COMPLETE, "RANK": "-1"}, "RANK=-1 is not in 0..0"),
    ],
)
def test_a_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], text: str) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError) as caught:
        init()
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(("has_gpu", "shown"), [(False, "cpu:paceline"), (True, "cpu:paceline,cuda:paceline")])
def test_backends_are_named_for_available_devices(has_gpu: bool, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a GPU, a notebook showed ranks «cpu, cpu:paceline,cuda:paceline».
    monkeypatch.setattr(world.dist, "get_backend_config", lambda: "cpu:paceline,cuda:paceline")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert world.usable_backends() == shown


def test_without_an_environment_the_world_is_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import torch.distributed as dist
import paceline
with paceline.init(timeout=30) as world:
    assert paceline.init() == world
    world.print(world.rank, world.size, world.local_rank, world.local_size, world.node, world.device, world.is_main)
    world.barrier()
    with world.main_first() as is_main:
        assert is_main
assert not dist.is_initialized()
world.close()
"""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    done = paceline(tmp_path, program=("-c", code), fork="all")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1 0 1 0 cpu True\n", "")


@pytest.mark.ranks(2)
def test_every_rank_knows_its_place_and_a_second_init_reuses_the_group(world: World) -> None:
    with pytest.raises(WorldError, match="but 'mpi' was requested"):
        init("mpi")
    assert init("paceline") == init(timeout=timedelta(seconds=5)) == world
    rank = int(os.environ["RANK"])
    assert world == World(rank, 2, rank, 2, 0, torch.device("cpu"))
    assert world.is_main == (rank == 0)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # without them, one host is assumed
        del os.environ[name]
    assert current().local_rank == rank
    world.close()
    with pytest.raises(UsageError, match=r"^backend 'carrier-pigeon' "):
        init("carrier-pigeon")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "::1"}, True),
        ({"MASTER_ADDR": "first-host"}, False),
        ({"MASTER_ADDR": "10.0.0.1"}, False),
        ({"MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1"}, False),
    ],
)
def test_a_remote_address_does_not_imply_a_single_host(environment: dict[str, str], expected: bool) -> None:
    # On two hosts torch only needs four variables. With those, Gloo was bound to loopback, and ranks from the other
    # host were refused as foreign connections.
    assert is_one_host({"WORLD_SIZE": "2", **environment}, environment["MASTER_ADDR"]) is expected


PATIENCE = timedelta(seconds=0.3)


def first(world: World, end: str) -> str:
    """Return the outcome on other ranks if rank 0's block takes longer than the timeout, or exits."""
    world.barrier()
    dist.group.WORLD.set_timeout(PATIENCE)  # type: ignore[union-attr]
    get_default_store().set_timeout(PATIENCE)
    if world.is_main and end == "absent":
        return ""
    try:
        with world.main_first() as is_main:
            if is_main:
                time.sleep(3 * PATIENCE.total_seconds())
                if end == "exit":
                    os._exit(0)
    except CommunicationError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        ("", "done"),
        ("exit", r"rank 1: in World.main_first\(\), which every rank must call: rank 0 \(pid \d+\) has exited; see"),
        ("absent", r"rank 1: in World.main_first\(\), which every rank must call: rank 0 did not arrive within 0.3 s"),
    ],
)
def test_ranks_wait_for_main_first_while_rank_0_is_running(end: str, seen: str) -> None:
    with Ranks(2, 60, "paceline") as ranks:
        ranks.start(first, end)
        assert re.match(seen, ranks.answer(1, 60))
