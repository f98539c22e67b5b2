"""A rank without progress is named with its stacks and the call the other ranks wait in; the job then continues."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from insides import PHASES, SIZE, RankView, Snapshot, hang_detection, hanging, stack_dump, waiting_call
from paceline import errors
from processes import Running, paceline, script, state_of, until

TRAIN = """
import hashlib, os, signal, sys, time, torch, paceline
how, wrapper, backend = [*sys.argv[1:], "paceline", "paceline"][:3]
wrap = torch.nn.parallel.DistributedDataParallel if wrapper == "torch" else paceline.DistributedDataParallel
world = paceline.init(backend)
torch.manual_seed(3 + world.rank)  # ranks with equal inputs get a warning

class Net(torch.nn.Linear):
    def forward(self, x):
        if strikes: hang()
        return super().forward(x)

def hang():
    open("ready", "w").write(str(os.getpid()))
    if how == "spin":
        while True: pass
    if how == "system-call": os.read(os.pipe()[0], 1)
    if how == "stop": os.kill(os.getpid(), signal.SIGSTOP)

strikes = False
model = wrap(Net(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
checkpointer = paceline.Checkpointer("saved")
checkpointer.register("model", model)
checkpointer.register("optimizer", optimizer)
first = checkpointer.restore() if checkpointer.steps() else 0
checkpointer.step()
for step in range(first, 6):
    is_late = step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    strikes = is_late and world.rank == 1 and how not in ("no", "loop", "save")
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_late and world.rank == 0 and how in ("loop", "save"): time.sleep(600)
    if step == 3 and how == "save": checkpointer.save(step + 1)
    checkpointer.step()
checkpointer.close()
digest = hashlib.sha256()
for value in model.parameters(): digest.update(value.detach().numpy().tobytes())
open(f"digest-{world.rank}", "w").write(digest.hexdigest())
"""


def digests(folder: Path) -> set[str]:
    return {(folder / f"digest-{rank}").read_text() for rank in range(2)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert paceline(folder, "run", "--nproc", "2", script(folder, TRAIN), "no", fork="all").returncode == 0
    return digests(folder)


def patient() -> None:
    """Allow ranks on a busy machine enough time to write their stacks."""
    hang_detection.ANSWER_S = 60.0


def less_patient() -> None:
    patient()
    hang_detection.PATIENCE = 4


@pytest.mark.slow
@pytest.mark.parametrize("how", ["system-call", "stop"])
def test_hanging_rank_named_with_stacks_and_result_unchanged(tmp_path: Path, undisturbed: set[str], how: str) -> None:
    options = ("--nproc", "2", "--hang-timeout", "2", "--report", "report.json")
    done = paceline(tmp_path, "run", *options, script(tmp_path, TRAIN), how, fork="all", first=patient)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path) == undisturbed
    said, has_stacks = done.stderr.splitlines(), how != "stop"
    assert any("rank 1 | " in line and "in hang" in line for line in said) is has_stacks, done.stderr
    assert "rank 0: waiting for gradients in step 4" in done.stderr
    what = r"stopped for \d+ s, by SIGSTOP" if how == "stop" else r"no progress for \d+ s, in forward of step 4"
    assert re.search(f"rank 1 hangs: {what}", done.stderr), done.stderr
    assert "from memory (restart 1" in said[-1]
    (failure,) = json.loads((tmp_path / "report.json").read_text())["failures"]
    first = failure["first"]
    assert (first["rank"], first["kind"], first["signal"], first["step"]) == (1, "hang", None, 4)
    assert ("in hang" in first["stacks"]) if has_stacks else first["stacks"] is None
    assert [rank["kind"] for rank in failure["others"]] == ["consequence"]
    assert "in wait" in failure["others"][0]["stacks"]


def test_no_alarm_for_a_pause_shorter_than_the_timeout(tmp_path: Path, undisturbed: set[str]) -> None:
    arguments = ("--hang-timeout", "60", script(tmp_path, TRAIN), "stop")
    with Running(tmp_path, "run", "--nproc", "2", *arguments, fork="all") as job:
        (pid,) = job.wait_for_pids("ready")
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        assert job.wait() == 0
        assert job.stderr == ""
    assert digests(tmp_path) == undisturbed


def test_time_while_the_launcher_is_stopped_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # After SIGCONT, all ranks look as if they had been idle for a long time.
    said: list[str] = []
    watch = hang_detection.HangWatch(tmp_path, 5.0)
    with subprocess.Popen(["sleep", "60"]) as rank:
        rank.send_signal(signal.SIGSTOP)
        until(lambda: state_of(rank.pid) == "T")
        for now, hung in ((1, False), (601, False), (604, False), (605, False), (606, False), (607, True)):
            monkeypatch.setattr(hang_detection, "time", SimpleNamespace(monotonic=lambda now=now: now))
            watch.check({0: rank.pid}, said.append)
            assert bool(said) is hung, now
        assert rank.wait(60) == -signal.SIGKILL
    assert said[0].startswith("rank 0 hangs: stopped for 5 s")


@pytest.mark.slow
def test_rank_that_blocks_the_others_writes_its_stacks_at_their_timeout(tmp_path: Path) -> None:
    options = ("--nproc", "2", "--timeout", "6")  # the timeout also applies to the start
    done = paceline(tmp_path, "run", *options, script(tmp_path, TRAIN), "spin", fork="all", first=patient)
    assert done.returncode == 0, done.stderr
    assert "rank 1 kept the others waiting" in done.stderr
    assert any("rank 1 | " in line and "in hang" in line for line in done.stderr.splitlines()), done.stderr


def sight(
    rank: int,
    phase: str | None,
    still: float,
    stacks: str = "",
    asleep: float = 0.0,
    stopped: float = 0.0,
    steps: int = 3,
    moves: bool = False,
) -> RankView:
    box = None if phase is None else Snapshot(bytearray(SIZE))
    if box is not None and phase is not None:
        box.phase_index, box.steps = PHASES.index(phase), steps
    return RankView(rank, box, "T" if stopped else "S", still, stopped, asleep, stacks, moves)


def stack(*frames: str) -> str:
    """Return the stacks a rank writes: a waiting thread, and the main thread with `frames`, innermost first."""
    lines = [
        f'  File "{place}", line 1 in {name}\n' for place, _, name in (frame.rpartition(" in ") for frame in frames)
    ]
    other = f'Thread 0x01 (most recent call first):\n  File "{STDLIB}/threading.py", line 1 in wait\n\n'
    return "".join([other, "Current thread 0x02 (most recent call first):\n", *lines])


STDLIB, OURS, TORCH = sysconfig.get_path("stdlib"), Path(errors.__file__).parent, "/x/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
SCRIPT = stack("/home/me/train.py in augment", "/home/me/train.py in <module>")
GATHERS = stack(f"{C10D} in all_gather", f"{TORCH}/distributed/c10d_logger.py in wrapper", "/home/me/train.py in main")
SAVES = stack(
    f"{C10D} in all_gather", f"{OURS}/core/consensus.py in gather", f"{OURS}/checkpoint/saving/save.py in capture_all"
)
WRITES = stack(f"{OURS}/checkpoint/saving.py in write", "/home/me/train.py in main")
STATE = stack("/home/me/train.py in state_dict", f"{OURS}/checkpoint/captures.py in own", "/home/me/train.py in main")
BACKWARD = stack(f"{TORCH}/autograd/graph.py in _engine_run_backward", "/home/me/train.py in main")
HOOK = stack("/home/me/train.py in hook", f"{OURS}/ddp/transport/comm_hook.py in wait", "/home/me/train.py in main")
JOINS = stack(f"{STDLIB}/threading.py in join", f"{OURS}/checkpoint/saving.py in join")
ENDS = stack(f"{STDLIB}/threading.py in _shutdown").replace(
    "in wait\n\n", f'in wait\n  File "{OURS}/checkpoint/saving.py", line 1 in write\n\n'
)
SLEEPS = ENDS.replace(f'{STDLIB}/threading.py", line 1 in _shutdown', '/home/me/train.py", line 1 in main')
THREAD = stack(f"{STDLIB}/threading.py in join", "/home/me/train.py in main", f"{OURS}/launch/agent.py in run")

HANGS: dict[str, tuple[list[RankView], tuple[int, ...]]] = {
    "others wait for a rank": ([sight(0, "bucket wait", 11), sight(1, "forward", 12)], (1,)),
    "only briefly": ([sight(0, "bucket wait", 8), sight(1, "forward", 9)], ()),
    "with recent progress": ([sight(0, "bucket wait", 11), sight(1, "forward", 1)], ()),
    "in its own code": ([sight(0, "bucket wait", 11), sight(1, "loop", 12)], (1,)),
    "in its own code, longer than the wait": ([sight(0, "bucket wait", 2), sight(1, "loop", 50)], ()),
    "no rank waits": ([sight(0, "loop", 50), sight(1, "loop", 50)], ()),
    "no rank waits, for very long": ([sight(0, "loop", 150), sight(1, "loop", 150)], (0, 1)),
    "unrecorded steps": ([sight(0, "loop", 150, moves=True), sight(1, "loop", 150, moves=True)], ()),
    "possibly writing": ([sight(0, "collective", 50), sight(1, "checkpoint", 50)], ()),
    "writing": ([sight(0, "collective", 50), sight(1, "checkpoint", 50, WRITES)], ()),
    "writing for very long": ([sight(0, "collective", 150), sight(1, "checkpoint", 150, WRITES)], (1,)),
    "writing while it exits": ([sight(0, "collective", 50), sight(1, "loop", 50, ENDS)], ()),
    "writing after a failure": ([sight(0, "collective", 50), sight(1, "loop", 50, JOINS)], ()),
    "hanging during a write": ([sight(0, "collective", 11), sight(1, "loop", 11, SLEEPS)], (1,)),
    "a state_dict": ([sight(0, "collective", 11), sight(1, "checkpoint", 11, STATE)], (1,)),
    "a wait in a save": ([sight(0, "loop", 12, SCRIPT), sight(1, "checkpoint", 11, SAVES, asleep=11)], (0,)),
    "the first step": ([sight(0, "bucket wait", 50, steps=0), sight(1, "forward", 50, steps=0)], ()),
    "the first step, for very long": ([sight(0, "wait", 150, steps=0), sight(1, "loop", 150, steps=0)], (1,)),
    "stopped": ([sight(0, "bucket wait", 11), sight(1, "wait", 12, stopped=12)], (1,)),
    "ranks wait for each other": ([sight(0, "bucket wait", 11), sight(1, "collective", 12)], (0, 1)),
    "mutual waits, by stacks": (
        [sight(0, "checkpoint", 11, SAVES, asleep=11), sight(1, "loop", 12, GATHERS, asleep=12)],
        (0, 1),
    ),
    "frequent collectives": ([sight(0, "loop", 150, GATHERS, asleep=1), sight(1, "loop", 150, BACKWARD, asleep=1)], ()),
    "no boxes": ([sight(0, None, 900), sight(1, None, 900)], ()),
    "no boxes, one rank stopped": ([sight(0, None, 900), sight(1, None, 900, stopped=11)], (1,)),
    "one rank without a box": ([sight(0, "collective", 150, steps=0), sight(1, None, 150, SCRIPT)], (1,)),
    "torch's wrapper waits": ([sight(0, "loop", 11, BACKWARD, asleep=11), sight(1, "loop", 12, SCRIPT)], (1,)),
    "torch's wrapper computes": ([sight(0, "loop", 11, BACKWARD, asleep=1), sight(1, "loop", 12, SCRIPT)], ()),
    "backward of our wrapper": ([sight(0, "backward", 11, BACKWARD, asleep=11), sight(1, "wait", 12)], (0,)),
    "collective in the script": ([sight(0, "loop", 11, GATHERS, asleep=11), sight(1, "loop", 12, SCRIPT)], (1,)),
    "frequent collective in the script": ([sight(0, "loop", 11, GATHERS, asleep=1), sight(1, "loop", 12, SCRIPT)], ()),
    "hanging hook": ([sight(0, "bucket wait", 11), sight(1, "bucket wait", 12, HOOK)], (1,)),
    "training in a thread": ([sight(0, "bucket wait", 11, THREAD), sight(1, "forward", 12, THREAD)], (1,)),
}


@pytest.mark.parametrize(("sights", "expected"), HANGS.values(), ids=HANGS)
def test_hanging_rank_is_the_one_the_others_wait_for(sights: list[RankView], expected: tuple[int, ...]) -> None:
    assert hanging(sights, 10) == expected


def test_waiting_call_is_the_outermost_in_torch_distributed(tmp_path: Path) -> None:
    begun = tmp_path / "train.py"
    begun.write_text("handle.wait()\n")
    ours = stack(f"{OURS}/comm/shm/engine.py in _block", f"{OURS}/comm/c10d/process_group.py in allreduce")
    calls = {
        GATHERS: "all_gather",
        SAVES: "all_gather",
        BACKWARD: "Tensor.backward",
        ours: "wait",
        ours + f'  File "{C10D}", line 3 in all_reduce\n': "all_reduce",
        stack(f"{begun} in main"): "wait",
        stack(f"{STDLIB}/threading.py in wait", f"{begun} in main"): "",
        stack(f"{STDLIB}/threading.py in wait", f"{C10D} in barrier"): "barrier",
        stack(f"{TORCH}/distributed/checkpoint/filesystem.py in write"): "",
        SCRIPT: "",
        STATE: "",
        "": "",
    }
    assert {stacks: waiting_call(stacks) for stacks in calls} == calls


BUSY = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(stack_dump.__file__)!r})  # by path, as ranks load it: nothing imports torch
import stack_dump
stack_dump.install()
signal.signal(stack_dump.number(), lambda *_: os._exit(9))

def busy():
    print("here", flush=True)
    while True: pass
busy()
"""


def test_rank_running_python_writes_its_own_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Dumping stacks from outside the interpreter crashed about one rank in a thousand.
    monkeypatch.setattr(hang_detection, "POLITE_S", 60.0)
    environment = {**os.environ, "PACELINE_BLACK_BOX": str(tmp_path), "LOCAL_RANK": "0"}
    with subprocess.Popen([sys.executable, "-c", BUSY], env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        replies = [hang_detection.request_stacks(tmp_path, {0: rank.pid}) for _ in range(2)]
        assert rank.poll() is None
        rank.kill()
    assert [hang_detection.main_thread(reply[0])[0].rpartition(" in ")[2] for reply in replies] == ["busy", "busy"]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "wrapper", "backend"), [("loop", "paceline", "gloo"), ("save", "torch", "paceline")])
def test_rank_in_own_code_is_named_not_waiting_ranks(tmp_path: Path, where: str, wrapper: str, backend: str) -> None:
    # Detection took ten times as long, and killed a waiting rank.
    arguments = (script(tmp_path, TRAIN), where, wrapper, backend)
    options = ("--nproc", "3", "--hang-timeout", "2", "--report", "report.json")
    done = paceline(tmp_path, "run", *options, *arguments, fork="all")
    assert done.returncode == 0, done.stderr
    (failure,) = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert (failure["first"]["rank"], failure["first"]["kind"], failure["first"]["step"]) == (0, "hang", 4)
    seconds = re.search(r"rank 0 hangs: no progress for (\d+) s", done.stderr)
    assert seconds is not None
    assert 2 <= int(seconds[1]) < 20, "ten times the timeout"
    assert "rank 1 hangs" not in done.stderr
    assert "rank 2 hangs" not in done.stderr


@pytest.mark.slow
def test_unrecorded_steps_are_not_a_hang(tmp_path: Path) -> None:
    # torch's wrapper, with a Checkpointer that records epochs longer than four timeouts.
    # Progress shows only in changing stacks. The random sleeps on ten lines keep the loop out of step with the
    # launcher's requests, which could otherwise see the same line every time.
    sleeps = "        time.sleep(0.008 * random.random())\n" * 10
    many = f"    import random\n    for _ in range(150 if step == 1 else 1):\n{sleeps}        model("
    epochs = TRAIN.replace("    model(", many)
    epochs = re.sub(r"(?m)^    (optimizer\..*)$", r"        \1", epochs)
    arguments = (script(tmp_path, epochs), "no", "torch", "gloo")
    done = paceline(tmp_path, "run", "--nproc", "2", "--hang-timeout", "1", *arguments, fork="all", first=less_patient)
    assert (done.returncode, done.stderr) == (0, "")
