"""Black boxes: a rank's records can be read at any time, including after the rank was killed."""

from __future__ import annotations

import errno
import os
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insides import (
    PARENT,
    SIZE,
    JobFolder,
    Recorder,
    black_box,
    black_boxes,
    is_running,
    job_directory,
    read_note,
    running_jobs,
)
from insides import black_box_path_of as path_of
from paceline.errors import UsageError
from processes import paceline


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty black box file, as created by a launcher."""
    file = path_of(tmp_path, 0)
    file.write_bytes(bytes(SIZE))
    return file


def recording(box: black_box.BlackBox) -> Recorder:
    log = Recorder()
    log.box = box
    return log


def in_child(function: Callable[[], Any]) -> int:
    """Run `function` in a forked child that never returns; return the child's pid."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def now_in(path: Path) -> Any:
    snapshot = black_box.read_box(path)
    assert snapshot is not None
    return snapshot


def count(path: Path) -> None:
    """Write until killed."""
    box, number = black_box.BlackBox(path, 3, 8), 0
    while True:
        number += 1
        box.change(number % len(black_box.PHASES), number)
        box.forward_began(float(number))
        box.add_wait(2.0 * (number - 1))
        box.optimizer_ended(float(number))


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_last_records_of_a_killed_rank_can_be_read(path: Path) -> None:
    def work() -> None:
        box = black_box.BlackBox(path, 1, 2)
        for label in ("forward", "optimizer"):
            with box.span(label):
                pass
        with box.span("wait"), box.span("bucket wait", 7):
            os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    child = in_child(work)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    box = now_in(path)
    assert (box.pid, box.rank, box.size, box.steps) == (child, 1, 2, 1)
    assert (box.phase, box.bucket) == ("bucket wait", 7)
    assert began < box.stepped < box.since < time.monotonic()
    assert not is_running(child)


def test_a_reader_never_sees_a_partial_write(path: Path) -> None:
    child = in_child(lambda: count(path))
    try:
        while black_box.read_box(path) is None:
            time.sleep(0.001)
        seen = [now_in(path) for _ in range(1000)]
        while len({box.steps for box in seen}) <= 10:  # read while it is being written
            seen.append(now_in(path))
    finally:
        end(child)
    seen.append(now_in(path))
    for name in ("steps", "since", "stepped"):
        numbers = [getattr(box, name) for box in seen]
        assert numbers == sorted(numbers)
    assert {box.phase for box in seen} <= set(black_box.PHASES)


def test_an_exception_records_the_phase_that_raised_it(path: Path) -> None:
    """An exception ends its phase as it propagates, so the phase must be recorded immediately."""
    box = black_box.BlackBox(path, 0, 1)
    with suppress(ValueError), box.span("forward"), box.span("collective"):
        raise ValueError
    now = now_in(path)
    assert now.phase == "loop"
    assert now.raised is not None
    assert (now.raised.phase, now.raised.bucket, now.raised.until) == ("collective", None, now.since)
    assert now.raised.since < now.raised.until
    with suppress(SystemExit), box.span("wait"), box.span("bucket wait", 3):
        raise SystemExit(3)
    now = now_in(path)
    assert now.raised is not None
    assert (now.raised.phase, now.raised.bucket) == ("bucket wait", 3)


def test_the_next_phase_clears_an_exception_and_stop_iteration_does_not_count(path: Path) -> None:
    box = black_box.BlackBox(path, 0, 1)
    with suppress(ValueError), box.span("forward"):
        raise ValueError
    assert now_in(path).raised is not None
    with box.span("forward"):
        assert now_in(path).raised is None
    with suppress(StopIteration), box.span("data wait"):
        raise StopIteration
    assert now_in(path).raised is None


def test_an_empty_file_and_another_version_are_reported(path: Path) -> None:
    assert black_box.read_box(path) is None, "no rank has opened it"
    black_box.BlackBox(path, 0, 1)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 99))
    with pytest.raises(ValueError, match="version 99"):
        black_box.read_box(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="greater than file size"):
        black_box.read_box(path)


# -- phases and steps --------------------------------------------------------------------------------------------------


