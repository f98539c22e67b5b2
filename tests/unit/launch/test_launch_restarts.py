"""Restart decisions: restarts without progress are limited; progress is read from records that outlive the ranks."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from insides import (
    BEFORE,
    EARLY_S,
    LIMIT,
    RESCUE,
    SPARE,
    STEPS,
    Cause,
    End,
    Failure,
    Past,
    Reached,
    Record,
    Restarts,
    State,
    StepRecord,
    Verdict,
    cause,
    identity,
    job_folder,
    may_pass,
    record_path,
    records_in,
    verdict,
)

KEY = "0123456789abcdef"


def start(job: Path, completed: Sequence[int], restored: int = 0, ended: bool = False, redone: int = 0) -> None:
    """Write the records of ranks that completed these steps."""
    folder = job / STEPS / KEY
    folder.mkdir(parents=True, exist_ok=True)
    for rank, step in enumerate(completed):
        record = StepRecord(record_path(folder, rank), make=True, folder=job / "checkpoints")
        record.restore(restored, "memory" if restored else None, redone)
        record.complete(step)
        if ended:
            record.has_ended = True


def test_default_limit_is_three_restarts_without_progress(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, None)
    start(tmp_path, [5, 4])
    decided = []
    for _ in range(1 + LIMIT):
        decided.append(restarts.decide(Cause()))
        restarts.begin()
        start(tmp_path, [5, 5], restored=5)
    again = "restarting all ranks from the beginning, 5 steps back, because no rank could save step 5"
    assert decided[-2:] == [f"{again} (restart 3, 3 of 3 without progress)", None]
    assert decided[0] == f"{again} (restart 1)"


def test_only_new_steps_reset_the_restart_count(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, 1)
    for number in range(1, 6):
        start(tmp_path, [number, number - 1], restored=number - 1)
        assert str(restarts.decide(Cause())).endswith(f"(restart {number})")
        restarts.begin()
    # Each start completes the same steps from the beginning, which gains no progress.
    for _ in range(2):
        start(tmp_path, [5, 5])
        decided = restarts.decide(Cause())
        restarts.begin()
    assert decided is None


def test_same_error_at_the_same_step_is_not_retried(tmp_path: Path) -> None:
    mistake, other = Cause("ValueError: x\nscript.py, line 7"), Cause("ValueError: y\nscript.py, line 7")
    restarts = Restarts(tmp_path, 9)
    decided = []
    for step, ended_by in [(5, mistake), (6, mistake), (6, other), (6, Cause()), (6, mistake), (6, mistake)]:
        start(tmp_path, [step, step], restored=step)
        decided.append(restarts.decide(ended_by) is not None)
        restarts.begin()
    assert decided == [True, True, True, True, True, False]
    assert str(restarts.refusal).startswith("the previous start failed with the same error in the same place: the ")


WRONG, FULL, KILLED, LEFT = Cause("ValueError"), Cause("OSError", may_pass=True), Cause(is_kill=True), Cause()
BARE = Cause("ValueError", has_optimizer=False)
NEW, MADE = Reached("a", 0, 0, has_begun=True), Reached("a", 0, 0)
FIVE, SIX = Reached("a", 0, 5, has_begun=True), Reached("a", 5, 6, has_begun=True)
NEW_FOLDER = Reached("b", 0, 5, has_begun=True)
DONE = Reached("a", 0, 5, has_begun=True, has_ended=True)
LONG = 2 * EARLY_S
NOTHING, AFTER_FIVE = Past(), Past({"a": 5}, has_trained=True)


@pytest.mark.parametrize(
    ("failure", "past", "limit", "expected"),
    [
        # A rank's error before the first step of the job.
        (Failure(WRONG, [NEW]), NOTHING, None, Verdict.MISTAKE),
        (Failure(WRONG, [NEW], LONG), NOTHING, 9, Verdict.MISTAKE),  # the Checkpointer confirms it
        (Failure(WRONG, [MADE]), NOTHING, None, Verdict.MISTAKE),
        (Failure(WRONG, [replace(MADE, has_saved=True)]), NOTHING, None, Verdict.RESTART),  # only saves
        (Failure(WRONG, [MADE], LONG), NOTHING, None, Verdict.RESTART),  # with torch's wrapper, it may only save()
        (Failure(Cause("E", step=0)), NOTHING, 9, Verdict.MISTAKE),
        (Failure(Cause("E", step=0), (), LONG), NOTHING, 9, Verdict.RESTART),  # a loop without an optimizer
        (Failure(Cause("E", step=4)), NOTHING, 9, Verdict.RESTART),
        (Failure(Cause("E", step=4), [NEW]), NOTHING, 9, Verdict.RESTART),
        (Failure(BARE), NOTHING, None, Verdict.MISTAKE),
        (Failure(BARE, (), LONG), NOTHING, 9, Verdict.RESTART),  # training may have finished
        (Failure(WRONG), NOTHING, 9, Verdict.RESTART),  # torch's wrapper alone: unknown
        (Failure(WRONG), NOTHING, None, Verdict.OVER),
        (Failure(WRONG, [FIVE]), NOTHING, None, Verdict.RESTART),
        (Failure(WRONG, [Reached("a", 5, 5, has_begun=True)]), NOTHING, None, Verdict.RESTART),  # resumed
        (Failure(WRONG, [NEW]), AFTER_FIVE, None, Verdict.RESTART),  # made steps but saved none
        (Failure(BARE), Past().with_one_more(Failure(Cause(is_kill=True, step=2))), 9, Verdict.RESTART),
        (Failure(FULL, [NEW]), NOTHING, None, Verdict.RESTART),
        (Failure(FULL), NOTHING, 9, Verdict.RESTART),
        (Failure(LEFT, [NEW]), NOTHING, None, Verdict.RESTART),  # caused by another rank or sys.exit
        # A rank killed meanwhile.
        (Failure(KILLED), NOTHING, None, Verdict.RESTART),
        (Failure(KILLED), NOTHING, 0, Verdict.IN_VAIN),
        (Failure(KILLED, (), LONG), NOTHING, None, Verdict.OVER),
        (Failure(KILLED, (), LONG), NOTHING, 2, Verdict.RESTART),
        (Failure(Cause(is_kill=True, step=3)), NOTHING, None, Verdict.OVER),
        (Failure(KILLED, [NEW], LONG), NOTHING, None, Verdict.RESTART),
        # The same error twice.
        (Failure(WRONG, [FIVE]), Past({"a": 5}, 0, ("ValueError", 5)), None, Verdict.REPEATED),
        (Failure(FULL, [FIVE]), Past({"a": 5}, 0, ("OSError", 5)), 9, Verdict.REPEATED),
        (Failure(WRONG, [SIX]), Past({"a": 5}, 0, ("ValueError", 5)), None, Verdict.RESTART),
        (Failure(WRONG), Past({}, 1, ("ValueError", None)), 9, Verdict.REPEATED),
        (Failure(FULL), Past({}, 1, Failure(FULL).error), 9, Verdict.RESTART),  # possibly many steps later
        (Failure(Cause("E", step=7)), Past({}, 1, ("E", 7)), 9, Verdict.REPEATED),
        (Failure(Cause("E", step=8)), Past({}, 1, ("E", 7)), 9, Verdict.RESTART),
        (Failure(LEFT), Past({}, 1, None), 9, Verdict.RESTART),
        # Starts without progress.
        (Failure(LEFT, [FIVE]), Past({"a": 5}, LIMIT), None, Verdict.IN_VAIN),
        (Failure(LEFT, [SIX]), Past({"a": 5}, LIMIT), None, Verdict.RESTART),
        (Failure(LEFT, [SIX]), Past({"a": 5}, 0), 0, Verdict.IN_VAIN),
        (Failure(LEFT, [NEW_FOLDER]), Past({"a": 5}, LIMIT - 1), None, Verdict.IN_VAIN),
        (Failure(LEFT, [replace(NEW_FOLDER, completed=6)]), Past({"a": 5}, LIMIT - 1), None, Verdict.RESTART),
        (Failure(LEFT, [NEW_FOLDER]), Past({"a": 9, "b": 4}, LIMIT - 1), None, Verdict.RESTART),  # both folders advance
        # Stages.
        (Failure(LEFT, [NEW_FOLDER, replace(FIVE, completed=9)]), Past({"a": 9}, LIMIT), None, Verdict.RESTART),
        (Failure(LEFT, [FIVE]), Past({"a": 5}, 1), 2, Verdict.IN_VAIN),
        (Failure(LEFT, [NEW]), Past({}, LIMIT - 1), None, Verdict.RESTART),
        (Failure(WRONG, [NEW_FOLDER]), Past({"a": 5}, 0, ("ValueError", 5)), None, Verdict.REPEATED),
        (Failure(LEFT), AFTER_FIVE, None, Verdict.RESTART),  # it did not reach its Checkpointer again
        (Failure(LEFT, [DONE]), NOTHING, None, Verdict.OVER),
        (Failure(LEFT, [DONE]), NOTHING, 1, Verdict.RESTART),
    ],
)
def test_verdict_of_a_failure(failure: Failure, past: Past, limit: int | None, expected: Verdict) -> None:
    assert verdict(failure, past, limit) is expected


@pytest.mark.parametrize(("limit", "made", "said"), [(None, True, True), (None, False, False), (2, False, True)])
def test_missing_restart_is_explained_if_possible(tmp_path: Path, limit: int | None, made: bool, said: bool) -> None:
    restarts = Restarts(tmp_path, limit)
    if made:
        start(tmp_path, [0, 0])
    assert restarts.decide(BARE) is None
    reason = "an exception before the first step is the script's fault: the ranks are not restarted"
    assert restarts.refusal == (reason if said else None)


def traceback_of(message: str, line: int = 7, kind: str = "RuntimeError") -> Record:
    text = f"{kind}: {message}"
    trace = f'Traceback (most recent call last):\n  File "script.py", line {line}, in <module>\n    work(7)\n{text}\n'
    return Record(text, trace, 5.0)


def test_errors_with_equal_class_and_place_are_the_same() -> None:
    # An error that mentioned a process ID or an address was retried up to the limit.
    first = identity(traceback_of("worker (pid 811) is late"))
    assert identity(traceback_of("worker (pid 20944) is late")) == first
    assert identity(traceback_of("worker (pid 811) is late", line=8)) != first
    assert identity(traceback_of("worker (pid 811) is late", kind="Error2")) != first


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's class."""


