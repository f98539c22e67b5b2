"""Two launchers on one machine stand in for several hosts."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from namespaces import two_hosts
from processes import Running, gone_after, paceline, script

ELASTIC = """
import hashlib, os, time, torch, paceline
from torch.utils.data import TensorDataset

world = paceline.init()
host = os.environ.get("HOST", "one")
torch.manual_seed(3)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
model = paceline.DistributedDataParallel(net, virtual_ranks=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
loader = paceline.data.DataLoader(data, batch_size=16, shuffle=True)
checkpointer = paceline.Checkpointer(os.path.abspath("../saved-" + host.partition("-")[0]), every=1)
for name, part in {"model": model, "optimizer": optimizer, "loader": loader}.items():
    checkpointer.register(name, part)
done = checkpointer.restore() if checkpointer.steps() else 0
print("from", done, "on", world.size, flush=True)
while done < 12:
    for [x] in paceline.accumulate(model, loader):
        model(x).square().mean().backward()
        if not model.do_sync: continue
        optimizer.step()
        optimizer.zero_grad()
        done = checkpointer.step()
        if done == 4 and host == "two-b" and world.size == 2:
            open("ready", "w").close()
            time.sleep(300)
        until = time.monotonic() + 250
        # Alone it waits for the other host: for the first time, or when that was lost.
        meeting = 9 if os.path.exists("../lost") else 1
        while done == meeting and host != "one" and world.size == 1 and time.monotonic() < until:
            if checkpointer._recovery.boundary.requests: break
            time.sleep(0.01)
        if done == 12: break
checkpointer.close()
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in net.state_dict().values())).hexdigest()
open("digest", "w").write(f"{world.size} {digest}")
"""

IN_NAMESPACE = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
from namespaces import enter
enter(sys.argv.pop(1))
runpy.run_module("paceline", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_lost_and_returning_host_keeps_bits_unchanged(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("one", "a", "b")}
    for folder in folders.values():
        folder.mkdir()
        script(folder, ELASTIC)
    done = paceline(folders["one"], "run", "script.py", fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    with two_hosts() as hosts:
        endpoint = f"{hosts[0][1]}:29400"
        line = ["run", "--nnodes", "1:2", "--nproc", "1", "--max-restarts", "9", "--rdzv-backend", "c10d"]
        line += ["--rdzv-id", "job", "--rdzv-endpoint", endpoint]

        def launched(name: str, host: str) -> Running:
            namespace, address = hosts["ab".index(name)]
            # torchrun does not recognize the store's host by an address that differs from its host name.
            store = f"is_host={int(name == 'a')},last_call_timeout=5"
            arguments = [*line, "--rdzv-conf", store, "--local-addr", address, "script.py"]
            environment = {"HOST": host, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
            program = ("-c", IN_NAMESPACE, str(Path(__file__).parents[2]), namespace)
            return Running(folders[name], *arguments, program=program, fork="nothing", **environment)

        with launched("a", "two-a") as first:
            with launched("b", "two-b") as lost:
                lost.wait_for("ready")
                (tmp_path / "lost").touch()
                family = lost.family()
                lost.process.kill()
                gone_after(family[1:], 10)
            first.wait_until(lambda: first.stdout.endswith(" on 1\n"), "the host that is left does not go on")
            with launched("b", "two-c") as back:
                assert first.wait() == 0, first.stderr
                assert back.wait() == 0, back.stderr
        said = first.stdout
    [_, digest] = (folders["one"] / "digest").read_text().split()
    assert [(folders[name] / "digest").read_text() for name in "ab"] == [f"2 {digest}"] * 2
    assert [line.split()[-1] for line in said.splitlines()][-3:] == ["2", "1", "2"]


FAILS = """
import torch, paceline

world = paceline.init()
if world.rank == 1:
    raise ValueError("the data is wrong")
torch.distributed.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_launchers_exit_with_1_and_torchrun_reports_the_failed_rank(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with ExitStack() as stack:
        jobs = []
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            where = ("--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", port)
            arguments = ("run", *where, script(folder, FAILS))
            jobs.append(stack.enter_context(Running(folder, *arguments, fork="all", GLOO_SOCKET_IFNAME="lo")))
        assert [job.wait() for job in jobs] == [1, 1], jobs[0].stderr + jobs[1].stderr
        lost, raised = (job.stderr.partition("script.py FAILED")[2] for job in jobs)
    assert re.search(r"Root Cause[^=]*rank      : 1 [^=]*ValueError: the data is wrong", raised), jobs[1].stderr
    assert re.search(r"Root Cause[^=]*rank      : 0 [^=]*CommunicationError: ", lost), jobs[0].stderr


UNMET = {
    "c10d": ("--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:9 --rdzv-conf is_host=0,read_timeout=1", 1,
             "error: the hosts could not meet at 127.0.0.1:9 ("),
    "static": ("--master-addr 127.0.0.1 --master-port 9 --node-rank 1 --rdzv-conf timeout=1", 1,
               "error: the hosts could not meet at 127.0.0.1:9 ("),
    "unknown backend": ("--rdzv-backend nope --rdzv-endpoint first:1", 2,
                        "error: torchrun's launcher refuses these options: The rendezvous backend 'nope' is not"),
    "port": ("--rdzv-backend static --rdzv-endpoint first:x", 2,
             "error: torchrun's launcher refuses these options: The port number of the rendezvous endpoint 'first:x'"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("options", "code", "message"), UNMET.values(), ids=UNMET)
def test_hosts_that_cannot_meet_are_reported_in_one_line(tmp_path: Path, options: str, code: int, message: str) -> None:
    # This was a traceback of 60 lines.
    done = paceline(tmp_path, "run", "--nnodes", "2", *options.split(), script(tmp_path, "pass"), fork="all")
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].startswith(message)
    assert "Traceback" not in done.stderr
