"""Lost ranks, full memory and full disks: the last step is rescued, or its loss is reported.

A run with ranks killed at exact moments ends bit-equal to an undisturbed run; ``make chaos`` covers more. Decisions
about lost ranks and optimizers that have already stepped are tested without ranks."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forked import call
from insides import (
    BEFORE,
    DESTINATION,
    FOLDER,
    PARENT,
    RESCUE,
    RESTARTS,
    STEPS,
    Boundary,
    Contents,
    OwnStates,
    Recovery,
    Registered,
    Restarts,
    StepBarrier,
    StepRecord,
    StopRequests,
    carry_over,
    keep,
    key_of,
    record_path,
    step_name,
)
from loops import loop
from paceline import World
from paceline.checkpoint import Checkpointer, load_weights
from paceline.errors import CheckpointError, CheckpointWarning, CommunicationError
from processes import paceline, script, strike

CHAOS_LOOP = Path(__file__).parents[3] / "scripts" / "chaos_training.py"
TORCH = {"wrapper": "torch", "backend": "paceline"}
GLOO = {"wrapper": "ours", "backend": "gloo"}
SHARDED: dict[str, Any] = {"sharded": True, "every": 3}


# -- whole runs --------------------------------------------------------------------------------------------------------


def trained(folder: Path, settings: dict[str, Any], orders: str = "") -> list[dict[str, Any]]:
    """Return the final results of both ranks."""
    folder.mkdir()
    arguments = ("run", "--nproc", "2", str(CHAOS_LOOP), str(folder), json.dumps({"steps": 5, **settings}))
    first = partial(strike, orders) if orders else None
    done = paceline(folder, *arguments, fork="all", first=first, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "orders", "redone", "source"),
    [
        # Torch's reducer took a collective's exception for its value, and the surviving rank crashed.
        # A rank killed before it opened the Checkpointer was not restarted.
        (TORCH, "bucket rank=1 at=3; rendezvous rank=0 start=1", 0, "memory"),
        # All steps counted as redone if a rank died while restoring them.
        (GLOO, "optimizer rank=1 at=3; restore rank=0 at=2 start=1", 0, "memory"),
        (SHARDED, "optimizer rank=1 at=5", 1, "disk"),
    ],
    ids=["mid-reduction, then in the rendezvous", "inside the optimizer, then in the restore", "with a lost shard"],
)
def test_a_run_with_killed_ranks_ends_bit_equal_to_an_undisturbed_one(
    tmp_path: Path, settings: dict[str, Any], orders: str, redone: int, source: str
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", settings)
    struck = trained(tmp_path / "struck", settings, orders)
    for key in ("states", "generators", "samples"):
        assert [rank[key] for rank in struck] == [rank[key] for rank in undisturbed]
    restarts = orders.count(";") + 1
    assert {(rank["restarts"], rank["redone"], rank["from"]) for rank in struck} == {(restarts, redone, source)}
    says_why = "no other rank has a copy of a shard" in (tmp_path / "struck" / "stderr").read_text()
    assert says_why == (settings is SHARDED)


# -- several optimizers per iteration ----------------------------------------------------------------------------------


GAN = """
import sys, torch, paceline
world, is_in_turn = paceline.init(), sys.argv[1] == "in turn"
with paceline.set_seed(0):
    generator, critic = (paceline.DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2))
