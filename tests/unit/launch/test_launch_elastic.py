"""Elastic jobs continue with fewer ranks or hosts and grow again; two launchers on one machine stand in for hosts."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from insides import GPUS, STEPS, Cause, Change, JobReport, Restarts, Slots, StepRecord, record_path
from insides import launch_verdict as verdict
from namespaces import two_hosts
from processes import Running, gone_after, paceline, script, strike

# -- slots ---------------------------------------------------------------------------------------------------------


def after(failures: Sequence[tuple[int | None, float, float]], now: float, slices: int | None = 0) -> tuple[int, ...]:
    """Return the slots of a 4-rank job (minimum 2) after failures given as (rank, duration of the start, time)."""
    four = Slots(4, 2)
    for rank, seconds, at in failures:
        four.failed(rank, seconds, at)
        four.move(slices, at)
    return four.next(slices, now)


TWICE = [(1, 5.0, 100.0), (1, 5.0, 110.0)]


@pytest.mark.parametrize(
    ("failures", "now", "slices", "expected"),
    [
        ([(1, 5, 100)], 100, 0, (0, 1, 2, 3)),  # a single failure is an ordinary restart
        (TWICE, 110, 0, (0, 2, 3)),
        (TWICE, 110, 8, (0, 2)),
        (TWICE, 110, None, (0, 2)),  # a power of two divides any number of virtual ranks
        (TWICE, 709, 8, (0, 2)),
        (TWICE, 710, 8, (0, 1, 2, 3)),
        ([(None, 5, 100), (None, 5, 110)], 110, 0, (0, 1, 2, 3)),  # an error of the script itself
        ([(1, 5, 100), (3, 5, 110), (1, 5, 120)], 120, 0, (0, 2, 3)),
        ([(1, 5, 100), (1, 601, 801)], 801, 0, (0, 1, 2, 3)),  # a long healthy start in between
        # Of three ranks, rank 1 runs at slot 2.
        ([*TWICE, (1, 5, 120), (1, 5, 130)], 130, 0, (0, 3)),
        # Retried, and failed again.
        ([*TWICE, (0, 5, 711), (1, 5, 715)], 715, 0, (0, 2, 3)),
        # Too few slots remain, so all are tried again.
        ([*TWICE, (1, 5, 120), (1, 5, 130), (1, 5, 140), (1, 5, 150)], 150, 0, (0, 1, 2, 3)),
    ],
)
def test_slot_excluded_after_two_consecutive_failures(
    failures: Sequence[tuple[int | None, float, float]], now: float, slices: int | None, expected: tuple[int, ...]
) -> None:
    assert after(failures, now, slices) == expected


def test_no_slot_excluded_without_a_minimum() -> None:
    four = Slots(4)
    assert [four.failed(1, 1, at) for at in range(5)] == [False] * 5
    assert four.move(0, 5.0) is None


@pytest.mark.parametrize("count", [3, 6])
def test_first_failure_keeps_all_ranks_without_a_checkpointer(count: int) -> None:
    """The number was cut to a power of two for possible virtual ranks, and no slot was blamed for it."""
    some = Slots(count, 2)
    some.failed(1, 5, 0.0)
    assert some.move(None, 0.0) is None
    some.failed(1, 5, 1.0)
    why = "slot 1 is left out for 600 s after two failures"
    assert some.move(None, 1.0) == Change(count, count - 1, why)  # not a power of two, so the job has no virtual ranks
    assert some.move(None, 2.0) is None
    assert some.move(None, 601.0) == Change(count - 1, count, "slot 1 is tried again")


def test_replaced_slot_is_reported(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, 9, Slots(4, 2))
    said = [restarts.decide(Cause(is_kill=True, rank=rank)) for rank in (1, 1, 1, 1)]
    assert said[1] is not None
    assert said[1].startswith("restarting with 2 ranks instead of 4 (restart 2 of 9): slot 1 is left out")
    assert said[2] == "restarting all ranks (restart 3 of 9)"
    why = "slots 1, 2 are left out for 600 s after two failures"
    assert said[3] == f"restarting with 2 ranks in other slots (restart 4 of 9): {why}"
    assert restarts.change == Change(2, 2, why)


def test_ranks_use_the_gpus_of_their_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarts = Restarts(tmp_path, 9, Slots(4, 2))
    of_job = {GPUS: "4,5,6,7"}
    assert GPUS not in restarts.environment(of_job)
    for _ in range(2):
        assert restarts.decide(Cause(is_kill=True, rank=1)) is not None
    assert restarts.environment(of_job)[GPUS] == "4,6"
    monkeypatch.delenv(GPUS, raising=False)
    for gpus, shown in ((4, "0,2"), (8, "0,2"), (2, "0,1"), (0, "")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert restarts.environment({})[GPUS] == shown


def test_device_error_is_retried_in_other_slots(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, 9, Slots(2, 1))
    folder = tmp_path / STEPS / "key"
    lost = Cause("AcceleratorError", may_pass=True, rank=1)
    said = []
    for _ in range(3):
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(restarts.size):
            record = StepRecord(record_path(folder, rank), make=True, folder=tmp_path / "checkpoints")
            record.virtual_ranks = 4
            record.complete(5)
        said.append(restarts.decide(lost if restarts.size == 2 else Cause("AcceleratorError", may_pass=True, rank=0)))
        restarts.begin()
    again = "from the beginning, 5 steps back, because no rank could save step 5"
    assert said[:2] == [
        f"restarting all ranks {again} (restart 1)",
        f"restarting with 1 rank instead of 2 {again} (restart 2, 2 of 9 without progress): "
        "slot 1 is left out for 600 s after two failures",
    ]
    assert said[2] is None  # the same error at the same step in another slot


def test_report_lists_each_change_and_its_lost_steps(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = JobReport(str(file), pytest.fail)
    report.note_progress(2, "memory")
    report.restarted(Change(4, 2, "because"))
    [change] = json.loads(file.read_text())["changes"]
    assert (change["from"], change["to"], change["why"], change["steps_redone"]) == (4, 2, "because", None)
    report.note_progress(5, "disk")
    report.restarted()
    report.note_progress(9, "disk")
    report.end(0)
    [change] = json.loads(file.read_text())["changes"]
    assert change["steps_redone"] == 3


# -- whole jobs -----------------------------------------------------------------------------------------------------

TRAIN = """
import hashlib, json, os, sys, time, torch, paceline
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from paceline.core.failpoints import strike