def test_each_phase_is_visible_and_then_the_loop(path: Path) -> None:
    log = recording(black_box.BlackBox(path, 0, 1))
    for log.on in (False, True):
        for label in ("data wait", "forward", "backward", "wait", "optimizer", "checkpoint", "collective"):
            with log.span(label):
                assert now_in(path).phase == label
            assert now_in(path).phase == "loop"
            finish = log.open(label)
            assert now_in(path).phase == label
            finish()
            assert now_in(path).phase == "loop"


def test_after_a_nested_wait_the_outer_phase_is_shown_again(path: Path) -> None:
    log, seen = recording(black_box.BlackBox(path, 0, 1)), []
    look = lambda: seen.append((now_in(path).phase, now_in(path).bucket))  # noqa: E731
    with log.span("forward"):
        with log.span("collective"):  # SyncBatchNorm
            look()
        look()
    with log.span("wait"):
        for bucket in range(2):
            with log.span("bucket wait", bucket), log.span("collective"):
                look()
        with log.span("collective"):  # the control block
            look()
        look()
    with log.span("backward"), log.span("launch", 3):
        look()
    look()
    expected = ["collective", "forward", "bucket wait:0", "bucket wait:1", "collective", "wait", "backward", "loop"]
    assert [phase if bucket is None else f"{phase}:{bucket}" for phase, bucket in seen] == expected


def test_a_phase_that_raised_is_not_shown_again(path: Path) -> None:
    log = recording(black_box.BlackBox(path, 0, 1))
    log.open("optimizer")  # raises, so the phase is never closed
    with log.span("forward"):
        pass
    assert now_in(path).phase == "loop"
    assert now_in(path).steps == 0


def test_a_step_ends_with_the_first_optimizer_after_a_forward(path: Path) -> None:
    log = recording(black_box.BlackBox(path, 0, 1))

    def step(forwards: int, optimizers: int) -> int:
        for _ in range(forwards):
            with log.span("forward"):
                pass
        for _ in range(optimizers):
            log.open("optimizer")()
        return int(now_in(path).steps)

    # micro-batches; two optimizers; only an optimizer; only forwards
    assert [step(1, 1), step(3, 1), step(1, 2), step(0, 1), step(2, 0)] == [1, 2, 3, 3, 3]


F, A, B = ("forward",), ("optimizer", 1), ("optimizer", 2)  # a forward, and the steps of two optimizers
JOB_STEPS: dict[str, tuple[bool, list[tuple[Any, ...]], int | None]] = {
    "nothing has run": (True, [], None),
    "the first step": (True, [F], 0),
    "only steps of the wrapper": (True, [F, A, F, A], 2),
    "a restart at an unknown step": (False, [F, A, F, A], None),
    "restored, then only saved": (False, [("restore", 5), F, A, F, A], 7),
    "restored, first step not marked yet": (False, [("restore", 5), F, A], 5),
    "marked": (False, [("restore", 5), F, A, ("mark", 6), F, A], 6),
    "marked without the wrapper": (False, [("mark", 3)], 3),
    "nothing to restore": (False, [("restore", 0), F], 0),
    "restored before any step": (False, [("restore", 5)], 5),
    "uncounted optimizers": (False, [("restore", 5), ("lost",)], None),
    "counted optimizers": (False, [("restore", 5), F, A, ("lost",), F, A], 7),
    "marked optimizers": (False, [("mark", 5), ("lost",)], 5),
    "two optimizers of one forward": (True, [F, A, B, F, A, B], 2),
    "two alternating models": (True, [F, A, F, B], None),
    "two alternating models, marked": (True, [F, A, F, B, ("mark", 1), F, A], 1),
}


@pytest.mark.parametrize(("is_first_start", "acts", "expected"), JOB_STEPS.values(), ids=JOB_STEPS)
def test_the_step_is_the_jobs_or_unknown(
    path: Path, is_first_start: bool, acts: list[tuple[Any, ...]], expected: int | None
) -> None:
    box = black_box.BlackBox(path, 0, 1, is_first_start)
    log = recording(box)
    for what, *number in acts:
        if what == "forward":
            with log.span("forward"):
                pass
        else:
            optimizer = lambda at: log.open("optimizer", at)()  # noqa: E731
            calls = {"optimizer": optimizer, "restore": box.go_on_from, "mark": box.mark, "lost": box.lose_count}
            calls[what](*number)
    seen = now_in(path)
    assert seen.completed == expected
    assert seen.has_stepped == any(what in ("optimizer", "mark") for what, *_ in acts)


