"""When ranks are started again: counted while nothing is gained, told by records that outlive the ranks."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.step_progress import BEFORE, RESCUE, SPARE, STEPS, StepRecord, job_folder, record_path, records_in
from paceline.errors import WrongComputation
from paceline.launch import failure_record
from paceline.launch.failure_record import Record, may_pass
from paceline.launch.restart_policy import Restarts
from paceline.launch.root_cause import End, State, cause, identity
from paceline.launch.verdict import EARLY_S, LIMIT, Cause, Failure, Past, Reached, Verdict, verdict

KEY = "0123456789abcdef"


def start(job: Path, completed: Sequence[int], restored: int = 0, ended: bool = False, redone: int = 0) -> None:
    """Leave the records of ranks that completed these steps."""
    folder = job / STEPS / KEY
    folder.mkdir(parents=True, exist_ok=True)
    for rank, step in enumerate(completed):
        record = StepRecord(record_path(folder, rank), make=True, folder=job / "checkpoints")
        record.restore(restored, "memory" if restored else None, redone)
        record.complete(step)
        if ended:
            record.has_ended = True


def test_ranks_that_do_not_tell_their_steps_are_started_again_only_if_the_user_says_so(tmp_path: Path) -> None:
    assert Restarts(tmp_path, None).decide(Cause()) is None
    restarts = Restarts(tmp_path, 2)
    assert restarts.decide(Cause()) == "starting all ranks again (restart 1 of 2)"
    assert restarts.decide(Cause()) == "starting all ranks again (restart 2 of 2)"
    assert restarts.decide(Cause()) is None
    assert restarts.count == 2


def test_by_default_a_start_without_progress_is_repeated_three_times(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, None)
    start(tmp_path, [5, 4])
    decided = []
    for _ in range(1 + LIMIT):
        decided.append(restarts.decide(Cause()))
        restarts.begin()
        start(tmp_path, [5, 5], restored=5)
    again = "starting all ranks again from the beginning, 5 steps back, because no rank could save step 5"
    assert decided[-2:] == [f"{again} (restart 3, 3 of 3 without progress)", None]
    assert decided[0] == f"{again} (restart 1)"


def test_progress_sets_the_count_back_and_only_steps_that_are_new_are_progress(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, 1)
    for number in range(1, 6):
        start(tmp_path, [number, number - 1], restored=number - 1)
        assert str(restarts.decide(Cause())).endswith(f"(restart {number})")
        restarts.begin()
    # From the beginning to the same step, again and again: each start completes steps, and nothing is gained.
    for _ in range(2):
        start(tmp_path, [5, 5])
        decided = restarts.decide(Cause())
        restarts.begin()
    assert decided is None


def test_the_same_error_at_the_same_step_is_not_retried(tmp_path: Path) -> None:
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
        # An error of a rank before any step of the job.
        (Failure(WRONG, [NEW]), NOTHING, None, Verdict.MISTAKE),
        (Failure(WRONG, [NEW], LONG), NOTHING, 9, Verdict.MISTAKE),  # a Checkpointer knows for sure
        (Failure(WRONG, [MADE]), NOTHING, None, Verdict.MISTAKE),
        (Failure(WRONG, [replace(MADE, has_saved=True)]), NOTHING, None, Verdict.RESTART),  # it only saves
        (Failure(WRONG, [MADE], LONG), NOTHING, None, Verdict.RESTART),  # it may only save(), with torch's wrapper
        (Failure(Cause("E", step=0)), NOTHING, 9, Verdict.MISTAKE),
        (Failure(Cause("E", step=0), (), LONG), NOTHING, 9, Verdict.RESTART),  # a loop without an optimizer
        (Failure(Cause("E", step=4)), NOTHING, 9, Verdict.RESTART),
        (Failure(Cause("E", step=4), [NEW]), NOTHING, 9, Verdict.RESTART),
        (Failure(BARE), NOTHING, None, Verdict.MISTAKE),
        (Failure(BARE, (), LONG), NOTHING, 9, Verdict.RESTART),  # its training may have ended
        (Failure(WRONG), NOTHING, 9, Verdict.RESTART),  # torch's wrapper alone: nobody knows
        (Failure(WRONG), NOTHING, None, Verdict.OVER),
        (Failure(WRONG, [FIVE]), NOTHING, None, Verdict.RESTART),
        (Failure(WRONG, [Reached("a", 5, 5, has_begun=True)]), NOTHING, None, Verdict.RESTART),  # it was resumed
        (Failure(WRONG, [NEW]), AFTER_FIVE, None, Verdict.RESTART),  # nothing was saved, but steps were made
        (Failure(BARE), Past().with_one_more(Failure(Cause(is_kill=True, step=2))), 9, Verdict.RESTART),
        (Failure(FULL, [NEW]), NOTHING, None, Verdict.RESTART),
        (Failure(FULL), NOTHING, 9, Verdict.RESTART),
        (Failure(LEFT, [NEW]), NOTHING, None, Verdict.RESTART),  # because of another rank, or sys.exit
        # A rank that is killed then.
        (Failure(KILLED), NOTHING, None, Verdict.RESTART),
        (Failure(KILLED), NOTHING, 0, Verdict.IN_VAIN),
        (Failure(KILLED, (), LONG), NOTHING, None, Verdict.OVER),
        (Failure(KILLED, (), LONG), NOTHING, 2, Verdict.RESTART),
        (Failure(Cause(is_kill=True, step=3)), NOTHING, None, Verdict.OVER),
        (Failure(KILLED, [NEW], LONG), NOTHING, None, Verdict.RESTART),
        # The same error again.
        (Failure(WRONG, [FIVE]), Past({"a": 5}, 0, ("ValueError", 5)), None, Verdict.REPEATED),
        (Failure(FULL, [FIVE]), Past({"a": 5}, 0, ("OSError", 5)), 9, Verdict.REPEATED),
        (Failure(WRONG, [SIX]), Past({"a": 5}, 0, ("ValueError", 5)), None, Verdict.RESTART),
        (Failure(WRONG), Past({}, 1, ("ValueError", None)), 9, Verdict.REPEATED),
        (Failure(FULL), Past({}, 1, Failure(FULL).error), 9, Verdict.RESTART),  # perhaps many steps later
        (Failure(Cause("E", step=7)), Past({}, 1, ("E", 7)), 9, Verdict.REPEATED),
        (Failure(Cause("E", step=8)), Past({}, 1, ("E", 7)), 9, Verdict.RESTART),
        (Failure(LEFT), Past({}, 1, None), 9, Verdict.RESTART),
        # Starts that gain nothing.
        (Failure(LEFT, [FIVE]), Past({"a": 5}, LIMIT), None, Verdict.IN_VAIN),
        (Failure(LEFT, [SIX]), Past({"a": 5}, LIMIT), None, Verdict.RESTART),
        (Failure(LEFT, [SIX]), Past({"a": 5}, 0), 0, Verdict.IN_VAIN),
        (Failure(LEFT, [NEW_FOLDER]), Past({"a": 5}, LIMIT - 1), None, Verdict.IN_VAIN),
        (Failure(LEFT, [replace(NEW_FOLDER, completed=6)]), Past({"a": 5}, LIMIT - 1), None, Verdict.RESTART),
        (Failure(LEFT, [NEW_FOLDER]), Past({"a": 9, "b": 4}, LIMIT - 1), None, Verdict.RESTART),  # both folders go on
        (
            Failure(LEFT, [NEW_FOLDER, replace(FIVE, completed=9)]),
            Past({"a": 9}, LIMIT),
            None,
            Verdict.RESTART,
        ),  # stages
        (Failure(LEFT, [FIVE]), Past({"a": 5}, 1), 2, Verdict.IN_VAIN),
        (Failure(LEFT, [NEW]), Past({}, LIMIT - 1), None, Verdict.RESTART),
        (Failure(WRONG, [NEW_FOLDER]), Past({"a": 5}, 0, ("ValueError", 5)), None, Verdict.REPEATED),
        (Failure(LEFT), AFTER_FIVE, None, Verdict.RESTART),  # it did not come to its Checkpointer again
        (Failure(LEFT, [DONE]), NOTHING, None, Verdict.OVER),
        (Failure(LEFT, [DONE]), NOTHING, 1, Verdict.RESTART),
    ],
)
def test_what_follows_from_a_failure(failure: Failure, past: Past, limit: int | None, expected: Verdict) -> None:
    assert verdict(failure, past, limit) is expected


@pytest.mark.parametrize(("limit", "made", "said"), [(None, True, True), (None, False, False), (2, False, True)])
def test_why_there_is_no_restart_is_said_only_if_there_could_be_one(
    tmp_path: Path, limit: int | None, made: bool, said: bool
) -> None:
    restarts = Restarts(tmp_path, limit)
    if made:
        start(tmp_path, [0, 0])
    assert restarts.decide(BARE) is None
    told = "an exception before the first step is the script's fault: the ranks are not started again"
    assert restarts.refusal == (told if said else None)


def traceback_of(message: str, line: int = 7, kind: str = "RuntimeError") -> Record:
    text = f"{kind}: {message}"
    trace = f'Traceback (most recent call last):\n  File "script.py", line {line}, in <module>\n    work(7)\n{text}\n'
    return Record(text, trace, 5.0)


def test_errors_are_the_same_if_class_and_place_are() -> None:
    # An error that named a process or an address was retried to the limit.
    first = identity(traceback_of("worker (pid 811) is late"))
    assert identity(traceback_of("worker (pid 20944) is late")) == first
    assert identity(traceback_of("worker (pid 811) is late", line=8)) != first
    assert identity(traceback_of("worker (pid 811) is late", kind="Error2")) != first


class OutOfMemoryError(RuntimeError):
    """Called as torch's."""


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
        (WrongComputation("rank 1 (cpu of host a) computed other gradients", (1,)), True),
        (RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), True),
        (raised_from(RuntimeError("no data"), ConnectionRefusedError()), True),
        (raised_from(RuntimeError("no data"), KeyError("x")), False),
    ],
)
def test_an_error_of_the_host_a_device_or_the_network_may_pass(error: Exception, expected: bool) -> None:
    assert may_pass(error) is expected