virtual_ranks, wanted, dtype = int(sys.argv[1]) or None, int(sys.argv[2]), torch.float64
world = paceline.init()
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(90, 8, generator=generator, dtype=dtype), torch.randint(0, 4, (90,), generator=generator)
torch.manual_seed(3)
extras = [torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2)] if virtual_ranks else []
net = torch.nn.Sequential(torch.nn.Linear(8, 32), *extras, torch.nn.ReLU(), torch.nn.Linear(32, 4)).to(dtype)
model = paceline.DistributedDataParallel(net, virtual_ranks=virtual_ranks, bucket_cap_mb=0.001)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = paceline.data.DataLoader(TensorDataset(x, y, torch.arange(90)), batch_size=16, shuffle=True, drop_last=True)
checkpointer = paceline.Checkpointer("saved")
for name, part in {"model": model, "optimizer": optimizer, "loader": loader}.items():
    checkpointer.register(name, part)
if checkpointer.steps(): checkpointer.restore()
done = checkpointer.step()

def wait_for_the_others():
    until = time.monotonic() + 60  # only a launcher that never takes the others in needs so long
    while world.size < wanted and "MEET" in os.environ and time.monotonic() < until:
        if checkpointer._recovery.boundary.requests: break
        time.sleep(0.01)

while done < 15:
    for inputs, labels, samples in paceline.accumulate(model, loader, every=None if virtual_ranks else 1):
        folder = f"used/{done + 1}"
        os.makedirs(folder, exist_ok=True)
        for sample in samples.tolist(): open(f"{folder}/{sample}", "w").close()
        with model.weight(len(inputs)):
            F.cross_entropy(model(inputs), labels, reduction="sum").backward()
        if model.do_sync:
            optimizer.step()
            optimizer.zero_grad()
            done = checkpointer.step()
            if 10 <= done <= 13: wait_for_the_others()  # a third kill and a last start have to fit in
            if done == 15: break