def raised_from(error: Exception, origin: BaseException) -> Exception:
    error.__cause__ = origin
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x"), False),
        (KeyError("x"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (FileNotFoundError(2, "no such file"), False),
        (PermissionError(13, "denied"), False),
        (ImportError("no module"), False),
        (OSError(errno.EADDRINUSE, "address in use"), True),
        (OSError(errno.EIO, "input/output error"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (MemoryError(), True),
        (OutOfMemoryError("tried to allocate"), True),
        (RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), True),
        (raised_from(RuntimeError("no data"), ConnectionRefusedError()), True),
        (raised_from(RuntimeError("no data"), KeyError("x")), False),
    ],
)
def test_errors_of_host_device_or_network_may_be_temporary(error: Exception, expected: bool) -> None:
    assert may_pass(error) is expected


RAISED = Record("ValueError: x", "script.py, line 7", 5.0)
PASSING = Record("OSError: x", "script.py, line 7", 5.0, may_pass=True)
LOST = Record("CommunicationError: rank 0 ended", "script.py, line 9", 4.0, blamed=(0,))


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([End(0, 1, 6.0, record=RAISED)], Cause(identity(RAISED))),
        ([End(0, 1, 6.0, record=PASSING)], Cause(identity(PASSING), may_pass=True, rank=0)),
        ([End(1, 1, 5.0, record=LOST), End(0, 1, 6.0, record=RAISED)], Cause(identity(RAISED))),
        ([End(0, -9, 6.0), End(1, 1, 6.1, record=LOST)], Cause(is_kill=True, rank=0)),
        ([End(0, -9, 6.0, state=State(0)), End(1, -15, 6.1, stopped=True)], Cause(is_kill=True, step=0, rank=0)),
        (
            [End(0, -9, 6.0, state=State(3)), End(1, -15, 6.1, True, state=State(4))],
            Cause(is_kill=True, step=3, rank=0),
        ),
        ([End(0, 1, 6.0, record=RAISED, state=State(0))], Cause(identity(RAISED), step=0)),
        ([End(0, 1, 6.0, record=replace(RAISED, has_optimizer=False))], Cause(identity(RAISED), has_optimizer=False)),
        ([End(1, 1, 5.0, record=LOST)], Cause()),
        # It blocked the other rank and was ended for that.
        ([End(1, 1, 5.0, record=LOST), End(0, -15, 6.0, stopped=True)], Cause(rank=0)),
        ([End(0, 3, 6.0)], Cause(rank=0)),
        ([], Cause()),
    ],
)
def test_cause_is_the_first_error_of_the_rank_itself(ends: list[End], expected: Cause) -> None:
    assert cause(ends) == expected