def test_averages_skip_the_first_step_and_count_a_wait_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("paceline.core.black_box.time.monotonic", lambda: clock[0])
    log = recording(black_box.BlackBox(path, 0, 1))
    for waited in (5.0, 1.0, 3.0):
        with log.span("forward"):
            clock[0] += 2.0
        with log.span("wait"), log.span("bucket wait", 0), log.span("collective"):
            clock[0] += waited
        with log.span("optimizer"), log.span("outer step"), log.span("collective"):
            clock[0] += 0.5
    box = now_in(path)
    assert (box.steps, box.stepped, box.step, box.waited) == (3, clock[0], 5.5, 3.5)
    assert (box.mean_step, box.mean_waited, box.waited_spread) == (4.5, 2.5, 1.0)


# -- ownership ---------------------------------------------------------------------------------------------------------


def test_a_forked_child_does_not_write_to_the_ranks_box(path: Path) -> None:
    box = black_box.BlackBox(path, 0, 1)
    os.waitpid(in_child(lambda: box.span("checkpoint").__enter__()), 0)
    assert now_in(path).phase == "loop"
    box.span("checkpoint").__enter__()
    assert now_in(path).phase == "checkpoint"


def test_the_first_process_owns_the_box_until_it_exits(path: Path) -> None:
    """A program started by a rank inherits its environment."""
    environment = {black_box.FOLDER: str(path.parent), "LOCAL_RANK": "0", "RANK": "4", "WORLD_SIZE": "8"}

    def hold() -> None:
        black_box.BlackBox(path, 4, 8).change(black_box.BUCKET_WAIT, 9)
        time.sleep(60)

    child = in_child(hold)
    while (box := black_box.read_box(path)) is None or box.bucket != 9:
        time.sleep(0.001)
    assert black_box.open_box(environment) is None
    end(child)
    assert black_box.open_box(environment) is not None
    box = now_in(path)
    assert (box.pid, box.rank, box.size, box.phase, box.bucket) == (os.getpid(), 4, 8, "loop", None)
    assert black_box.open_box({}) is None
    assert black_box.open_box(environment | {black_box.FOLDER: ""}) is None
    assert black_box.open_box(environment | {black_box.FOLDER: str(path / "gone")}) is None


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private folder for this user's jobs."""
    monkeypatch.setenv(PARENT, str(tmp_path))
    return tmp_path


def test_a_job_folder_is_removed_with_its_job(parent: Path) -> None:
    assert running_jobs() == {}
    with JobFolder("../run 1", "train.py --lr 0.1", 2) as folder:
        folder.began({0: 11, 1: 12})
        assert running_jobs() == {folder.path: read_note(folder.path)}
        note = running_jobs()[folder.path]
        assert (note.pid, note.title, note.processes) == (os.getpid(), "train.py --lr 0.1", {0: 11, 1: 12})
        assert folder.path.parent == parent
        assert folder.path.stat().st_mode & 0o777 == 0o700
        names = sorted(entry.name for entry in folder.path.iterdir())
        assert names == ["job.json", "lock", "rank-0", "rank-1", "spare"]
        with JobFolder("../run 1", "train.py", 1) as second:
            assert len(running_jobs()) == 2
            assert second.path != folder.path
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("finder", ["launcher", "viewer"])
def test_the_next_launcher_only_removes_folders_of_dead_launchers(parent: Path, finder: str) -> None:
    def launch() -> None:
        JobFolder("killed", "train.py", 2)
        (parent / "made").touch()
        time.sleep(60)

    child = in_child(launch)
    while not (parent / "made").exists():
        time.sleep(0.005)
    (parent / "made").unlink()
    (parent / ".paceline-job-unfinished").mkdir(mode=0o700)
    assert len(running_jobs()) == 1, "its launcher is alive"
    end(child)
    if finder == "launcher":
        JobFolder("next", "train.py", 1).remove()
    else:
        assert running_jobs() == {}
    # The unfinished folder may belong to a launcher that is just starting.
    assert [entry.name for entry in parent.iterdir()] == [".paceline-job-unfinished"]


