"""Failure reports: how a rank ends, its step and phase, overlong messages, and the JSON form."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from insides import (
    NOT_BEGUN,
    PHASES,
    SIZE,
    End,
    Record,
    Snapshot,
    State,
    doings,
    exception_of,
    failure_of,
    failure_record,
    headline,
    remarks,
    state_of,
)
from paceline.errors import CommunicationError, DesyncError, WorldError
from processes import paceline, script


def test_record_round_trip_and_torch_error_files(tmp_path: Path) -> None:
    path = str(tmp_path / "error.json")
    note = failure_record.Record("ValueError: x", "Traceback …", 1234.5, usage=True)
    failure_record.write(path, note)
    assert failure_record.read(path) == note
    content = json.loads(Path(path).read_text())
    for ours in ("at", "usage"):
        del content[ours]
    Path(path).write_text(json.dumps(content))
    assert failure_record.read(path) == failure_record.Record("ValueError: x", "Traceback …", 1234.0)


def through(*errors: BaseException) -> BaseException:
    """Return the last of `errors`, each raised while handling its predecessor."""
    last: BaseException | None = None
    for error in errors:
        error.__context__ = last
        last = error
    assert last is not None
    return last


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:17325"
CONSEQUENCES = {
    "our own": (CommunicationError("a rank ended").because_of([2]), (2,)),
    "our own without names": (CommunicationError("a rank ended"), ()),
    "another's backward ended": (DesyncError("backward was ended on rank 1").because_of([1]), (1,)),
    "Gloo's": (RuntimeError(GLOO), ()),
    "Gloo's time-out": (
        RuntimeError(GLOO.replace("Connection closed by peer", "Timed out waiting 500ms for recv")),
        (),
    ),
    "a store's": (dist.DistStoreError("wait timeout after 500ms, keys: /default_pg/0//0"), ()),
    "a socket's": (dist.DistNetworkError("failed to recv, got 0 bytes"), ()),
    "raised while a lost peer was handled": (through(CommunicationError("x").because_of([3]), KeyError("y")), (3,)),
    "an error of its own": (ValueError("x"), None),
    "ranks out of step": (DesyncError("ranks differ"), None),
    "a file server's": (ConnectionResetError(104, "Connection reset by peer"), None),
    "a script's about its own connection": (RuntimeError("download failed: connection reset"), None),
    "Gloo's of sizes that differ": (RuntimeError("[enforce fail at gloo/pair.cc:4] op.nbytes. 4000 vs 400"), None),
}


@pytest.mark.parametrize(("error", "blamed"), CONSEQUENCES.values(), ids=CONSEQUENCES)
def test_consequences_are_known_by_class(error: BaseException, blamed: tuple[int, ...] | None, tmp_path: Path) -> None:
    # Paceline's own messages did not match the patterns, so ranks that lost a peer were blamed for its death.
    path = str(tmp_path / "error.json")
    failure_record.write(path, failure_record.of(error))
    note = failure_record.read(path)
    assert note is not None
    assert note.blamed == blamed


def test_consequence_is_never_a_usage_error() -> None:
    # On waiting ranks main_first raises a WorldError, which is a UsageError; it hid the error of rank 0.
    assert not failure_record.of(WorldError("the block failed on rank 0").because_of([0])).usage


def test_truncated_records_are_ignored_and_a_full_disk_hides_no_error(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert failure_record.read(str(path)) is None
    for text in ("", '{"message": {"mess', "[]", "{}", '{"message": {}}'):
        path.write_text(text)
        assert failure_record.read(str(path)) is None
    failure_record.write(os.path.join(str(tmp_path), "no", "folder"), failure_record.of(ValueError("x")))


TURNS = """
import os, torch, paceline
world = paceline.init()
torch.manual_seed(3)
wrappers = paceline.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel
models = [wrapper(torch.nn.Linear(2, 1)) for wrapper in wrappers]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
checkpointer = paceline.Checkpointer("saved")
for name, part in zip("abcd", [*models, *optimizers]):
    checkpointer.register(name, part)
step = checkpointer.restore() if checkpointer.steps() else 0
strike = {"0": 3, "1": 8, "2": 15}.get(os.environ["TORCHELASTIC_RESTART_COUNT"])
while step < 16:
    for model, optimizer in zip(models, optimizers):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step + 1 == strike and world.rank == 1:
        raise ValueError(f"in step {strike}")
    step = checkpointer.step()