generators, critics = (torch.optim.Adam(model.parameters()) for model in (generator, critic))
torch.manual_seed(world.rank)
with paceline.Checkpointer("saved", every=2) as checkpointer:
    for name in ("generator", "critic", "generators", "critics"):
        checkpointer.register(name, globals()[name])
    checkpointer.steps() and checkpointer.restore()
    while checkpointer.step() < 8:
        critic(generator(torch.randn(2, 4)).detach()).sum().backward()
        if is_in_turn:
            critics.step()
        critic(generator(torch.randn(2, 4))).square().sum().backward()
        generators.step()
        if not is_in_turn:
            critics.step()
        generators.zero_grad(), critics.zero_grad()
    world.print(checkpointer.history)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "orders", "history", "messages"),
    [
        # Killed in the critic's forward for the generator: in the first step, then in step 6. Then at the end of step
        # 7, which the other rank completes although it does not know the lost rank's random state.
        ("in turn", "forward rank=1 at=4; forward rank=0 at=24 start=1 do=raise; stepped rank=1 at=3 start=2",
         "restarts=3, steps_redone=2, rescued_from='disk'", [
             "4, saved on disk, 1 step back, because no rank could save step 5 after optimizers had begun step 6 (",
             "the completed step 7 was not rescued: random generator 'torch' of rank 1 changed",
             "from step 6, saved on disk, 1 step back, because no rank could save step 7 (restart 3)"]),
        # Both step after the last backward, as Muon and AdamW do.
        ("back to back", "gate rank=1 at=3; stepped rank=0 at=2 start=1",
         "restarts=2, steps_redone=0, rescued_from='memory'",
         ["from step 3, rescued from memory (restart 1)", "from step 5, rescued from memory (restart 2)"]),
    ],
    ids=["in turn", "back to back"],
)  # fmt: skip
def test_two_optimizers_only_lose_a_step_if_killed_between_them_and_end_bit_equal(
    tmp_path: Path, order: str, orders: str, history: str, messages: list[str]
) -> None:
    undisturbed, struck = tmp_path / "undisturbed", tmp_path / "struck"
    for folder, first in ((undisturbed, None), (struck, partial(strike, orders))):
        folder.mkdir()
        done = paceline(folder, "run", "--nproc", "2", script(folder, GAN), order, fork="all", first=first)
        assert done.returncode == 0, done.stderr
    assert history in done.stdout
    assert [text for text in messages if text not in done.stderr] == []
    for name in ("generator", "critic", "generators", "critics", "rank-00000", "rank-00001"):
        file = f"saved/step-00000008/{name}.safetensors"
        assert (struck / file).read_bytes() == (undisturbed / file).read_bytes(), name


# -- lost ranks --------------------------------------------------------------------------------------------------------


def states(seed: int, buffer: int, count: int) -> OwnStates:
    return {("random generator", "torch"): seed, ("buffer", 0): buffer, ("object", "hook"): count}


@pytest.mark.parametrize(
    ("lost", "before", "after", "kept"),
    [
        (7, 1, 1, 7),  # no rank changed it after the gate, so the lost rank's value is kept
        (1, 1, 2, 2),  # equal at the gate, like an averaged model's update counter
    ],
)
def test_the_states_of_a_lost_rank_are_carried_over(lost: int, before: int, after: int, kept: int) -> None:
    assert carry_over(0, *(states(each, each, each) for each in (lost, before, after))) == states(kept, kept, kept)
    assert carry_over(1, states(0, 7, 0), states(0, 1, 0), states(0, 2, 0)) == states(0, 7, 0), "not saved"


@pytest.mark.parametrize(("after", "name"), [((2, 1, 1), "'torch'"), ((1, 2, 1), "buffer 0"), ((1, 1, 2), "'hook'")])
def test_unknown_state_of_a_lost_rank_is_not_guessed(after: tuple[int, int, int], name: str) -> None:
    """Training continued with the lost rank's outdated state and only logged a note."""
    with pytest.raises(ValueError, match=f"{name} of rank 0 changed .*, and its new state is lost"):
        carry_over(0, states(7, 7, 7), states(1, 1, 1), states(*after))


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The only rank of a job with restarts enabled."""
    for name, value in ((FOLDER, str(tmp_path)), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"), (RESTARTS, "3")):
        monkeypatch.setenv(name, value)
    return World(0, 1, 0, 1, 0, torch.device("cpu"))


def test_a_start_killed_before_it_restored_does_not_redo_steps(tmp_path: Path, alone: World) -> None:
    folder = tmp_path / "checkpoints"
    before = tmp_path / BEFORE / key_of(folder)
    before.mkdir(parents=True)
    StepRecord(record_path(before, 0), make=True).complete(50)

    def start() -> Recovery:
        return Recovery(alone, Contents(folder, {}, lambda: None))

    recovery = start()
    recovery.close(failing=False)
    record_path(tmp_path / STEPS / key_of(folder), 0).replace(record_path(before, 0))  # killed here
    recovery = start()
    recovery.resume_from(48, "disk")
    assert recovery.history().steps_redone == 2
    recovery.close(failing=False)


class Changing(nn.Module):
    """Buffers of every kind, replaced in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        for name, buffer in {"rows": torch.zeros(0, 3), "late": None, "gone": torch.ones(2)}.items():
            self.register_buffer(name, buffer)
        self.register_buffer("large", torch.zeros(70_000))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows, self.large, self.phase = torch.cat([self.rows, x]), self.large + x[0, 0], self.phase * 1j
        self.late, self.gone = (x.mean(0), None) if len(self.rows) > 2 else (None, self.gone)
        return x * self.weight