def test_folders_of_other_users_are_ignored(parent: Path) -> None:
    # Any user may create folders in /dev/shm; another user's folder with our name disabled all restarts.
    (parent / f"paceline-{os.getuid()}").mkdir(0o777)
    opened, linked = parent / "paceline-job-open", parent / "paceline-job-link"
    opened.mkdir()
    opened.chmod(0o777)
    linked.symlink_to(opened)
    with JobFolder("run", "train.py", 1) as folder:
        (opened / "job.json").write_bytes((folder.path / "job.json").read_bytes())
        os.utime(opened, (0, 0))
        assert list(running_jobs()) == [folder.path]
    assert (opened / "job.json").exists()
    assert linked.is_symlink()


@pytest.mark.parametrize("first", ["missing", "a file", "too small"])
def test_the_next_place_is_used_if_the_first_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    places = [tmp_path / "first", tmp_path / "second"]
    places[1].mkdir()
    monkeypatch.setattr(job_directory, "_places", lambda: places)
    if first == "a file":
        places[0].touch()
    elif first == "too small":
        places[0].mkdir()
        about = os.statvfs(tmp_path)
        free = {"f_blocks": about.f_blocks, "f_frsize": 4096}
        # Enough for the folder itself, but not for the copies that ranks will keep.
        sizes = {places[0]: SimpleNamespace(f_bavail=64, **free), places[1]: SimpleNamespace(f_bavail=10**6, **free)}
        monkeypatch.setattr("paceline.core.job_directory.os.statvfs", sizes.__getitem__)
    with JobFolder("run", "train.py", 2) as folder:
        assert folder.path.parent == places[1]
        assert f"{folder.path} ({places[0]}: " in folder.remark
        assert list(running_jobs()) == [folder.path]
    if first == "too small":
        places.pop()
        with JobFolder("run", "train.py", 2) as folder:
            assert (folder.path.parent, folder.remark) == (places[0], ""), "better than no folder"


@pytest.mark.parametrize(("named", "last"), [(True, "memory"), (False, "cache"), (True, "nowhere")])
def test_the_configured_place_comes_first_and_the_user_cache_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], named: bool, last: str
) -> None:
    # Restarts were disabled by a full user-chosen place, or by full disks other than the home disk.
    homes = {"memory": tmp_path / "memory", "cache": tmp_path / "cache" / "paceline"}
    homes["memory"].mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(homes["memory"]))
    monkeypatch.delenv(PARENT, raising=False)
    if named:
        monkeypatch.setenv(PARENT, "/chosen")

    def check_room(place: Path, size: int) -> None:
        if place != homes.get(last):
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(job_directory, "_check_room", check_room)
    first = "/chosen" if named else "/dev/shm"
    if last == "nowhere":
        with pytest.raises(UsageError, match=rf"cannot be made \({first}: full; .*{homes['cache']}: full\); free some"):
            black_boxes("run", ["train.py"], 2).__enter__()
        return
    with black_boxes("run", ["train.py"], 2) as folder:
        assert folder.path.parent == homes[last]
        said = f"note: the job's folder, for what its ranks rescue, is {folder.path} ({first}: full)\n"
        assert capfd.readouterr().err == said


def test_the_box_is_opened_by_the_first_span_and_not_at_import(parent: Path) -> None:
    """Importing paceline has no effect; the first span opens the box without a call in the script."""
    code = f"""
import os, pathlib, sys
for name in [name for name in sys.modules if name == "paceline" or name.startswith("paceline.core")]:
    del sys.modules[name]
import paceline
from paceline.core.black_box import path_of, read_box
from paceline.core.spans import recorder
path = path_of(pathlib.Path(os.environ["{black_box.FOLDER}"]), 0)
assert read_box(path) is None
with recorder.span("forward"):
    assert read_box(path).phase == "forward"
"""
    with JobFolder("run", str(parent), 1) as folder:
        environment = {black_box.FOLDER: str(folder.path), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        done = paceline(parent, program=("-c", code), fork="all", **environment)
        assert done.returncode == 0, done.stderr