def test_of_two_ranks_that_may_be_wrong_none_is_to_blame(tmp_path: Path) -> None:
    """The one that was faster to raise was once left out, and the job went on alone on the other, maybe wrong one."""
    for ranks, expected in (((1,), False), ((0, 1), True)):
        record = failure_record.of(WrongComputation("x", ranks))
        failure_record.write(str(tmp_path / "record"), record)
        assert failure_record.read(str(tmp_path / "record")) == record
        assert record.is_one_of is expected


RAISED = Record("ValueError: x", "script.py, line 7", 5.0)
PASSING = Record("OSError: x", "script.py, line 7", 5.0, may_pass=True)
LOST = Record("CommunicationError: rank 0 ended", "script.py, line 9", 4.0, blamed=(0,))


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([End(0, 1, 6.0, record=RAISED)], Cause(identity(RAISED))),
        ([End(0, 1, 6.0, record=PASSING)], Cause(identity(PASSING), may_pass=True, rank=0)),
        ([End(0, 1, 6.0, record=replace(PASSING, is_one_of=True))], Cause(identity(PASSING), may_pass=True)),
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
        # It kept the other waiting, and was ended for that.
        ([End(1, 1, 5.0, record=LOST), End(0, -15, 6.0, stopped=True)], Cause(rank=0)),
        ([End(0, 3, 6.0)], Cause(rank=0)),
        ([], Cause()),
    ],
)
def test_the_cause_is_the_first_ranks_own_error(ends: list[End], expected: Cause) -> None:
    assert cause(ends) == expected