checkpointer.close()
digest = hashlib.sha256()
for value in [*net.state_dict().values(), *(v for state in optimizer.state.values() for v in state.values())]:
    digest.update(value.numpy().tobytes())
if world.rank == 0: torch.save(net.state_dict(), "weights.pt")
open(f"end-{world.rank}", "w").write(json.dumps([world.size, digest.hexdigest()]))
"""


def prepare(orders: str) -> None:
    """Set up fault injection, and retry failed slots after one second."""
    strike(orders)
    verdict.REJOIN_S = 1.0


def trained(folder: Path, size: int, virtual_ranks: int, least: int | None = None, orders: str = "") -> dict[str, Any]:
    """Train to completion; return the final states of the ranks, their samples per step, and the report."""
    folder.mkdir()
    arguments = ["run", "--nproc", str(size), "--report", "report.json"]
    if least is not None:
        arguments += ["--min-nproc", str(least)]
    done = paceline(
        folder,
        *(*arguments, script(folder, TRAIN), str(virtual_ranks), str(size)),
        fork="all",
        first=partial(prepare, orders) if orders else None,
        OMP_NUM_THREADS="1",
        **({"MEET": "1"} if orders else {}),
    )
    assert done.returncode == 0, done.stderr
    ends = [json.loads(path.read_text()) for path in sorted(folder.glob("end-*"))]
    used = {step.name: sorted(path.name for path in step.iterdir()) for step in (folder / "used").iterdir()}
    report = json.loads((folder / "report.json").read_text())
    return {"ends": ends, "used": used, "report": report, "stderr": done.stderr}


def sizes(report: dict[str, Any]) -> list[int]:
    changes = report["changes"]
    assert all(one["to"] == other["from"] for one, other in pairwise(changes))
    return [changes[0]["from"], *(change["to"] for change in changes)]


def twice(rank: int, first: tuple[str, int], second: tuple[str, int]) -> str:
    """Return fault orders for the slot of `rank` in two consecutive starts."""
    return "; ".join(f"{what} rank={rank} at={at} start={start}" for start, (what, at) in enumerate([first, second]))


@pytest.mark.slow
def test_random_kills_with_4_2_and_4_ranks_match_a_single_rank_bitwise(tmp_path: Path) -> None:
    single = trained(tmp_path / "one", 1, 8)
    # The last fault strikes while the slot is being retried.
    orders = twice(0, ("bucket", 5), ("forward", 3)) + "; bucket rank=0 at=1 start=3"
    job = trained(tmp_path / "elastic", 4, 8, 2, orders=orders)
    assert job["ends"] == [[4, digest] for _, digest in single["ends"] * 4]
    assert job["used"] == single["used"]
    assert sizes(job["report"]) == [4, 2, 4, 2, 4]
    assert job["report"]["steps_redone"] == 0


@pytest.mark.slow
def test_same_samples_and_means_without_virtual_ranks_and_a_note(tmp_path: Path) -> None:
    single = trained(tmp_path / "one", 1, 0)
    orders = twice(2, ("gate", 3), ("forward", 2))
    job = trained(tmp_path / "elastic", 4, 0, 2, orders=orders)
    assert job["used"] == single["used"]
    assert sizes(job["report"]) == [4, 3, 4]
    weights = [torch.load(tmp_path / name / "weights.pt") for name in ("one", "elastic")]
    for ours, theirs in zip(weights[1].values(), weights[0].values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    assert job["stderr"].count("not with the same bits") == 2


# -- several hosts -----------------------------------------------------------------------------------------------------


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
