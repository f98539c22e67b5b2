"""``paceline run``: the environment of ranks and the blamed rank. For speed, scripts avoid torch where possible."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from forked import REAL_END
from insides import Job, launch, module_command, rank_processes
from processes import Running, paceline, script

ALL_REDUCE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(4) * (dist.get_rank() + 1)
dist.all_reduce(value)
open(f"sum-{dist.get_rank()}", "w").write(str(value.tolist()))
if sys.argv[1:] == ["fail"] and dist.get_rank() == 1:
    raise ValueError("the data is wrong")
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_receive_the_torchrun_environment_and_verbatim_arguments(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import json, os, sys\n"
        "json.dump([dict(os.environ), sys.argv, sys.path, __name__, __file__],"
        " open('rank-' + os.environ['RANK'], 'w'))\n",
    )
    extra = ["--help", "--nproc", "7", "--", "a b", "a$$b${local_rank}", "-x"]
    done = paceline(tmp_path, "run", "--nproc", "2", "--max-restarts", "1", name, *extra, PYTHONPATH="/nowhere")
    assert (done.returncode, done.stdout) == (0, "")
    # `paceline run train.py --nproc 2` silently trained on one rank.
    assert done.stderr == (
        "warning: --nproc 7 after the script's name is passed to the script; to give it to paceline run, write: "
        "paceline run --nproc 7 … script.py\n"
    )
    seen = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    cores = len(os.sched_getaffinity(0))
    for rank, (environment, arguments, path, module, file) in enumerate(seen):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "1",
            "OMP_NUM_THREADS": str(max(1, cores // 2)),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "PYTHONPATH": "/nowhere",
        }
        assert {name: environment[name] for name in expected} == expected
        assert environment["MASTER_PORT"] == seen[0][0]["MASTER_PORT"]
        assert arguments == [name, *extra]
        assert not [entry for entry in path if "launch/rank" in entry]
        assert (module, os.path.basename(file)) == ("__main__", name)


def test_report_names_the_cause_instead_of_the_disconnected_peer(tmp_path: Path) -> None:
    name = script(tmp_path, ALL_REDUCE)
    done = paceline(tmp_path, "run", "--nproc", "2", name, "fail", fork="all")
    assert done.returncode == 2
    shown, _, head = done.stderr.partition("error: ")
    # On a busy machine the launcher may end the rank while it exits; the exit code is then missing.
    assert head.replace("exit code 1: ", "") == "rank 1 failed first (ValueError: the data is wrong)\n"
    assert '  rank 1 |     raise ValueError("the data is wrong")' in shown.splitlines()
    assert "rank 0 also failed" not in shown
    assert "rank 0 |" not in shown
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["[3.0, 3.0, 3.0, 3.0]"] * 2


def test_fatal_signal_is_named(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(60)\n",
    )
    done = paceline(tmp_path, "run", "--nproc", "2", name, fork="all")
    assert done.returncode == 1
    assert done.stderr == "rank 0 was stopped because of rank 1\nerror: rank 1 failed first (signal SIGSEGV)\n"


def test_restart_gets_a_fresh_store_and_can_succeed(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import os, sys\n"
        "from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), is_master=False)\n"
        "life = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open('life-' + life, 'w').write(os.environ['MASTER_PORT'] + ' ' + str(store.check(['mark'])))\n"
        "store.set('mark', 'set')\n"
        "sys.exit(3 if life == '0' else 0)\n",
    )
    done = paceline(tmp_path, "run", "--max-restarts", "2", name, fork="all")
    assert done.returncode == 0
    assert done.stderr == "rank 0 failed first (exit code 3); restarting all ranks (restart 1 of 2)\n"
    (port, had), (new_port, has) = ((tmp_path / f"life-{life}").read_text().split() for life in range(2))
    assert (had, has) == ("False", "False")
    assert port != new_port


def test_concurrent_jobs_with_equal_name_and_port_stay_separate(tmp_path: Path) -> None:
    text = """
        import os, sys, time
        from torch.distributed import TCPStore
        store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        job, rank = sys.argv[1], os.environ["RANK"]
        store.set("rank " + rank, job)
        open(f"{job}-{rank}", "w").close()
        while not all(os.path.exists(f"{name}-{rank}") for name in ("one", "other")):
            time.sleep(0.01)
        sys.exit(any(store.get(f"rank {peer}").decode() != job for peer in range(2)))
    """
    name = script(tmp_path, dedent(text))
    given = ("run", "--nproc", "2", "--rdzv-id", "job", "--master-port", "29500", name)
    with Running(tmp_path, *given, "one", fork="all") as one, Running(tmp_path, *given, "other", fork="all") as other:
        assert (one.wait(), other.wait()) == (0, 0)


def test_user_sitecustomize_and_environment_variables_are_respected(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    script(tmp_path / "site", "import sys; sys.flavour = 'mine'", "sitecustomize.py")
    text = "import os, sys; print('module', sys.flavour, sys.argv[1:]); raise OSError('still recorded')"
    script(tmp_path, text, "hello_ranks.py")
    done = paceline(tmp_path, "run", "-m", "hello_ranks", "--now", PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout == "module mine ['--now']\n", done.stderr
    assert "rank 0 | OSError: still recorded" in done.stderr
    variables = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth7"}  # take precedence
    command = "echo shell $RANK $OMP_NUM_THREADS $GLOO_SOCKET_IFNAME"
    done = paceline(tmp_path, "run", "--no-python", "sh", "-c", command, **variables)
    assert (done.returncode, done.stdout) == (0, "shell 0 3 eth7\n"), done.stderr


@pytest.mark.parametrize("environment", [{}, {"PYTHONSAFEPATH": "1"}])
def test_module_imports_from_pythonpath_but_not_the_current_folder(tmp_path: Path, environment: dict[str, str]) -> None:
    for name in ("random", "runpy", "pkgutil", "typing"):
        script(tmp_path, "raise ImportError('from the working folder')", f"{name}.py")
    (tmp_path / "site").mkdir()
    script(tmp_path / "site", "import random, sys, typing; print(__name__, sys.argv[1:])", "module.py")
    environment = {**os.environ, **environment, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(module_command("module", "a"), cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "__main__ ['a']\n", done.stderr


def test_tee_prints_and_stores_the_output_of_each_rank(tmp_path: Path) -> None:
    name = script(
        tmp_path, "import os, sys\nfor file in sys.stdout, sys.stderr: print('of', os.environ['RANK'], file=file)"
    )
    done = paceline(tmp_path, "run", "--nproc", "2", "--tee", "3", "--role", "rider", name, fork="all")
    assert sorted(done.stdout.splitlines()) == ["[rider0]:of 0", "[rider1]:of 1"]
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}> "}  # torch 2.15 also has an option for it
    options = ("--redirects", "1", "--tee", "2", "--log-dir", "logs")
    done = paceline(tmp_path, "run", "--nproc", "2", *options, name, fork="all", **template)
    assert (done.stdout, sorted(done.stderr.splitlines())) == ("", ["<0> of 0", "<1> of 1"])
    kept = sorted(path.read_text() for path in (tmp_path / "logs").rglob("stdout.log"))
    assert kept == ["of 0\n", "of 1\n"]


# -- the blamed rank ---------------------------------------------------------------------------------------------------


# With four ranks, 7 of 11 deaths blamed the wrong rank: reports about the dead rank were taken for the cause.
DYING = """
import os, signal, sys, torch, torch.distributed as dist
import paceline
backend, place, death = sys.argv[1:]

