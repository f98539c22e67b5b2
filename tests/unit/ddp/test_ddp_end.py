"""The end of a rank's process."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked import REAL_END
from processes import paceline, script

SHORT = """
import atexit, os, time, torch, torch.distributed as dist
import pytest

from paceline import DistributedDataParallel

def counted():
    tasks = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    return tasks.count("pt_gloo_runloop")

def runners(expected):  # a thread names itself once it runs
    until = time.monotonic() + 60
    while counted() != expected and time.monotonic() < until:
        time.sleep(0.05)
    return counted()

dist.init_process_group("gloo")
atexit.register(lambda: open(f"runners-{os.environ['RANK']}", "w").write(f"{before} {runners(2)}"))
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.randn(3, 4)).sum().backward()
before = runners(4)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_threads_of_the_wrappers_own_gloo_group_end_before_the_interpreter_does(tmp_path: Path) -> None:
    """One that let go of a tensor while the interpreter ended aborted the rank, after a training that went well."""
    ended = paceline(tmp_path, "run", "--nproc", "2", script(tmp_path, SHORT), fork="all", **{REAL_END: "1"})
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        before, at_exit = map(int, (tmp_path / f"runners-{rank}").read_text().split())
        # The two that are left are of the group that torch made, where the wrapper runs nothing.
        assert (before, at_exit) == (4, 2)
