"""A rank's place in the world, from the environment of a launcher, srun or mpirun."""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from insides import PORTS, _place, adopt, adopted, current, get_default_store, is_one_host, world
from paceline import World, init
from paceline.errors import CommunicationError, UsageError, WorldError
from processes import Running, paceline
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


# -- schedulers --------------------------------------------------------------------------------------------------------


SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[07-08,12]-ib,m1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "4",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SHOWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SRUN, "3 5 1 2 1 n07-ib"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"}, "3 5 3 5 0 127.0.0.1"),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu3,gpu5"}, "3 5 1 2 1 gpu3"),
        (SRUN | {"MASTER_ADDR": "10.0.0.1"}, "3 5 1 2 1 10.0.0.1"),
        (OPEN_MPI, "1 2 1 2 0 127.0.0.1"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "h"},
            "1 2 0 1 1 h",
        ),
        (MPICH, "1 2 1 2 0 127.0.0.1"),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5"}, "3 5 1 2 1 n07-ib"),  # srun --mpi=pmi2
        # mpirun reaches other nodes through srun, whose variables count one helper per node. With those, several ranks
        # got the same rank in a world that was too small.
        (SRUN | OPEN_MPI | {"MASTER_ADDR": "h"}, "1 2 1 2 0 h"),
        (SRUN | MPICH | {"MASTER_ADDR": "h"}, "1 2 1 2 0 h"),
        (SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, ""),
        # Batch scripts export it together with MASTER_ADDR for scripts that read their rank from Slurm.
        (SRUN | {"WORLD_SIZE": "5", "MASTER_ADDR": "10.0.0.1"}, "3 5 1 2 1 10.0.0.1"),
        # Single processes: a batch script in any allocation, a step with one task, torchrun's ranks inside a step.
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, ""),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, ""),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "2"}, ""),
        ({}, ""),
    ],
)
def test_rank_and_world_size_come_from_the_engine(environment: dict[str, str], expected: str) -> None:
    found = adopted(environment)
    assert " ".join(found[name] for name in SHOWN if name in found) == expected
    assert not found or int(found["MASTER_PORT"]) in PORTS


def test_the_port_depends_on_the_step_unless_set() -> None:
    steps = [{"SLURM_PROCID": rank, "SLURM_STEP_ID": step} for rank in "04" for step in "01"]
    assert len({adopted(SRUN | step)["MASTER_PORT"] for step in steps}) == 2
    assert adopted(SRUN | {"MASTER_PORT": "29500"})["MASTER_PORT"] == "29500"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"PMIX_RANK": "2"}, "one of several .PMIX_RANK=2., but their launcher is unknown; set RANK"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "does not report the host of rank 0; set MASTER_ADDR"),
        # On other hosts the list belongs to mpirun's helpers, so each host's ranks would use a different address.
        (SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "does not report the host of rank 0; set MASTER_ADDR"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "cannot be read .SLURM_PROCID='3', .*; set RANK"),
        (SRUN | {"SLURM_NODEID": "7"}, "cannot be read"),
        (SRUN | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4, but srun started 5 processes; unset WORLD_SIZE"),
    ],
)
def test_a_process_with_an_unknown_rank_is_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(WorldError, match=says) as refused:
        adopted(environment)
    assert "\n" not in str(refused.value)


def test_an_unresolvable_first_node_is_refused_immediately() -> None:
    # The ranks retried until their timeout of ten minutes, and each then printed sixty lines of torch's traceback.
    nowhere = SRUN | {"SLURM_STEP_NODELIST": "no-such-node.invalid"}
    with pytest.raises(WorldError, match=r"rank 3: .*first node, 'no-such-node.invalid', .*; set MASTER_ADDR to an ad"):
        adopt(dict(nowhere))
    environment = nowhere | {"MASTER_ADDR": "10.0.0.1"}
    adopt(environment)
    assert (environment["RANK"], environment["MASTER_ADDR"]) == ("3", "10.0.0.1")


SHELL = """
import os, pty, sys
from paceline.core.schedulers import adopt
pid, terminal = pty.fork()
if pid == 0:  # the leader of a session with a terminal, as the shell of srun --pty is
    child = os.fork()
    if child == 0:
        if sys.argv[1] == "typed":
            os.setpgid(0, 0)
        adopt(os.environ)
        print("a rank")
        sys.exit()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
said = b""
try:
    while more := os.read(terminal, 4096):
        said += more
except OSError:
    pass
print(said.decode())
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [("typed", "this shell is one of 5 tasks of srun --pty, .*; use 'paceline run --nproc 5"), ("script", "a rank")],
)
def test_a_command_is_refused_in_a_shell_of_srun_but_not_in_a_script(how: str, says: str, tmp_path: Path) -> None:
    # It silently waited half an hour for three ranks.
    step = {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_PTY_PORT": "40512"}
    done = paceline(tmp_path, how, program=("-c", SHELL), fork="all", **(SRUN | step))
    assert done.returncode == 0
    assert re.search(says, done.stdout)


@pytest.mark.parametrize("more", [{}, {"WORLD_SIZE": "1"}])
def test_a_single_process_is_a_world_of_one_even_if_an_address_is_set(more: dict[str, str]) -> None:
    # A script for any number of tasks was refused with one task: the environment has MASTER_ADDR but not RANK.
    address = {"MASTER_ADDR": "n07", "MASTER_PORT": "29500", **more}
    single = address | SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert _place(single) == {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    with pytest.raises(WorldError, match="but not RANK"):
        _place(address)


PROGRAM = """
import torch, torch.distributed as dist, paceline
with paceline.init() as world:
    total = torch.tensor([1.0 + world.rank])
    dist.all_reduce(total)
    print(world.rank, world.size, world.local_rank, world.local_size, total.item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["srun", "mpirun"])
def test_two_processes_of_an_engine_form_one_world(engine: str, tmp_path: Path) -> None:
    # Each trained separately on all data and printed the accuracy.
    with ExitStack() as stack:
        jobs = []
        for rank in "01":
            step = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
            slurm = SRUN | step | {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_TASKS_PER_NODE": "2"}
            own = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank, "PMIX_NAMESPACE": str(os.getpid())}
            environment = slurm if engine == "srun" else OPEN_MPI | own
            (folder := tmp_path / rank).mkdir()
            jobs.append(stack.enter_context(Running(folder, program=("-c", PROGRAM), fork="all", **environment)))
        assert [job.wait(120) for job in jobs] == [0, 0], [job.stderr for job in jobs]
        assert [job.stdout for job in jobs] == ["0 2 0 2 3.0\n", "1 2 1 2 3.0\n"]
