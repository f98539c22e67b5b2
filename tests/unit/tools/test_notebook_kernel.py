"""Notebook ranks in a real kernel: cells, mistakes, deaths, endless waits, interrupts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawn import LONG
from notebook_kernels import Kernel, kernel
from processes import alive, gone_after, until

pytestmark = pytest.mark.slow

SHARE = "import torch, torch.distributed as dist"


@pytest.fixture(scope="module")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("notebook")) as running:
        running.run("from paceline.tools.notebook import execution\nexecution.STUCK_S = 1.0")
        yield running


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Kernel:
    """A kernel with the magics loaded, possibly with ranks from the previous test."""
    assert not shared_kernel.run("%load_ext paceline").error  # again, because a test may have restarted the kernel
    return shared_kernel


@pytest.fixture
def ranks(notebook: Kernel) -> Kernel:
    """The same kernel with two running ranks."""
    if "no ranks are running" in notebook.run("%dist_status").error:
        assert notebook.run("%dist_init --nproc 2").error == ""
    return notebook


def processes(notebook: Kernel) -> list[int]:
    return [int(pid) for pid in re.findall(r"process (\d+)", notebook.run("%dist_status").text)]


def test_cells_without_ranks_and_impossible_starts_are_refused_in_one_line(notebook: Kernel) -> None:
    notebook.run("%dist_shutdown")
    for cell in ("x = 1", "%%rank [0]\n1", "%sync", "%dist_status", "%dist_shutdown", "%pull x from 0"):
        assert notebook.run(cell).error == (
            "UsageError: no ranks are running; start them with %dist_init --nproc 2, or begin the cell with %%local to "
            "run it here"
        )
    assert notebook.run("%%local\n40 + 2").values == ["42"]
    refused = {"--backend nonsense": "'nonsense' is not available in this PyTorch"}
    for options, message in {**refused, "--timeout -3": "--timeout=-3 must be above 0"}.items():
        error = notebook.run(f"%dist_init --nproc 2 {options}").error
        assert message in error
        assert "\n" not in error


def test_bad_arguments_are_refused_in_one_line(ranks: Kernel) -> None:
    mistakes = {
        "%%rank [7]\n1": "%%rank [7]: rank 7 does not exist; choose from ranks 0 to 1",
        "%pull nothing_of_this_name from 1": "%pull: 'nothing_of_this_name' is not defined on rank 1",
        "%dist_init --nproc 2": "already running on 2 ranks; run %dist_shutdown first",
    }
    for cell, message in mistakes.items():
        done = ranks.run(cell)
        assert (done.error, done.error_name) == (f"UsageError: {message}", "UsageError")


def test_status_notices_that_a_cell_destroyed_the_process_group(ranks: Kernel) -> None:
    """It kept reporting the initial group."""
    status = ranks.run("%dist_status").lines
    assert status[0].startswith("2 ranks, cpu, ")
    ranks.run("%%rank [1]\nimport torch.distributed as dist\ndist.destroy_process_group()")
    half = ranks.run("%dist_status").lines
    assert half == [*status[:2], f"{status[2]}, in no process group"]
    ranks.run("%%rank [0]\nimport torch.distributed as dist\ndist.destroy_process_group()")
    assert ranks.run("%dist_status").lines == ["2 ranks, in no process group", *status[1:]]
    ranks.run("import paceline\nworld = paceline.init()")
    assert ranks.run("%dist_status").lines == status


def test_output_is_labeled_with_ranks_and_equal_output_appears_once(ranks: Kernel) -> None:
    cell = ranks.run("print('mine', rank)\nprint('ours')\nprint(device, world_size, gpu_id)\nrank * 10")
    assert cell.lines == [
        "rank 0 | mine 0",
        "rank 1 | mine 1",
        "all ranks | ours",
        "all ranks | cpu 2 None",
        "rank 0 | 0",
        "rank 1 | 10",
    ]
    assert ranks.run("rank;").text == ""
    assert ranks.run("%%rank [1]\nprint(rank, end='')").lines == ["rank 1 | 1"]
    long = ranks.run("for i in range(2000): print(i)")
    assert long.lines == [f"all ranks | {i}" for i in range(2000)]
    bar = ranks.run("import sys\nfor i in range(5): print(f'\\r{i}', end='', file=sys.stderr)\nprint(file=sys.stderr)")
    assert bar.lines == ["all ranks | 4"], "a progress bar ends as one line"


def test_cells_share_definitions_and_may_use_await(ranks: Kernel) -> None:
    ranks.run(f"{SHARE}\nclass Net(torch.nn.Linear):\n    pass")
    ranks.run("torch.manual_seed(0)\nnet = Net(2, 2)\nloss = net(torch.ones(1, 2)).sum() + rank")
    assert ranks.run("import asyncio\nawait asyncio.sleep(0)\ntype(net).__name__").lines == ["all ranks | 'Net'"]
    assert ranks.run("%time 1 + 1").lines[-1] == "all ranks | 2"
    assert ranks.run("%pull loss from 1\n%pull rank").error == ""
    assert ranks.run("%%local\nfloat(loss) == int(float(loss)), type(loss).__name__, rank").values == [
        "(False, 'Tensor', [0, 1])"
    ]
    assert "cannot load 'net'" in ranks.run("%pull net from 0").error
    assert ranks.run("%sync").text == "2 ranks synchronized\n"


def test_figures_come_from_the_first_rank(ranks: Kernel) -> None:
    plot = "import matplotlib.pyplot as plt\nplt.plot([0, rank])\nplt.show()\nprint('drawn')"
    cell = ranks.run(plot)
    assert (cell.pictures, cell.text) == (1, "all ranks | drawn\n")
    assert ranks.run("if rank == 1: plt.plot([1, 2])").pictures == 1


def test_error_shows_only_the_traceback_of_the_failed_rank(ranks: Kernel) -> None:
    cell = ranks.run("kept = 5\nif rank == 1:\n    raise ValueError('of rank 1')")
    assert cell.error_name == "ValueError"
    assert cell.error.startswith("rank 1 raised ValueError:\n")
    assert "----> 3     raise ValueError('of rank 1')" in cell.error
    assert "notebook/" not in cell.error  # no frames of Paceline
    assert "rank 0" not in cell.error
    assert ranks.run("1 / 0").error.startswith("all 2 ranks raised ZeroDivisionError:\n")
    assert ranks.run("kept").lines == ["all ranks | 5"]


def test_ranks_waiting_for_a_failed_one_are_interrupted_and_keep_variables(ranks: Kernel) -> None:
    ranks.run(f"{SHARE}\nkept = 6")
    cell = ranks.run("if rank == 1:\n    raise ValueError('alone')\ndist.all_reduce(torch.ones(1))")
    assert "rank 1 raised ValueError:" in cell.error
    assert re.search(r"rank 0 waited in all_reduce\(\) \(In\[\d+\], line 3\) for rank 1, which had raised", cell.error)
    assert cell.error.endswith("create device meshes again; variables are kept")
    again = ranks.run("total = torch.tensor(kept)\ndist.all_reduce(total)\nint(total)")
    assert again.lines == ["all ranks | 12"]


def test_partial_collective_names_the_ranks_not_running_the_cell(ranks: Kernel) -> None:
    ranks.run(SHARE)
    cell = ranks.run("%%rank [0]\ndist.barrier()")
    assert re.search(r"rank 0 waited in barrier\(\) .* for rank 1, which did not run this cell, and was", cell.error)
    assert ranks.run("dist.barrier()").error == ""


def test_kernel_survives_a_killed_rank_and_replaces_it(ranks: Kernel) -> None:
    ranks.run(f"{SHARE}\nkept = 7")
    previous = processes(ranks)
    cell = ranks.run("import os\nif rank == 1:\n    os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(1))")
    assert cell.error_name == "RankDied"
    assert "rank 1 died: signal SIGKILL" in cell.error
    assert "rank 1 restarted without variables" in cell.error
    after = processes(ranks)
    assert after[0] == previous[0]
    assert after[1] != previous[1]
    assert ranks.run("globals().get('kept')").lines == ["rank 0 | 7"]
    assert ranks.run(f"{SHARE}\none = torch.ones(1)\ndist.all_reduce(one)\nint(one)").lines == ["all ranks | 2"]


def test_rank_that_dies_in_training_is_named_with_its_black_box(ranks: Kernel) -> None:
    ranks.run(f"{SHARE}\nimport os, paceline\nmodel = paceline.DistributedDataParallel(torch.nn.Linear(2, 1))")
    cell = ranks.run(
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor step in range(9):\n"
        "    if step == 4 and rank == 0: os.kill(os.getpid(), 9)\n"
        "    model(torch.ones(1, 2)).sum().backward()\n    optimizer.step()"
    )
    assert re.search(r"rank 0 died: signal SIGKILL.*, \d.* into the script's own code of step 5", cell.error)
    assert "rank 1 failed as a result (CommunicationError" in cell.error
    assert "wrap the model again" in ranks.run("%%rank [1]\nmodel(torch.ones(1, 2)).sum().backward()").error


def test_rank_that_dies_between_cells_is_replaced_before_the_next_cell(ranks: Kernel) -> None:
    os.kill(processes(ranks)[1], 9)
    until(lambda: "died (signal SIGKILL" in ranks.run("%dist_status").text)
    cell = ranks.run("print('here')")
    assert cell.lines[0].startswith("rank 1 died since the last cell: signal SIGKILL")
    assert cell.lines[-1] == "all ranks | here"


@pytest.mark.parametrize(
    "wait", ["while True: pass", "import time; time.sleep(90)", "if rank: time.sleep(90)\ndist.all_reduce(one)"]
)
def test_interrupt_stops_all_ranks(ranks: Kernel, wait: str, tmp_path: Path) -> None:
    ranks.run(f"{SHARE}\nimport time\none = torch.ones(1)")
    begins = f"open(f'{tmp_path}/begun-{{rank}}', 'w').close()\n"
    cell = ranks.run(begins + wait, lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    assert cell.error_name == "KeyboardInterrupt"
    assert cell.error.startswith("interrupted: all ranks have stopped\n")
    assert ranks.run("dist.all_reduce(one)\nint(one)").lines == ["all ranks | 2"]


@pytest.mark.parametrize("cell", ["input('name? ')", "import getpass; getpass.getpass()", "breakpoint()", "%debug"])
def test_user_prompts_are_refused(ranks: Kernel, cell: str) -> None:
    ranks.run("1 / 0")  # for %debug
    error = ranks.run(cell).error
    assert error.startswith("all 2 ranks raised UsageError:\n")
    assert error.endswith("UsageError: input() and debuggers do not work on ranks; assign or print values in a cell")


def test_subprocess_of_a_cell_cannot_read_the_kernel_messages(ranks: Kernel) -> None:
    ranks.run("import os\nconnection = get_ipython().display_pub.channel._connection.fileno()")
    assert ranks.run("os.get_inheritable(connection), os.readlink('/proc/self/fd/0')").lines == [
        "all ranks | (False, '/dev/null')"
    ]


def test_kernel_restart_leaves_no_processes(ranks: Kernel) -> None:
    pids = processes(ranks)
    assert all(map(alive, pids))
    ranks.restart()
    gone_after(pids, 60)


@pytest.mark.skipif(not LONG, reason="starts a second kernel; make test-long does")
def test_two_notebooks_have_separate_ranks(ranks: Kernel, tmp_path: Path) -> None:
    ranks.run("whose = 'first'")
    with kernel(tmp_path) as other:
        other.run("%load_ext paceline")
        assert other.run("%dist_init --nproc 4 --backend gloo\nwhose = 'second'").error == ""
        assert ranks.run("whose").lines == ["all ranks | 'first'"]
        assert other.run("whose, world_size").lines == ["all ranks | ('second', 4)"]