def test_replaced_buffers_are_rescued_as_of_the_last_step(tmp_path: Path, alone: World) -> None:
    """A queue that grew could not be rescued, and a large buffer silently came from the failed step."""
    folder, model = tmp_path / "checkpoints", Changing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    registered: dict[str, Registered] = {}
    registered["model"] = Registered.of("model", model, False, registered)
    registered["optimizer"] = Registered.of("optimizer", optimizer, False, registered)
    recovery = Recovery(alone, Contents(folder, registered, lambda: None))
    recovery.watch(registered["optimizer"])
    recovery.mark()
    for step in (1.0, 2.0):
        model(torch.full((1, 3), step)).sum().backward()
        optimizer.step()
        recovery.mark()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.ones(1, 3))
    recovery._rescue(RuntimeError("another rank failed"))
    assert recovery.memory is not None
    saved = load_weights(recovery.memory / step_name(2))
    assert saved.keys() == expected.keys() == {"weight", "rows", "gone", "large", "phase"}
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    recovery.close(failing=True)


def mark_in_turns(folder: Path) -> tuple[list[str], list[str]]:
    """Return the warnings of sequential and of interleaved trainings."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    one, other, later = (
        Recovery(World(0, 1, 0, 1, 0, torch.device("cpu")), Contents(folder / name, {}, lambda: None))
        for name in ("one", "other", "later")
    )
    for each in (one, one, other, other):  # trainings one after the other
        each.mark()
    other.close(failing=False)
    one.mark()  # continues after the other training has ended
    first = messages.copy()
    for each in (later, one, later):
        each.mark()
    return first, messages


def test_interleaved_checkpointers_warn_that_a_failure_separates_them(tmp_path: Path) -> None:
    """When a rank died between the two, training silently continued with one model a step ahead of the other."""
    first, messages = call(mark_in_turns, tmp_path)
    assert first == []
    assert len(messages) == 1
    assert messages[0].startswith("two Checkpointers mark steps in turn")


def test_the_launcher_waits_for_slow_steps(tmp_path: Path) -> None:
    """Ranks notice a lost rank at their next collective, up to a step later; they were killed before that."""
    restarts, folder = Restarts(tmp_path, None), tmp_path / STEPS / "key"
    folder.mkdir(parents=True)
    StepRecord(record_path(folder, 0), make=True).complete(5, seconds=7.5)
    assert [each.pace for each in restarts.reached()] == [7.5]


def test_ranks_far_from_a_collective_are_notified_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a long evaluation no rank notices a lost one; all were killed and the last step was lost."""
    monkeypatch.setattr("paceline.launch.restart_policy.RESCUE_S", 0.1)
    monkeypatch.setattr("paceline.launch.restart_policy.SIGNALLED_S", 60.0)
    restarts, folder = Restarts(tmp_path, None), tmp_path / STEPS / "key"
    folder.mkdir(parents=True)
    record = StepRecord(record_path(folder, 0), make=True)
    record.complete(5, seconds=0.01)
    notified: list[int] = []

    def notify() -> None:
        notified.append(len(notified))
        (tmp_path / RESCUE / "key" / step_name(5)).mkdir(parents=True)

    restarts.wait_for_rescue(lambda: [0], time.sleep, notify)
    assert notified == [0]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_rank_unless_it_is_an_echo(monkeypatch: pytest.MonkeyPatch, second: int) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    stops = StopRequests(Boundary(list, None), None, saves=True)
    for now, number, count in ((1.0, signal.SIGTERM, 0), (1.4, signal.SIGHUP, 0), (1.6, second, 1)):
        monkeypatch.setattr("paceline.checkpoint.signals.time", SimpleNamespace(monotonic=lambda now=now: now))
        stops.note(number, None)
        assert sent == [(os.getpid(), second)] * count