checkpointer.close()
"""


@pytest.mark.slow
def test_step_counts_across_restarts_and_alternating_optimizers(tmp_path: Path) -> None:
    # It restarted from 1, and counted twice for two optimizers; with torch's wrapper it was always 1.
    done = paceline(tmp_path, "run", "--nproc", "2", "--report", "report.json", script(tmp_path, TURNS), fork="all")
    assert done.returncode == 0, done.stderr
    failures = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert [failure["first"]["step"] for failure in failures] == [3, 8, 15]
    assert "into the script's own code of step 15" in done.stderr


# -- step and phase of each rank ---------------------------------------------------------------------------------------


def snapshot(phase: str, since: float, bucket: int = -1, raised: str | None = None) -> Snapshot:
    box = Snapshot(bytearray(SIZE))
    box.phase_index, box.since, box.bucket_number, box.job_step = PHASES.index(phase), since, bucket, 40
    if raised is not None:
        box.raised_phase, box.raised_bucket, box.raised_since, box.raised_until = PHASES.index(raised), -1, 8.5, since
    return box


LEFT_FORWARD = snapshot("loop", 9.0, raised="forward")

# The box of a rank, the time of the failure, whether the rank may have raised, and the resulting state.
STATES = {
    "killed in backward": (snapshot("backward", 9.0), 9.25, False, State(40, "backward", 0.25)),
    "waits for a bucket": (snapshot("bucket wait", 9.0, 3), 10.0, True, State(40, "bucket wait", 1.0, 3)),
    "raised in forward": (LEFT_FORWARD, 9.1, True, State(40, "forward", 0.5)),
    "handled an error of forward, and was killed": (LEFT_FORWARD, 9.5, False, State(40, "loop", 0.5)),
    "handled an error of forward, and raised another long after": (LEFT_FORWARD, 29.0, True, State(40, "loop", 20.0)),
    "looked at before its phase began": (snapshot("forward", 9.0), 8.9, True, State(40, "forward", 0.0)),
    "has no box open": (None, 9.0, True, NOT_BEGUN),
}


@pytest.mark.parametrize(("box", "moment", "raised", "expected"), STATES.values(), ids=STATES)
def test_state_is_of_the_moment_of_failure(box: Snapshot | None, moment: float, raised: bool, expected: State) -> None:
    assert state_of(box, moment, raised) == expected


MOMENTS = {
    State(40, "backward", 0.3): "300 ms into backward of step 41",
    State(0, "bucket wait", 12.34, 2): "12.3 s into the wait for bucket 2 of step 1",
    State(None, "forward", 0.0012): "1.2 ms into forward of an unknown step",
    State(3, "loop", 0.0521): "52.1 ms into the script's own code of step 4",
    State(3, "collective", 1234.5): "20 min 34 s into the collective of step 4",
    NOT_BEGUN: "before its first step",
}


@pytest.mark.parametrize(("state", "text"), MOMENTS.items(), ids=MOMENTS.values())
def test_headline_states_the_step_and_phase_of_the_first_rank(state: State, text: str) -> None:
    ends = [End(0, -signal.SIGTERM, 5.0, stopped=True), End(1, 3, 5.0, state=state)]
    assert headline(ends) == f"rank 1 failed first (exit code 3) {text}"


def test_ranks_in_equal_states_share_a_line() -> None:
    others = {0: State(40, "wait"), 2: State(40, "bucket wait", 0.2, 1), 3: State(40, "data wait"), 4: NOT_BEGUN}
    assert doings((rank, state.doing) for rank, state in others.items()) == [
        "ranks 0, 2: waiting for gradients in step 41",
        "rank 3: waiting for data in step 41",
        "rank 4: had not begun the first step",
    ]


def test_other_ranks_are_listed_in_order_including_exited_ones() -> None:
    lost = Record("CommunicationError: rank 1 has ended", "Traceback", 5.0, blamed=(1,))
    ends = [
        End(2, 1, 5.0, record=lost, state=State(40, "bucket wait")),
        End(0, 1, 5.1, record=lost, state=State(40, "wait")),
        End(1, 0, 4.0, state=State(40, "loop")),
    ]
    assert remarks(ends)[:2] == ["ranks 0, 2: waiting for gradients in step 41", "rank 1: left after step 40"]


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_json_failure_has_the_first_rank_and_the_others() -> None:
    lost = Record("CommunicationError: rank 1 has ended", "Traceback 0", 5.2, blamed=(1,))
    ends = [
        End(2, -signal.SIGTERM, 6.0, stopped=True, state=State(40, "data wait", 0.5)),
        End(0, 1, 5.5, record=lost, state=State(40, "bucket wait", 0.25, 2)),
        End(1, 1, 5.4, record=Record("ValueError: x: y", "Traceback 1", 5.0), state=State(40, "backward", 0.125)),
        End(3, -signal.SIGKILL, 5.6),
    ]
    entry = failure_of(ends, "here")
    assert json.loads(json.dumps(entry)) == entry
    assert (entry["time"], entry["summary"]) == (5.0, headline(ends))
    assert entry["first"] == {
        "rank": 1,
        "host": "here",
        "kind": "exception",
        "exit_code": 1,
        "signal": None,
        "exception": {"type": "ValueError", "message": "x: y"},
        "traceback": "Traceback 1",
        "step": 41,
        "phase": "backward",
        "phase_seconds": 0.125,
        "bucket": None,
        "hang": None,
        "stacks": None,
    }
    fields = ("rank", "kind", "exit_code", "signal", "step", "phase", "bucket")
    assert [tuple(other[field] for field in fields) for other in entry["others"]] == [
        (0, "consequence", 1, None, 41, "bucket wait", 2),
        (2, "stopped", None, None, 41, "data wait", None),
        (3, "signal", None, "SIGKILL", None, None, None),
    ]


def test_missing_or_exited_rank_comes_first_and_its_waiting_peer_is_a_consequence() -> None:
    lost = Record("CommunicationError: rank 1 has ended", "Traceback", 5.0, blamed=(1,))
    for missing, kind in ((End(1, 0, 4.0), "left"), (End(1, -signal.SIGKILL, 9.0, stopped=True), "absent")):
        entry = failure_of([End(0, 1, 5.0, record=lost), missing], "here")
        assert (entry["first"]["rank"], entry["first"]["kind"]) == (1, kind)
        assert [(other["rank"], other["kind"]) for other in entry["others"]] == [(0, "consequence")]


@pytest.mark.parametrize(
    ("message", "usage", "expected"),
    [
        ("torch.OutOfMemoryError: no\nroom", False, ("torch.OutOfMemoryError", "no\nroom")),
        ("AssertionError: ", False, ("AssertionError", "")),
        ("lr: -1 is negative", True, ("UsageError", "lr: -1 is negative")),
        ("terminate called: what", False, (None, "terminate called: what")),
    ],
)
def test_exception_class_comes_from_the_message(message: str, usage: bool, expected: tuple[str | None, str]) -> None:
    exception = exception_of(Record(message, "Traceback", 1.0, usage))
    assert (exception["type"], exception["message"]) == expected


# -- overlong messages, and exceptions whose message cannot be formatted -----------------------------------------------


LONG = 'try: raise KeyError("ACGT" * 250_000)\nexcept KeyError as error: raise ValueError("文" * 100_000) from error'


def test_long_errors_are_truncated_everywhere(tmp_path: Path) -> None:
    # A regular expression took quadratic time: 90 s for 100,000 characters, while signals were ignored.
    name = script(tmp_path, LONG)
    done = paceline(tmp_path, "run", "--report", "report.json", name, fork="all")
    assert done.returncode in (1, 2)
    assert "error: rank 0 failed first (exit code 1: " in done.stderr
    assert len(done.stderr) < 20_000
    assert (tmp_path / "report.json").stat().st_size < 100_000
    first = json.loads((tmp_path / "report.json").read_text())["failures"][0]["first"]
    assert first["exception"]["type"] == "ValueError"


def test_headline_fits_on_one_terminal_line() -> None:
    record = failure_record.Record("ValueError: unknown column\r\nname\r", "", 0.0)
    assert End(0, 1, 0.0, record=record).detail == "exit code 1: ValueError: unknown column"


WITHOUT_A_MESSAGE = {
    "raises": "def __str__(self): raise RuntimeError('no message')",
    "custom attributes": "def __getattr__(self, name): return {}[name]",
}


@pytest.mark.parametrize("body", WITHOUT_A_MESSAGE.values(), ids=WITHOUT_A_MESSAGE)
def test_exception_with_failing_str_is_named_with_its_traceback(body: str) -> None:
    # Only "exit code 1" was reported, without the exception.
    kinds: dict[str, type[Exception]] = {}
    exec(f"class Odd(Exception):\n    {body}\n", kinds)
    with pytest.raises(kinds["Odd"]) as raised:
        raise kinds["Odd"]
    record = failure_record.of(raised.value)
    assert End(0, 1, 0.0, record=record).detail.startswith("exit code 1: Odd")
    assert 'raise kinds["Odd"]' in record.trace
