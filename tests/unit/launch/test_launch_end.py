"""How a job ends from outside: launcher killed, Ctrl-C, SIGTERM. And what it has open while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.rank_processes import RankProcesses
from paceline.launch.root_cause import headline
from processes import Running, gone_after, paceline, script, until

# Rank 0 waits in a collective that the other never joins.
BLOCKED = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
open("ready-" + os.environ["RANK"], "w").close()
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))
time.sleep(120)
"""
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open("told-" + os.environ["RANK"], "w").close())
open("ready-" + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.1)
"""
# Each signal that comes while the process is stopped is for the thread that goes on first.
ASLEEP = """
import os, signal, sys, threading, time
def handle(*_):
    open("told-" + os.environ["RANK"], "w").close()
    sys.exit(9)
signal.signal(signal.SIGTERM, handle)
for _ in range(8):
    threading.Thread(target=lambda: [time.sleep(0.001) for _ in range(10**6)], daemon=True).start()
open("ready-" + os.environ["RANK"], "w").close()
time.sleep(120)
"""
SLACK_S = 20  # on a machine that is busy; the ranks would stay for longer
READY = ("ready-0", "ready-1")


def listening(pids: list[int]) -> list[str]:
    """Addresses, in /proc's hexadecimal, on which one of the processes listens."""
    mine = set()
    for pid in pids:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                mine.add(os.readlink(entry.path))
            except FileNotFoundError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, address, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in mine:
                found.append(address.partition(":")[0])
    return found


def test_nothing_listens_beyond_loopback_and_sigkill_of_the_launcher_ends_blocked_ranks(tmp_path: Path) -> None:
    name = script(tmp_path, BLOCKED)
    with Running(tmp_path, "run", "--nproc", "2", name, fork="all") as job:
        job.wait_for(*READY)
        family = job.family()
        assert len(family) == 3
        addresses = listening(family)
        assert addresses
        loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
        assert set(addresses) <= loopback
        job.process.kill()
        gone_after(family[1:], 5 + SLACK_S)
        assert job.leftovers == []


STUCK_WORKER = """
import os, time, torch
class Stuck(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        open("ready-" + os.environ["RANK"], "w").write(str(os.getpid()))
        time.sleep(1000)
next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=1)))
"""


@pytest.mark.parametrize("preload", ["0", "1"])
def test_sigkill_of_the_launcher_ends_workers_that_are_stuck_and_removes_the_jobs_folder(
    tmp_path: Path, preload: str
) -> None:
    (jobs := tmp_path / "jobs").mkdir()
    of_job = {"PACELINE_JOBS": str(jobs), "PACELINE_PRELOAD": preload}
    with Running(tmp_path, "run", "--nproc", "2", script(tmp_path, STUCK_WORKER), **of_job) as job:
        job.wait_for(*READY)
        family = job.family()
        assert {int((tmp_path / name).read_text()) for name in READY} <= set(family)
        assert any(jobs.iterdir())
        job.process.kill()
        gone_after(family[1:], 5 + SLACK_S)
        until(lambda: not any(jobs.iterdir()))
        assert job.leftovers == []


SHARED = """
import os, multiprocessing.heap, multiprocessing.util, tempfile
usual = os.statvfs
os.statvfs = lambda place: usual("/proc" if place == "/dev/shm" else place)  # without space
assert multiprocessing.heap.Arena._choose_dir(multiprocessing.heap.Arena, 8) == tempfile.gettempdir()
assert multiprocessing.util.get_temp_dir() == os.environ["PACELINE_BLACK_BOX"]
"""


def test_sockets_are_in_the_jobs_folder_and_shared_arrays_that_exceed_dev_shm_are_not(tmp_path: Path) -> None:
    done = paceline(tmp_path, "run", script(tmp_path, SHARED))
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_stubborn_ranks_and_their_children_before_the_grace_is_over_with_code_130(tmp_path: Path) -> None:
    child = """
import subprocess
child = subprocess.Popen(["sleep", "120"])
open("child", "w").write(str(child.pid))
"""
    with Running(tmp_path, "run", script(tmp_path, child + STUBBORN), fork="all") as job:
        job.wait_for("ready-0")
        ranks = job.family()[1:]
        assert int((tmp_path / "child").read_text()) in ranks
        job.process.send_signal(signal.SIGINT)
        gone_after(ranks, 2 + SLACK_S)
        assert job.wait() == 130
        assert job.stderr == "interrupted\n"


def test_a_signal_that_another_thread_took_reaches_a_main_thread_that_sleeps(tmp_path: Path) -> None:
    name = script(tmp_path, ASLEEP)
    with Running(tmp_path, "run", "--nproc", "2", "--shutdown-timeout", "110", name, fork="all") as job:
        job.wait_for(*READY)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert {path.name for path in tmp_path.glob("told-*")} == {"told-0", "told-1"}
        assert "did not end" not in job.stderr


@pytest.mark.slow
def test_after_a_failure_stubborn_ranks_are_gone_before_the_grace_is_over(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists('ready-0'): time.sleep(0.02)\n"
        "    open('failing', 'w').close()\n"
        "    raise ValueError('early')\n" + STUBBORN,
    )
    with Running(tmp_path, "run", "--nproc", "2", name) as job:
        job.wait_for("failing")
        gone_after(job.family()[1:], 5 + SLACK_S)
        assert job.wait() == 2
        assert "rank 1 failed first (exit code" in job.stderr


WORKERS = """
import os, signal, torch
from torch.utils.data import DataLoader
for number, _ in enumerate(DataLoader(torch.ones(16, 4), batch_size=4, num_workers=1)):
    if number == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_of_a_killed_rank_leave_no_folder_behind(tmp_path: Path) -> None:
    done = paceline(tmp_path, "run", "--nproc", "2", script(tmp_path, WORKERS), fork="all")  # looks for files that stay
    assert done.returncode == 1
    assert "rank 1 failed first (signal SIGKILL" in done.stderr


def with_odd_signals() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})


@pytest.mark.parametrize("preload", ["1", "0"], ids=["forked", "spawned"])
def test_a_killed_rank_is_noticed_and_a_signal_obeyed_if_the_parent_ignores_or_blocks_them(
    tmp_path: Path, preload: str
) -> None:
    """The kernel discards exit codes if SIGCHLD is ignored, and a killed rank counted as a success."""
    text = """
import os, sys, time
if os.environ["RANK"] == "1": os.kill(os.getpid(), 9)
time.sleep(60)
"""
    name = script(tmp_path, text)
    done = paceline(tmp_path, "run", "--nproc", "2", name, first=with_odd_signals, PACELINE_PRELOAD=preload)
    assert done.returncode == 1
    assert "rank 1 failed first (signal SIGKILL" in done.stderr
    with Running(tmp_path, "run", script(tmp_path, STUBBORN), first=with_odd_signals, PACELINE_PRELOAD=preload) as job:
        job.wait_for("ready-0")
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("told-0")


def test_a_rank_whose_exit_code_another_wait_took_has_failed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitpid(process.pid, 0)
    ranks = RankProcesses({0: process}, {0: ""}, lambda: None)
    ranks.poll()
    assert ranks.failed() == [0]
    assert headline(ranks.reported_ends()).startswith("rank 0 failed first (exit code unknown, because ")
    ranks.close()