def test_a_rank_asked_to_stop_checks_for_lost_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.signals.ECHO_S", 60.0)
    barrier = StepBarrier(tmp_path, 0, 2, 30)
    stops = StopRequests(Boundary(list, barrier), barrier.record, saves=True)
    stops.note(signal.SIGTERM, None)  # none is lost, so it stops after the step
    if not (other := os.fork()):
        StepRecord(record_path(tmp_path, 1), make=True)
        os._exit(0)
    os.waitpid(other, 0)
    with pytest.raises(CommunicationError, match="rank 1 ended"):
        stops.note(signal.SIGUSR1, None)


# -- full memory and full disks ----------------------------------------------------------------------------------------


FULL_LOOP = loop(
    15,
    'paceline.Checkpointer(given["folder"], every=5)',
    begin="given = json.loads(sys.argv[1])",
    before="""
if world.is_main and step == first_step:
    print("begins at", step, checkpointer.history.steps_redone, checkpointer.history.rescued_from, flush=True)
if world.is_main and step == 4 and start == 0 and "fill" in given:
    with open(given["fill"] + "/fill", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
if world.rank == 1 and step == given.get("kill") and start == 0:
    os.kill(os.getpid(), signal.SIGKILL)
""",
    end='if given.get("close", True): checkpointer.close()',
)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB with 64 KiB free."""
    (place := tmp_path / "small").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs root")
    (place / "ballast").write_bytes(bytes(2**21 - 2**16))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def train(where: Path, environment: dict[str, str], **given: Any) -> tuple[int, list[str], str]:
    """Run the loop on two ranks; return the exit code, stdout lines and stderr."""
    text = json.dumps({"folder": str(where / "checkpoints")} | given)
    done = paceline(where, "run", "--nproc", "2", script(where, FULL_LOOP), text, fork="all", **environment)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_a_job_with_too_little_memory_restarts_from_disk_with_a_warning(tmp_path: Path, small: Path) -> None:
    # One rank without room for its copies disabled all restarts.
    code, out, err = train(tmp_path, {PARENT: str(small)}, kill=7)
    assert (code, out) == (0, ["begins at 0 0 None", "begins at 5 2 disk"]), err
    assert "ranks 0, 1: a failure will cost the steps since the last save on disk" in err
    assert f"because the job's folder is full ({small}" in err
    assert "; enlarge it (in a container: docker run --shm-size=8g), or choose another folder with PACELINE_JOBS" in err
    assert "from step 5, saved on disk, 2 steps back, because no rank could save step 7 (restart 1)" in err
    assert [path.name for path in small.iterdir()] == ["ballast"]


def test_a_full_user_chosen_folder_does_not_disable_restarts(tmp_path: Path, small: Path) -> None:
    with (small / "ballast").open("ab") as ballast:
        ballast.write(bytes(2**16))
    code, out, err = train(tmp_path, {PARENT: str(small)}, kill=7)
    assert (code, out) == (0, ["begins at 0 0 None", "begins at 7 0 memory"]), err
    assert f" ({small}: No space left on device)" in err
    assert [path.name for path in small.iterdir()] == ["ballast"]


@pytest.mark.slow
def test_memory_that_fills_up_during_training_saves_the_last_step_to_disk(tmp_path: Path, small: Path) -> None:
    # The message claimed that no rank could save the step.
    (small / "ballast").unlink()
    code, out, err = train(tmp_path, {PARENT: str(small)}, kill=7, fill=str(small))
    assert (code, out) == (0, ["begins at 0 0 None", "begins at 7 0 disk"]), err
    assert "restarting all ranks from step 7, saved on disk (restart 1)" in err
    assert [path.name for path in small.iterdir()] == ["fill"]


@pytest.mark.slow
def test_training_continues_on_a_full_disk_but_ending_unsaved_is_a_failure(tmp_path: Path, small: Path) -> None:
    # Every failed save restarted all ranks, and the job exited with code 0 and an empty folder.
    code, out, err = train(tmp_path, {}, close=False, folder=str(small))
    assert (code, out) == (1, ["begins at 0 0 None"]), err
    assert "error: the job ended, but no step is saved in " in err
    assert err.count("CheckpointWarning: ") == 1, "once for each cause"
    assert "step-00000005: No space left on device: " in err
    assert "KiB are needed, " in err
    assert "training continues, and the next save tries again" in err
    assert not list(small.glob("step-*"))


def raise_full(_: int) -> None:
    """Raise the error of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("async_save", [False, True], ids=["", "async"])