@pytest.mark.parametrize(
    ("rescued", "on_disk", "said"),
    [
        ([7], [5], " from step 7, which is in memory"),
        ([], [5, 7], " from step 7, which is on disk"),  # where the rescue went, as memory was full
        ([7], [7], " from step 7, which is on disk"),
        ([3], [5], " from step 5, which is on disk, 2 steps back, because no rank could save step 7"),
        ([6], [5], " from step 6, which is in memory, 1 step back, because no rank could save step 7"),
        ([], [], " from the beginning, 7 steps back, because no rank could save step 7"),
    ],
)
def test_a_restart_says_which_step_its_ranks_will_find(
    tmp_path: Path, rescued: list[int], on_disk: list[int], said: str
) -> None:
    # With 1 MiB of /dev/shm the message said a step in memory, and the run went on from one on disk.
    start(tmp_path, [7, 6])
    for folder, steps in ((tmp_path / RESCUE / KEY, rescued), (tmp_path / "checkpoints", on_disk)):
        for step in steps:
            (folder / f"step-{step:08d}").mkdir(parents=True)
    assert Restarts(tmp_path, None).decide(Cause()) == f"starting all ranks again{said} (restart 1)"


def test_a_record_finds_room_when_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for step in range(2, 5):  # each start has the page of the one before the last
        restarts.begin()
        if step == 2:
            with pytest.raises(OSError, match="full"):
                start(tmp_path, [step])
            record_path(tmp_path / SPARE, 0).write_bytes(bytes(4096))
        start(tmp_path, [step])
        assert [each.completed for each in restarts.reached()] == [step]
        assert [record.completed for record in records_in(tmp_path / BEFORE / KEY)] == [step - 1]


