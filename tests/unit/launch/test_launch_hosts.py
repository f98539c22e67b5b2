"""Several hosts, played by two launchers on one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from processes import Running, paceline, script


@pytest.mark.slow
def test_two_launchers_make_one_world(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    text = (
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.ones(1)\n"
        "dist.all_reduce(value)\n"
        "open(f'../sum-{dist.get_rank()}', 'w').write(str(value.item()))\n"
        "assert os.environ['GROUP_WORLD_SIZE'] == '2'\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    arguments = ["run", "--nnodes", "2", "--nproc", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    folders = [tmp_path / "host-0", tmp_path / "host-1"]
    for folder in folders:
        folder.mkdir()
        script(folder, text)
    line = [*arguments, "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1", "script.py"]
    with Running(folders[0], *line, fork="all") as first, Running(folders[1], *line, fork="all") as second:
        assert first.wait() == 0, first.stderr
        assert second.wait() == 0, second.stderr
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]


@pytest.mark.slow
def test_a_failure_on_several_hosts_is_reported_like_on_one(tmp_path: Path) -> None:
    name = script(tmp_path, "raise ValueError('bad ${local_rank}')")
    with Running(tmp_path, "run", "--master-addr", "localhost.", "--nnodes", "1", name, fork="all") as job:
        assert job.wait() == 1
        assert "error: rank 0 failed first (exit code 1: ValueError: bad ${local_rank})" in job.stderr


@pytest.mark.slow
def test_a_rank_with_an_exit_code_of_its_own_is_reported_like_on_one_host(tmp_path: Path) -> None:
    # That it was leaving stands where torchelastic's agent looks for its error.
    name = script(tmp_path, "import sys\nsys.exit(3)")
    done = paceline(tmp_path, "run", "--master-addr", "localhost.", "--nnodes", "1", name, fork="all")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "error: rank 0 failed first (exit code 3)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:9", "--rdzv-conf", "is_host=0,read_timeout=1"),
        ("--master-addr", "127.0.0.1", "--master-port", "9", "--node-rank", "1", "--rdzv-conf", "timeout=1"),
    ],
    ids=["c10d", "static"],
)
def test_a_host_that_finds_no_other_says_so_in_a_line(tmp_path: Path, options: tuple[str, ...]) -> None:
    # It was a traceback of 60 lines.
    done = paceline(tmp_path, "run", "--nnodes", "2", *options, script(tmp_path, "pass"), fork="all")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the hosts could not meet at 127.0.0.1:9 (")
    assert "Traceback" not in done.stderr