def test_a_failed_save_warns_once_and_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    checkpointer = Checkpointer(tmp_path, every=1, async_save=async_save)
    checkpointer.register("model", nn.Linear(2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raise_full)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(4):
                checkpointer.step()
            checkpointer.due.finish(checkpointer)
    [warning] = warned
    assert "training continues, and the next save tries again" in str(warning.message)
    assert checkpointer.due.failed == [1, 2, 3, 4]
    checkpointer.step()
    checkpointer.close()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000005"]


def test_closing_without_any_save_raises_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, every=1)
    checkpointer.register("model", nn.Linear(2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raise_full)
        with pytest.warns(CheckpointWarning):
            checkpointer.step()
    with pytest.raises(CheckpointError, match="all 1 saves to"):
        checkpointer.close()
    checkpointer.close()
    Checkpointer(tmp_path).close()  # the folder was released


LOSES_ITS_FOLDER = loop(
    9,
    'paceline.Checkpointer("parent/saved", every=2)',
    before="""
if world.is_main and step == first_step:
    print("begins at", step, checkpointer.history.rescued_from, flush=True)
if step == 3 and start == 0 and world.rank == 1:
    shutil.rmtree("parent")
    open("parent", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
if step == 6 and start == 1 and world.rank == 0:
    if os.geteuid() == 0:  # mounting a file system needs root
        os.unlink("parent")
        os.mkdir("parent")
        subprocess.run("mount --bind parent parent && mount -o remount,ro,bind parent", shell=True, check=True)
    os.kill(os.getpid(), signal.SIGKILL)
if step == 7 and start == 2 and world.rank == 0:
    if os.geteuid() == 0:
        subprocess.run("umount -l parent", shell=True, check=True)
    else:
        os.unlink("parent")
""",
)


def test_a_job_survives_a_temporarily_unusable_folder(tmp_path: Path) -> None:
    # The restart failed with a usage error although the step was in memory. First the folder's parent is missing,
    # then the folder is read-only.
    name = script(tmp_path, LOSES_ITS_FOLDER)
    try:
        done = paceline(tmp_path, "run", "--nproc", "2", name, fork="all")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "parent")], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["begins at 0 None", "begins at 3 memory", "begins at 6 memory"]
    assert "cannot be written to: Not a directory" in done.stderr
    assert os.geteuid() != 0 or "cannot be written to: Read-only file system" in done.stderr
    assert (tmp_path / "parent" / "saved" / "step-00000008").is_dir()


# -- a step in memory after the job has failed -------------------------------------------------------------------------


TRAINER = """
import sys, torch, paceline
from paceline.data import DataLoader
from paceline.train import TrainConfig, Trainer
world = paceline.init()
folder = sys.argv[1] if sys.argv[1:] else None
model = paceline.DistributedDataParallel(torch.nn.Linear(4, 2))
def loss(model, batch):
    if trainer.result.steps == 2 and world.rank == 1:
        raise ValueError("broken")
    return model(batch[0]).sum(), len(batch[0])
data = torch.utils.data.TensorDataset(torch.ones(64, 4))
config = TrainConfig(epochs=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = paceline.Checkpointer(folder) if folder else None
trainer = Trainer(model, optimizer, loss, DataLoader(data, batch_size=4), config, checkpointer=checkpointer)
trainer.fit()
"""
SHORT_LOOP = loop(3, 'paceline.Checkpointer("runs", every=2)')
LOST = (
    "the last completed step, 2, is lost because the training has no checkpoint folder; give it one: "
    "Checkpointer(folder), or --checkpoint-dir of a recipe"
)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [(), ("runs",)], ids=["without a folder", "with one"])
def test_a_step_in_memory_is_kept_in_the_run_folder_or_reported_lost(tmp_path: Path, folder: tuple[str, ...]) -> None:
    # It was reported as saved in the job's folder, which is deleted with the job.
    done = paceline(tmp_path, "run", "--nproc", "2", script(tmp_path, TRAINER), *folder, fork="all")
    assert done.returncode == 1, done.stderr
    assert "restarting all ranks from step 2, rescued from memory" in done.stderr
    assert (LOST in done.stderr.splitlines()) is not bool(folder)
    paths = re.findall(r"/\S*step-\d{8}", done.stderr)
    assert paths == ([str(tmp_path / "runs" / step_name(2))] if folder else [])
    assert all(Path(path).is_dir() for path in paths)