@pytest.mark.parametrize(
    ("rescued", "on_disk", "said"),
    [
        ([7], [5], " from step 7, rescued from memory"),
        ([], [5, 7], " from step 7, saved on disk"),  # rescued to disk, as memory was full
        ([7], [7], " from step 7, saved on disk"),
        ([3], [5], " from step 5, saved on disk, 2 steps back, because no rank could save step 7"),
        ([6], [5], " from step 6, rescued from memory, 1 step back, because no rank could save step 7"),
        ([], [], " from the beginning, 7 steps back, because no rank could save step 7"),
    ],
)
def test_message_names_the_step_to_resume(tmp_path: Path, rescued: list[int], on_disk: list[int], said: str) -> None:
    # With 1 MiB of /dev/shm the message named a step in memory, but the run resumed from an older one on disk.
    start(tmp_path, [7, 6])
    for folder, steps in ((tmp_path / RESCUE / KEY, rescued), (tmp_path / "checkpoints", on_disk)):
        for step in steps:
            (folder / f"step-{step:08d}").mkdir(parents=True)
    assert Restarts(tmp_path, None).decide(Cause()) == f"restarting all ranks{said} (restart 1)"


def test_record_can_be_written_when_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / SPARE).mkdir()
    record_path(tmp_path / SPARE, 0).write_bytes(bytes(4096))
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if os.fstat(descriptor).st_size < len(data):  # new pages
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data)

    restarts = Restarts(tmp_path, None)
    monkeypatch.setattr("paceline.core.step_progress.os.write", full)
    start(tmp_path, [1])
    for step in range(2, 5):  # each start reuses the page of the start before last
        restarts.begin()
        if step == 2:
            with pytest.raises(OSError, match="full"):
                start(tmp_path, [step])
            record_path(tmp_path / SPARE, 0).write_bytes(bytes(4096))
        start(tmp_path, [step])
        assert [record.completed for record in restarts.reached()] == [step]
        assert [record.completed for record in records_in(tmp_path / BEFORE / KEY)] == [step - 1]


