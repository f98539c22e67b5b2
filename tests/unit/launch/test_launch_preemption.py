"""After a termination signal all ranks finish and save the current step, and a later run resumes there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from insides import signals
from processes import Running, gone_after, paceline, script

STEPS = 12
TRAIN = f"""
import hashlib, os, sys, time, torch, paceline
options = dict(word.split("=") for word in sys.argv[1:])
world = paceline.init()
torch.manual_seed(world.rank)
model = paceline.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

def wait_until_asked(seconds=60.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until and ("seconds" in options or not os.path.exists("asked")):
        if checkpointer._recovery.boundary.requests: open("asked", "w").close()
        time.sleep(0.005)

class Slow:  # to save
    def state_dict(self):
        if options.get("slow") == "save" and checkpointer.step_now > 2:
            open(f"ready-{{world.rank}}", "w").close()
            wait_until_asked()
        return {{}}
    def load_state_dict(self, state): pass

checkpointer = paceline.Checkpointer("saved", keep=9, every=int(options["every"]) if "every" in options else None,
                                     async_save=options.get("background") == "1")
checkpointer.step_now = 0
checkpointer.register("model", model)
checkpointer.register("optimizer", optimizer)
checkpointer.register("slow", Slow())
step = checkpointer.restore() if checkpointer.steps() else 0
print("from", step, flush=True)
for step in range(step, {STEPS}):
    checkpointer.step_now = step
    if step == 3 and options.get("slow") == "loop":
        open(f"ready-{{world.rank}}", "w").close()
        wait_until_asked(float(options.get("seconds", 60)))
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert checkpointer.step() == step + 1
    if "slow" in options: time.sleep(0.02)
checkpointer.close()
digest = hashlib.sha256()
for value in [*model.parameters(), torch.randn(3)]: digest.update(value.detach().numpy().tobytes())
open(f"digest-{{world.rank}}", "w").write(digest.hexdigest())
"""
READY = ("ready-0", "ready-1")


def digests(folder: Path) -> list[str]:
    return [(folder / f"digest-{rank}").read_text() for rank in range(2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert paceline(folder, "run", "--nproc", "2", script(folder, TRAIN), fork="all").returncode == 0
    return digests(folder)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(folder / "saved") if name.startswith("step-"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "target", "arguments"),
    [(signal.SIGUSR1, "launcher", ["slow=loop", "background=1"]), (signal.SIGTERM, "rank", ["slow=save", "every=3"])],
    ids=["computing", "saving"],
)
def test_signal_saves_a_common_step_and_resuming_matches_an_undisturbed_run(
    tmp_path: Path, undisturbed: list[str], number: signal.Signals, target: str, arguments: list[str]
) -> None:
    name = script(tmp_path, TRAIN)
    with Running(tmp_path, "run", "--nproc", "2", "--requeue-exit-code", "99", name, *arguments, fork="all") as job:
        job.wait_for(*READY)
        stop(job, number, target)
        assert job.wait() == 99, job.stderr
        assert "Traceback" not in job.stderr
        step = saved_steps(tmp_path)[-1]
        assert job.stderr.splitlines()[-1] == ending_message(number, step)
    assert 0 < step < STEPS
    again = paceline(tmp_path, "run", "--nproc", "2", name, fork="all")
    assert (again.returncode, again.stdout.splitlines()) == (0, [f"from {step}"] * 2), again.stderr
    assert digests(tmp_path) == undisturbed


def stop(job: Running, number: signal.Signals, target: str) -> None:
    """Send the signal to the launcher, to the last rank, or to all processes, the launcher last."""
    family = job.family()
    for pid in {"launcher": family[:1], "rank": family[-1:], "all": family[::-1]}[target]:
        os.kill(pid, number)


def ending_message(number: signal.Signals, step: int) -> str:
    first = "interrupted" if number == signal.SIGINT else f"terminated by {number.name}"
    return f"{first}, after step {step} was saved"


@pytest.mark.parametrize(("number", "target"), [(signal.SIGHUP, "rank"), (signal.SIGINT, "all")])
def test_each_signal_to_any_process_saves_the_last_step(tmp_path: Path, number: signal.Signals, target: str) -> None:
    name = script(tmp_path, TRAIN)
    with Running(tmp_path, "run", "--nproc", "2", name, "slow=loop", fork="all") as job:
        job.wait_for(*READY)
        assert len(job.family()) == 3
        stop(job, number, target)
        assert job.wait() == 128 + number, job.stderr
        assert job.stderr.splitlines()[-1] == ending_message(number, 4)
        assert "Traceback" not in job.stderr
    assert saved_steps(tmp_path) == [4]


def test_immediately_repeated_signal_counts_as_an_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """timeout(1) signals the command first and its process group right after."""
    caught = signals.Caught()
    for now, count in ((1.0, 1), (1.4, 1), (1.6, 2)):
        monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda now=now: now))
        caught._note(signal.SIGTERM, None)
        assert caught.received == [signal.SIGTERM] * count


WORKERS = """
import os, sys, time, torch, paceline
from paceline.data import DataLoader

class Points(torch.utils.data.Dataset):
    def __len__(self): return 64_000
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.tensor([float(index)])

world = paceline.init()
model = paceline.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
loader = DataLoader(Points(), batch_size=4, num_workers=2, prefetch_factor=1)
checkpointer = paceline.Checkpointer("saved")
for name, part in dict(model=model, optimizer=optimizer, loader=loader).items(): checkpointer.register(name, part)
for batch in loader:
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if checkpointer.step() == 3: open(f"ready-{world.rank}", "w").close()
"""


@pytest.mark.slow
def test_dataloader_workers_survive_a_signal_to_all_processes(tmp_path: Path) -> None:
    number = signal.SIGINT
    with Running(tmp_path, "run", "--nproc", "2", script(tmp_path, WORKERS), fork="all") as job:
        job.wait_for(*READY)
        assert len(job.family()) == 1 + 2 * 3
        stop(job, number, "all")
        assert job.wait() == 128 + number, job.stderr
        [step] = saved_steps(tmp_path)
        assert job.stderr.splitlines()[-1] == ending_message(number, step)
        assert "Traceback" not in job.stderr


def test_second_signal_ends_everything_without_requeueing(tmp_path: Path) -> None:
    arguments = ("--requeue-exit-code", "99", script(tmp_path, TRAIN), "slow=loop", "seconds=600")
    with Running(tmp_path, "run", "--nproc", "2", *arguments, fork="all") as job:
        job.wait_for(*READY)
        ranks = job.family()[1:]
        job.process.send_signal(signal.SIGTERM)
        job.wait_for_error("another signal ends them at once")
        time.sleep(2 * signals.ECHO_S)  # anything sooner counts as an echo
        assert len(job.family()) == 3
        job.process.send_signal(signal.SIGTERM)
        gone_after(ranks, 60)
        assert job.wait() == 143
        assert job.stderr.splitlines()[-1] == "terminated by SIGTERM"
    assert saved_steps(tmp_path) == []


def test_step_longer_than_the_grace_period_is_cut_off(tmp_path: Path) -> None:
    arguments = ("--shutdown-timeout", "1", script(tmp_path, TRAIN), "slow=loop", "seconds=600")
    with Running(tmp_path, "run", "--nproc", "2", *arguments, fork="all") as job:
        job.wait_for(*READY)
        job.process.send_signal(signal.SIGTERM)
        gone_after(job.family()[1:], 60)
        assert job.wait() == 143
        assert "ranks 0, 1 did not end within 1 s after SIGTERM and were killed" in job.stderr


OWN_HANDLER = TRAIN.replace(
    "world = paceline.init()",
    """
import signal
def own(*_):
    open("own-" + os.environ["RANK"], "w").close()
    sys.exit(7)
signal.signal(signal.SIGTERM, own)
world = paceline.init()
""",
)


def test_script_with_its_own_handler_is_left_alone(tmp_path: Path) -> None:
    # Paceline requests no save. The rank that exits later sees its peer disappear and may save the previous step.
    arguments = (script(tmp_path, OWN_HANDLER), "slow=loop", "seconds=600")
    with Running(tmp_path, "run", "--nproc", "2", *arguments, fork="all") as job:
        job.wait_for(*READY)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
    assert sorted(path.name for path in tmp_path.glob("own-*")) == ["own-0", "own-1"]
    assert not (tmp_path / "asked").exists()
    assert saved_steps(tmp_path) in ([], [3])


def test_single_process_saves_its_step_and_keeps_a_handler_in_c(tmp_path: Path) -> None:
    registered = TRAIN.replace(
        "world = paceline.init()",
        "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1)\nworld = paceline.init()",
    )
    program = (script(tmp_path, registered.replace("ready-{world.rank}", "ready-0")), "slow=loop")
    with Running(tmp_path, program=program, fork="all") as job:
        job.wait_for("ready-0")
        job.process.send_signal(signal.SIGUSR1)
        job.wait_for_error("most recent call first")
        assert not (tmp_path / "asked").exists()
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert "Traceback" not in job.stderr
    assert saved_steps(tmp_path) == [4]


IN_A_THREAD = """
import asyncio, multiprocessing, sys, threading, time, torch, paceline
from concurrent.futures import ThreadPoolExecutor

def train():
    with paceline.init() as world, paceline.Checkpointer("saved") as checkpointer:
        model = checkpointer.register("model", paceline.DistributedDataParallel(torch.nn.Linear(4, 2)))
        optimizer = checkpointer.register("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
        while True:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if checkpointer.step() == 3:
                child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
                child.start()
                child.terminate()  # in a forked child, the signal has its usual effect
                child.join()
                open(f"ready-{world.rank}", "w").close()
            time.sleep(0.01)

if sys.argv[1] == "thread":
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
elif sys.argv[1] == "executor":
    ThreadPoolExecutor().submit(train).result()
else:
    asyncio.run(asyncio.to_thread(train))
"""


@pytest.mark.parametrize(
    ("kind", "target"),
    [("thread", "launcher"), ("executor", "rank"), ("thread", "no launcher"), ("asyncio", "no launcher")],
)
def test_training_in_a_thread_saves_its_last_step_after_a_signal(tmp_path: Path, kind: str, target: str) -> None:
    # Python installs signal handlers only in the main thread, so the signal ended the ranks immediately.
    name, is_alone = script(tmp_path, IN_A_THREAD), target == "no launcher"
    number = signal.SIGINT if target == "launcher" else signal.SIGTERM  # the launcher forwards it as SIGTERM
    arguments, program = ((), (name, kind)) if is_alone else (("run", "--nproc", "2", name, kind), ())
    with Running(tmp_path, *arguments, program=program, fork="all") as job:
        job.wait_for(*READY[: 1 if is_alone else 2])
        stop(job, number, "launcher" if is_alone else target)
        # Without a launcher, SystemExit in a thread ends only that thread.
        assert job.wait() == (0 if is_alone and kind == "thread" else 128 + number), job.stderr
        assert "Traceback" not in job.stderr
        (step,) = saved_steps(tmp_path)
        if not is_alone:
            assert job.stderr.splitlines()[-1] == ending_message(number, step)


CLOSED_IN_A_THREAD = """
import threading, time, torch, paceline
optimizer = torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1)
checkpointer = paceline.Checkpointer("saved")
checkpointer.register("optimizer", optimizer)
optimizer.step()
checkpointer.step()
thread = threading.Thread(target=checkpointer.close)
thread.start()
thread.join()
open("ready-0", "w").close()
time.sleep(1000)
"""


def test_signal_after_close_in_a_thread_ends_the_process_as_usual(tmp_path: Path) -> None:
    with Running(tmp_path, program=(script(tmp_path, CLOSED_IN_A_THREAD),), fork="all") as job:
        job.wait_for("ready-0")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == -signal.SIGTERM


def test_ranks_without_a_shared_job_folder_agree_on_the_saved_step(tmp_path: Path) -> None:
    # As under torchrun, which provides no job folder; only one rank receives the signal.
    text = TRAIN.replace("import hashlib, os,", "import os; os.environ['PACELINE_BLACK_BOX'] = ''\nimport hashlib,")
    name = script(tmp_path, text.replace("range(step, 12)", "range(step, 2000)"))
    with Running(tmp_path, "run", "--nproc", "2", name, "slow=loop", fork="all") as job:
        job.wait_for(*READY)
        os.kill(job.family()[2], signal.SIGTERM)
        assert job.wait(60) == 1
        assert "exit code 143" in job.stderr
        assert "Traceback" not in job.stderr
    (step,) = saved_steps(tmp_path)
    assert 3 < step < 1000


WORKER_DIES = TRAIN.replace("step == 3 and options", "step == 3 and world.rank == 1 and options").replace(
    'get("seconds", 60)))\n', 'get("seconds", 60)))\n        raise RuntimeError("a worker has gone")\n'
)


@pytest.mark.slow
def test_rank_failing_while_it_finishes_its_step_loses_only_that_step(tmp_path: Path) -> None:
    # For example, if a batch system also ends the DataLoader's workers. The others rescue the previous step.
    arguments = ("--requeue-exit-code", "99", script(tmp_path, WORKER_DIES), "slow=loop")
    with Running(tmp_path, "run", "--nproc", "2", *arguments, fork="all") as job:
        job.wait_for("ready-1")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 99, job.stderr
        assert "a worker has gone" in job.stderr
        assert job.stderr.splitlines()[-1] == "terminated by SIGTERM, after step 3 was saved"
    assert saved_steps(tmp_path) == [3]