def die():
    if death == "abort": os.abort()
    if death == "kill": os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)

with paceline.init(backend) as world:
    if place == "backward":
        model = paceline.DistributedDataParallel(torch.nn.Linear(4, 4))
        x = torch.ones(1, 4, requires_grad=True)
        if world.rank == 1: x.register_hook(lambda gradient: die())
        model(x).sum().backward()
    for step in range(3):
        if world.rank == 1 and step == 1:
            die()
        dist.all_reduce(torch.ones(8))
"""
DEATHS = {
    ("paceline", "collective", "abort"): "rank 1 failed first (signal SIGABRT)",
    ("gloo", "collective", "exit"): "rank 1 ended with exit code 0 while the others still needed it, so rank ",
    ("gloo", "backward", "kill"): "rank 1 failed first (signal SIGKILL, which the kernel sends when memory runs out)",
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "headline"), DEATHS.items(), ids=map("-".join, DEATHS))
def test_dead_rank_named_last_with_at_most_one_traceback(
    case: tuple[str, str, str], headline: str, tmp_path: Path
) -> None:
    ending = {REAL_END: "1"} if case[2] == "exit" else {}
    arguments = ("--nproc", "3", "--timeout", "60", script(tmp_path, DYING), *case)
    done = paceline(tmp_path, "run", *arguments, fork="all", **ending)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1].startswith(f"error: {headline}"), done.stderr
    blocks = {line.split()[1] for line in lines if " | " in line}
    # On a busy machine a failed rank may need seconds to exit. Its traceback then appears early, and only once.
    late = set(re.findall(r"^rank (\d) raised this .* and is still running$", done.stderr, re.MULTILINE))
    assert len(blocks - late) <= 1, done.stderr
    assert not re.search(r"^\[rank\d\]:|SIGTERM|^Traceback", done.stderr, re.MULTILINE), done.stderr


def test_errors_raised_while_the_job_stops_are_shown(tmp_path: Path) -> None:
    # Ranks leave their errors to the launcher, which has no failure to report here.
    name = script(
        tmp_path,
        "import signal, time\n"
        "def fail(*_): raise OSError('no room for the last checkpoint')\n"
        "signal.signal(signal.SIGTERM, fail)\n"
        "open('ready', 'w').close()\n"
        "time.sleep(60)\n",
    )
    with Running(tmp_path, "run", name) as job:
        job.wait_for("ready")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert "  rank 0 | OSError: no room for the last checkpoint\nterminated by SIGTERM\n" in job.stderr


def test_traceback_shown_while_the_failed_rank_lingers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # A running thread kept the process alive, and the launcher withheld the error until it ended.
    monkeypatch.setattr(rank_processes, "SLOW_S", 0.2)
    name = script(
        tmp_path,
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1,)).start()\nraise OSError('no data')\n",
    )
    assert launch(Job([sys.executable, str(tmp_path / name)], 1)) == 1
    shown = capfd.readouterr().err.splitlines()
    at = shown.index("rank 0 raised this 0 s ago and is still running")
    assert shown[at - 1] == "  rank 0 | OSError: no data"
    assert shown[-1] == "error: rank 0 failed first (exit code 1: OSError: no data)"
