"""Ends of a job caused from outside (launcher killed, Ctrl-C, SIGTERM), and the resources a running job holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from insides import RankProcesses, headline
from processes import Running, gone_after, paceline, script, until

# Rank 0 waits in a collective that rank 1 never joins.
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
signal.signal(signal.SIGTERM, lambda *_: open("signaled-" + os.environ["RANK"], "w").close())
open("ready-" + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.1)
"""
# A signal sent to a stopped process is handled by the thread that resumes first.
ASLEEP = """
import os, signal, sys, threading, time
def handle(*_):
    open("signaled-" + os.environ["RANK"], "w").close()
    sys.exit(9)
signal.signal(signal.SIGTERM, handle)
for _ in range(8):
    threading.Thread(target=lambda: [time.sleep(0.001) for _ in range(10**6)], daemon=True).start()
open("ready-" + os.environ["RANK"], "w").close()
time.sleep(120)
"""
SLACK_S = 20  # for a busy machine; without intervention the ranks would run longer
READY = ("ready-0", "ready-1")


def listening(pids: list[int]) -> list[str]:
    """Return the addresses, in hexadecimal as in /proc, of the listening sockets of these processes."""
    mine = set()
    for pid in pids:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                mine.add(os.readlink(entry.path))
            except FileNotFoundError:
                continue
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, address, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in mine:
                addresses.append(address.partition(":")[0])
    return addresses


def test_only_loopback_sockets_and_killed_launcher_ends_blocked_ranks(tmp_path: Path) -> None:
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
def test_killed_launcher_ends_stuck_workers_and_removes_the_job_folder(tmp_path: Path, preload: str) -> None:
    (jobs := tmp_path / "jobs").mkdir()
    of_job = {"PACELINE_JOBS": str(jobs), "PACELINE_PRELOAD": preload}
    with Running(tmp_path, "run", "--nproc", "2", script(tmp_path, STUCK_WORKER), **of_job) as job:
        workers = job.wait_for_pids(*READY)
        family = job.family()
        assert set(workers) <= set(family)
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


def test_sockets_stay_in_the_job_folder_and_oversized_shared_arrays_do_not(tmp_path: Path) -> None:
    done = paceline(tmp_path, "run", script(tmp_path, SHARED))
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_stubborn_ranks_and_children_within_the_grace_period(tmp_path: Path) -> None:
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


def test_sleeping_main_thread_handles_a_signal_delivered_to_another_thread(tmp_path: Path) -> None:
    name = script(tmp_path, ASLEEP)
    with Running(tmp_path, "run", "--nproc", "2", "--shutdown-timeout", "110", name, fork="all") as job:
        job.wait_for(*READY)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert {path.name for path in tmp_path.glob("signaled-*")} == {"signaled-0", "signaled-1"}
        assert "did not end" not in job.stderr


@pytest.mark.slow
def test_failure_ends_stubborn_ranks_within_the_grace_period(tmp_path: Path) -> None:
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
    done = paceline(
        tmp_path, "run", "--nproc", "2", script(tmp_path, WORKERS), fork="all"
    )  # the fixture checks for leftover files
    assert done.returncode == 1
    assert "rank 1 failed first (signal SIGKILL" in done.stderr


def with_odd_signals() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})


@pytest.mark.parametrize("preload", ["1", "0"], ids=["forked", "spawned"])
def test_killed_rank_and_signals_noticed_despite_inherited_signal_settings(tmp_path: Path, preload: str) -> None:
    """If SIGCHLD is ignored, the kernel discards exit codes, and a killed rank counted as a success."""
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
        job.wait_for("signaled-0")


def test_rank_with_a_stolen_exit_code_counts_as_failed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitpid(process.pid, 0)
    ranks = RankProcesses({0: process}, {0: ""}, lambda: None)
    ranks.poll()
    assert ranks.failed() == [0]
    assert headline(ranks.reported_ends()).startswith("rank 0 failed first (exit code unknown, because ")
    ranks.close()