def test_a_job_that_was_to_save_and_has_saved_nothing_is_known(tmp_path: Path) -> None:
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


def test_the_records_of_the_start_before_are_kept_for_the_next_one(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, None)
    start(tmp_path, [7, 6], redone=2)
    restarts.begin()
    assert [record.completed for record in records_in(tmp_path / BEFORE / KEY)] == [7, 6]
    assert [record.redone for record in records_in(tmp_path / BEFORE / KEY)] == [2, 2]
    assert restarts.reached() == []
    restarts.begin()  # a start that failed before it had a record changes nothing
    assert [record.completed for record in records_in(tmp_path / BEFORE / KEY)] == [7, 6]


def test_nobody_waits_for_a_rescue_that_is_done_or_impossible(tmp_path: Path) -> None:
    looks: list[float] = []
    restarts = Restarts(tmp_path, None)
    restarts.wait_for_rescue(lambda: [0], looks.append, list)  # no records
    start(tmp_path, [7, 6])
    restarts.wait_for_rescue(list, looks.append, list)  # no rank is left
    Restarts(tmp_path, 0).wait_for_rescue(lambda: [0], looks.append, list)  # nothing will be started again
    assert looks == []

    def save(seconds: float) -> None:
        looks.append(seconds)
        (tmp_path / RESCUE / KEY / "step-00000007").mkdir(parents=True)

    restarts.wait_for_rescue(lambda: [0], save, list)
    assert len(looks) == 1


@pytest.mark.parametrize("broken", [b"", b"x" * 4096])
def test_a_record_that_is_damaged_is_left_out(broken: bytes, tmp_path: Path) -> None:
    start(tmp_path, [7, 6])
    record_path(tmp_path / STEPS / KEY, 1).write_bytes(broken)
    assert [record.completed for record in records_in(tmp_path / STEPS / KEY)] == [7]


def test_a_record_keeps_the_wishes_of_two_steps_because_a_rank_may_be_one_ahead(tmp_path: Path) -> None:
    record = StepRecord(record_path(tmp_path, 0), make=True)
    seen = StepRecord(record_path(tmp_path, 0))
    record.prepare(4, 1)
    record.prepare(5, 2)
    assert (seen.prepared, seen.wish(4), seen.wish(5)) == (5, 1, 2)
    assert seen.pid == os.getpid()


def test_ranks_share_a_job_only_if_all_are_on_its_host(tmp_path: Path) -> None:
    here = {"PACELINE_BLACK_BOX": str(tmp_path), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert job_folder(here) == tmp_path
    assert job_folder(here | {"WORLD_SIZE": "4"}) is None
    assert job_folder(here | {"PACELINE_BLACK_BOX": ""}) is None
    assert job_folder({}) is None
