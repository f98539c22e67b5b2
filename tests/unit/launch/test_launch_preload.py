"""Ranks forked from a process that has imported torch are equivalent to new interpreters.

The tests compare them with ranks that import torch themselves (``PACELINE_PRELOAD=0``).
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import Any

import pytest

from insides import HELD_BACK, ForkServer, fork_client, module_command
from insides import launch_fork_server as fork_server
from paceline.errors import UsageError
from processes import Running, alive, descendants, gone_after, paceline, script, until

SELF = """
import json, os, random, resource, signal, sys, threading, uuid, multiprocessing
import torch, numpy

class OfMain:
    pass

if __name__ == "__main__":
    here = os.getcwd()
    fixed = dict(
        argv=sys.argv, orig_argv=sys.orig_argv, flags=str(sys.flags), path=sys.path,
        main=sorted(vars(sys.modules["__main__"])),
        name=[__name__, __file__, __package__, type(__loader__).__name__], cwd=here, umask=os.umask(0o22),
        command=open("/proc/self/cmdline").read(), open=sorted(set(os.listdir("/proc/self/fd")) - {"3"}),
        signals=[str(signal.getsignal(number)).partition(" at 0x")[0] for number in sorted(signal.valid_signals())],
        kernel=[line for line in open("/proc/self/status")
                if line.startswith(("Sig", "Shd")) and "SigQ" not in line],
        limits=[resource.getrlimit(limit) for limit in range(10)], cores=sorted(os.sched_getaffinity(0)),
        group=os.getpgid(0) == os.getsid(0) == os.getpid(),
        streams=[str(sys.stdin), str(sys.stdout), str(sys.stderr)],
        environment={key: os.environ[key] for key in os.environ if key.startswith(("OMP", "PYTHON", "PACELINE_FORK"))},
        threads=[torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
        main_thread=threading.main_thread().native_id == os.getpid(),
        cuda=[torch.cuda.is_initialized(), torch.get_num_interop_threads()],
        ours=[name for name in sys.modules if name.startswith("_pace") or name.endswith("customize")],
        pickled=str(__import__("pickle").dumps(OfMain)), parent=str(multiprocessing.parent_process()),
    )
    # torch and numpy draw the seeds of their own generators when they are imported
    chance = [torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.rand(), uuid.uuid4().hex]
    chance.append(multiprocessing.current_process().authkey.hex())
    json.dump([fixed, chance], open("rank-" + os.environ["RANK"] + sys.argv[1], "w"))
"""


def observed(folder: Path, rank: int, argument: str) -> Any:
    return json.loads((folder / f"rank-{rank}{argument}").read_text().replace(argument, ""))


@pytest.mark.slow
def test_forked_rank_equals_a_new_interpreter(tmp_path: Path) -> None:
    name = script(tmp_path, SELF)
    for preload, argument in (("1", "by-fork"), ("0", "by-exec")):
        settings = {"PYTHONHASHSEED": "7", "PACELINE_PRELOAD": preload}
        done = paceline(tmp_path, "run", "--nproc", "2", name, argument, **settings)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    chances = []
    for rank in range(2):
        (forked, by_chance), (fresh, _) = observed(tmp_path, rank, "by-fork"), observed(tmp_path, rank, "by-exec")
        forked["threads"][1] = fresh["threads"][1] = 0  # OpenBLAS restarts its threads on demand
        assert forked == fresh
        chances.append(by_chance)
    assert all(first != second for first, second in zip(*chances, strict=True))


def into_a_pipe() -> None:
    """Send the output of the launcher, and so of the fork server, to a pipe."""
    reader, writer = os.pipe()
    os.dup2(reader, 99)  # open, but never read
    os.dup2(writer, 1)


@pytest.mark.slow
def test_one_server_forks_the_ranks_of_every_restart_and_they_know_their_output_file(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import torch, os, sys\n"
        "life = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open('life-' + life, 'a').write(f'{os.getppid()} ')\n"
        "if life == '0': os.kill(os.getpid(), 9)\n"
        "if life == '1': sys.exit(3)\n"
        "print(sys.stdout.seekable(), sys.stdout.write_through, sys.stdout)\n"
        "print(sys.stdout.tell())\n",
    )
    options = ("--nproc", "2", "--max-restarts", "2", "--redirects", "1", "--log-dir", "logs")
    # Importing numpy gives OpenBLAS two threads, which end before a fork.
    done = paceline(tmp_path, "run", *options, name, first=into_a_pipe, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert "failed first (signal SIGKILL" in done.stderr
    assert "restarting all ranks (restart 1 of 2)" in done.stderr
    # The other rank may already have been exiting when the launcher ended it.
    second = r"\(exit code 3\)(, after rank [01] had begun to end)?; restarting all ranks \(restart 2 of 2\)"
    assert re.search(second, done.stderr), done.stderr
    parents = {parent for life in range(3) for parent in (tmp_path / f"life-{life}").read_text().split()}
    assert len(parents) == 1
    line = "True False <_io.TextIOWrapper name='<stdout>' mode='w' encoding='utf-8'>\n"
    logs = [text for log in (tmp_path / "logs").rglob("stdout.log") if (text := log.read_text())]
    assert logs == [f"{line}{len(line)}\n"] * 2


WAITING = (
    "import torch, os, time\nopen(f\"ready-{os.environ['RANK']}\", 'w').write(str(os.getpid()))\ntime.sleep(120)\n"
)


@pytest.mark.slow
def test_ranks_end_with_the_fork_server_and_the_report_states_it(tmp_path: Path) -> None:
    with Running(tmp_path, "run", "--nproc", "2", "--max-restarts", "0", script(tmp_path, WAITING)) as job:
        job.wait_for("ready-0", "ready-1")
        server = descendants(job.process.pid)[0]
        ranks = descendants(server)
        assert len(ranks) == 2
        os.kill(server, signal.SIGKILL)
        gone_after([server, *ranks], 5)
        assert job.wait(20) == 1
        assert "the process that forks the ranks ended (signal SIGKILL), and so did its ranks" in job.stderr
        assert "failed first (signal SIGKILL" in job.stderr


@pytest.mark.slow
def test_processes_end_with_the_launcher_and_the_fork_server_survives_group_signals(tmp_path: Path) -> None:
    with Running(tmp_path, "run", "--nproc", "2", script(tmp_path, WAITING)) as job:
        job.wait_for("ready-0", "ready-1")
        family = job.family()
        assert len(family) == 4
        for number in HELD_BACK:
            os.kill(family[1], number)
        pending = sum(1 << (number - 1) for number in HELD_BACK)
        status = Path(f"/proc/{family[1]}/status")
        until(lambda: int(re.findall(r"ShdPnd:\s*(\w+)", status.read_text())[0], 16) & pending == pending)
        assert len(job.family()) == 4
        job.process.kill()
        gone_after(family, 5)


def test_ctrl_c_ends_the_launcher_during_the_torch_import(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    script(tmp_path, "import time\nopen('importing', 'w')\ntime.sleep(60)", "torch/__init__.py")
    with Running(tmp_path, "run", script(tmp_path, "import torch")) as job:
        job.wait_for("importing")
        family = job.family()
        job.process.send_signal(signal.SIGINT)
        assert job.wait(10) == 130
        assert job.stderr == "interrupted\n"
        assert not list(filter(alive, family))


def test_failing_torch_import_is_reported_as_an_error_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    script(tmp_path, "raise ImportError('half installed')", "torch/__init__.py")
    done = paceline(tmp_path, "run", script(tmp_path, "import sys\nprint('begun')\nimport torch"))
    assert (done.returncode, done.stdout) == (2, "begun\n")
    first, *_, last = done.stderr.splitlines()
    assert first == (
        "note: every rank imports torch itself, because torch cannot be imported here (ImportError: half installed)"
    )
    assert last == "error: rank 0 failed first (exit code 1: ImportError: half installed)"


def test_multithreaded_process_does_not_fork(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    script(tmp_path, text, "torch/__init__.py")
    done = paceline(tmp_path, "run", script(tmp_path, "import torch, os; print(len(os.listdir('/proc/self/task')))"))
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert done.stderr.startswith("note: every rank imports torch itself, because importing it started threads (")


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import os, sys\nprint('hello')", ()),
        ("def main():\n    from torch import nn\nmain()", ("torch",)),
        ("import torch\noptimizer = torch.optim.SGD([], lr=1)", ("torch", "torch._dynamo")),
        ("import paceline", ("torch", "torch._dynamo", *fork_client.LIBRARY)),
        ("from mine import main\nmain()", ("torch", "torch._dynamo")),
    ],
)
def test_modules_needed_by_the_script_are_imported(text: str, modules: tuple[str, ...]) -> None:
    assert fork_client.decide([sys.executable, "-u", "-c", text]).modules == modules


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '4'", "OMP_NUM_THREADS"),
        ('os.environ["TORCH_LOGS"]="+dynamo"', "TORCH_LOGS"),
        ("os.environ.setdefault('MKL_NUM_THREADS', '1')", "MKL_NUM_THREADS"),
        ("os.environ.update({'PYTORCH_CUDA_ALLOC_CONF': 'x'})", "PYTORCH_CUDA_ALLOC_CONF"),
        ("os.putenv('TORCHINDUCTOR_CACHE_DIR', 'x')", "TORCHINDUCTOR_CACHE_DIR"),
        ("environ['TORCHDYNAMO_DISABLE'] = '1'", "TORCHDYNAMO_DISABLE"),
        ("os.environ.update(\n    {'A': '1',\n     'OMP_NUM_THREADS': '1'}\n)", "OMP_NUM_THREADS"),
        ("os.environ |= {'KMP_BLOCKTIME': '0'}", "KMP_BLOCKTIME"),
        ("{name: value for name, value in os.environ.items() if name.startswith(('OMP_', 'X'))}; x = 1", None),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '1'", None),  # read later, at first use of the device
        ("os.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'", None),
        ("if os.environ.get('TORCH_LOGS') == os.getenv('TORCH_LOGS'): pass", None),
        ("start = int(os.environ['TORCHELASTIC_RESTART_COUNT'])", None),
        ("rank = os.environ['OMPI_COMM_WORLD_RANK']", None),
        ("TORCH_VERSION = f(TORCH_VERSION == 1)", None),
        ("env = os.environ\nenv['A'], env['OMP_NUM_THREADS'] = '1', '2'", "OMP_NUM_THREADS"),
        ("os.environ.update(A=str(len('x')), OMP_NUM_THREADS='1')", "OMP_NUM_THREADS"),
        ("os.environ.update(  # (see below)\n    # one\n    OMP_NUM_THREADS = '1')", "OMP_NUM_THREADS"),
    ],
)
def test_script_that_configures_the_torch_import_imports_it_itself(line: str, name: str | None) -> None:
    text = f"import os\n{line}\nimport torch"
    decided = fork_client.decide([sys.executable, "-u", "-c", text])
    assert bool(decided.modules) == (name is None)
    assert (decided.note is not None and name is not None and name in decided.note) == (name is not None)


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "-c", "import torch"],
        ["/other/python", "-u", "-c", "import torch"],
        [sys.executable, "-c", "import torch"],
        [sys.executable, "-u", "-O", "script.py"],
        [sys.executable, "-u"],
    ],
)
def test_other_programs_start_without_preloading(command: list[str]) -> None:
    assert fork_client.decide(command) == fork_client.Preloading()


def test_environment_variable_disables_preloading_for_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    command = module_command("paceline.tools", "recipes.digits")
    assert fork_client.decide(command).modules == ("torch", "torch._dynamo", *fork_client.LIBRARY)
    monkeypatch.setenv(fork_client.SETTING, "0")
    assert fork_client.decide(command) == fork_client.Preloading()
    monkeypatch.setenv(fork_client.SETTING, "no")
    with pytest.raises(UsageError, match="PACELINE_PRELOAD='no' is neither 0 nor 1"):
        fork_client.decide(command)


@pytest.mark.parametrize(
    ("first", "path"), [("-m", [os.getcwd()]), ("-c", [""]), (__file__, [os.path.dirname(__file__)])]
)
def test_imports_search_the_script_folder_first(monkeypatch: pytest.MonkeyPatch, first: str, path: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", [first])
    assert fork_server.first_path() == path


@contextmanager
def connected_to(descriptor: int) -> Iterator[ForkServer]:
    server = ForkServer([], {}, (), print)
    with socket.socket(fileno=descriptor) as server._socket:
        yield server


def with_an_unread_message() -> int:
    """Return a connection to a process that ended before reading its message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(b"not read")
    theirs.close()
    return ours.detach()


def test_fork_server_exit_with_unread_messages_is_not_a_launcher_error() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, connected_to(os.dup(ours.fileno())) as server:
        theirs.send(b'{"pid": 7, "code": 0}')
        server.collect(10.0)
        ours.send(b"not read")
        theirs.close()
        assert server.take_code(7) == 0
    with (
        connected_to(with_an_unread_message()) as server,
        pytest.raises(OSError, match="a rank cannot be started: the fork server ended"),
    ):
        server.fork({}, None, None)


def test_launcher_with_many_open_files_receives_fork_server_messages() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1100:
        pytest.skip("this process may not open as many")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, connected_to(fcntl(ours, F_DUPFD_CLOEXEC, 1100)) as server:
        theirs.send(b'{"pid": 7, "code": 3}')
        server.collect(10.0)
        assert server.take_code(7) == 3