def test_a_save_interrupted_by_a_kill_is_repeated_after_the_restart(tmp_path: Path) -> None:
    # The restarted job never wrote the step that it had in memory; it exited with code 0 and an empty folder.
    first = partial(strike, "before-rename rank=0 at=1")
    done = paceline(tmp_path, "run", "--nproc", "2", script(tmp_path, SHORT_LOOP), fork="all", first=first)
    assert done.returncode == 0, done.stderr
    assert "restarting all ranks from step 2, rescued from memory" in done.stderr
    assert (tmp_path / "runs" / step_name(2) / "manifest.json").exists()


@pytest.fixture
def rescued(tmp_path: Path) -> Path:
    """A rescued step whose checkpoint folder cannot be created."""
    with Checkpointer(tmp_path / "made") as checkpointer:
        checkpointer.register("model", nn.Linear(2, 2))
        made = checkpointer.save(7)
    folder = tmp_path / "job" / RESCUE / "key"
    folder.mkdir(parents=True)
    shutil.copytree(made, folder / step_name(7))
    (tmp_path / "file").touch()
    (folder / DESTINATION).write_text(str(tmp_path / "file" / "checkpoints"))
    return folder


def test_unsaved_steps_are_kept_in_the_home_folder(
    tmp_path: Path, rescued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second one failed with a traceback because the first one's folder existed.
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        line, is_saved = keep(rescued) or ("", True)
        assert not is_saved
        assert line.startswith(f"step 7 cannot be saved to {tmp_path}/file/checkpoints (")
        before, _, remedy = line.rpartition("; to resume from it, ")
        assert remedy == f"make room and move that folder to {tmp_path}/file/checkpoints"
        kept = Path(before.rpartition("; it is kept in ")[2])
        assert kept.name == step_name(7)
        assert {file.name for file in kept.iterdir()} == {file.name for file in (rescued / step_name(7)).iterdir()}


def test_modules_in_the_working_folder_shadow_nothing(
    tmp_path: Path, rescued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (rescued / DESTINATION).write_text(str(tmp_path / "checkpoints"))
    script(tmp_path, "", "random.py")
    script(tmp_path, "", "torch.py")
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    Restarts(tmp_path / "job", None).keep_rescued(lines.append)
    assert lines == [f"the last completed step, 7, is saved to {tmp_path / 'checkpoints' / step_name(7)}"]


def test_a_folder_whose_name_is_not_utf_8_is_found(tmp_path: Path, rescued: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run-\xff")
    folder.mkdir()
    (rescued / DESTINATION).write_bytes(bytes(folder))
    assert keep(rescued) == (f"the last completed step, 7, is saved to {folder / step_name(7)}", True)


def test_a_step_that_cannot_be_kept_is_lost(tmp_path: Path, rescued: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The report was buried at the end of a traceback.
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    line, is_saved = keep(rescued) or ("", True)
    assert not is_saved
    assert line.endswith("; it is lost because it cannot be copied to the home folder either (Not a directory)")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "copytree", copy_to_full_disk)
    line, _ = keep(rescued) or ("", True)
    assert line.endswith("either (No space left on device)")
    assert not list(tmp_path.glob("rescued-*"))


def copy_to_full_disk(*_: object) -> None:
    """Fail as ``shutil.copytree`` does on a full disk."""
    raise shutil.Error([("a", "b", "No space left on device")])