def test_job_that_should_save_but_never_did_is_detected(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, 5)
    start(tmp_path, [5, 5], ended=True)
    assert restarts.unsaved() is None
    record = StepRecord(record_path(tmp_path / STEPS / KEY, 1), make=True, folder=tmp_path / "checkpoints")
    record.complete(5)
    record.has_lost_save = True
    record.has_ended = True
    assert restarts.unsaved() == tmp_path / "checkpoints"
    assert restarts.decide(Cause()) is None, "the next start would save nothing either"
    record.is_durable = True
    assert restarts.unsaved() is None


def test_records_of_the_previous_start_are_kept_for_the_next(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, None)
    start(tmp_path, [7, 6], redone=2)
    restarts.begin()
    assert [record.completed for record in records_in(tmp_path / BEFORE / KEY)] == [7, 6]
    assert [record.redone for record in records_in(tmp_path / BEFORE / KEY)] == [2, 2]
    assert restarts.reached() == []
    restarts.begin()  # a start that failed before writing a record changes nothing
    assert [record.completed for record in records_in(tmp_path / BEFORE / KEY)] == [7, 6]


def test_no_wait_for_a_finished_or_impossible_rescue(tmp_path: Path) -> None:
    looks: list[float] = []
    restarts = Restarts(tmp_path, None)
    restarts.wait_for_rescue(lambda: [0], looks.append, list)  # no records
    start(tmp_path, [7, 6])
    restarts.wait_for_rescue(list, looks.append, list)  # no rank is left
    Restarts(tmp_path, 0).wait_for_rescue(lambda: [0], looks.append, list)  # no restart will follow
    assert looks == []

    def save(seconds: float) -> None:
        looks.append(seconds)
        (tmp_path / RESCUE / KEY / "step-00000007").mkdir(parents=True)

    restarts.wait_for_rescue(lambda: [0], save, list)
    assert len(looks) == 1


@pytest.mark.parametrize("broken", [b"", b"x" * 4096])
def test_damaged_record_is_ignored(broken: bytes, tmp_path: Path) -> None:
    start(tmp_path, [7, 6])
    record_path(tmp_path / STEPS / KEY, 1).write_bytes(broken)
    assert [record.completed for record in records_in(tmp_path / STEPS / KEY)] == [7]


def test_ranks_share_a_job_only_on_the_same_host(tmp_path: Path) -> None:
    here = {"PACELINE_BLACK_BOX": str(tmp_path), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert job_folder(here) == tmp_path
    assert job_folder(here | {"WORLD_SIZE": "4"}) is None
    assert job_folder(here | {"PACELINE_BLACK_BOX": ""}) is None
    assert job_folder({}) is None
