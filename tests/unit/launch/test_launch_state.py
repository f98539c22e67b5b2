"""The rest of the failure report: step and phase of each rank, and the JSON form."""

from __future__ import annotations

import json
import signal

import pytest

from paceline.core.black_box import PHASES, Snapshot
from paceline.core.rank_page import SIZE
from paceline.launch.failure_record import Record
from paceline.launch.job_report import exception_of, failure_of
from paceline.launch.root_cause import NOT_BEGUN, End, State, doings, headline, remarks, state_of


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
def test_state_matches_the_moment_of_the_failure(
    box: Snapshot | None, moment: float, raised: bool, expected: State
) -> None:
    assert state_of(box, moment, raised) == expected


MOMENTS = {
    State(40, "backward", 0.3): "in step 41, backward, for 300 ms",
    State(0, "bucket wait", 12.34, 2): "in step 1, bucket wait 2, for 12.3 s",
    State(None, "forward", 0.0012): "in an unknown step, forward, for 1.2 ms",
    State(3, "loop", 0.0521): "in step 4, in the script's own code, for 52.1 ms",
    State(3, "collective", 1234.5): "in step 4, collective, for 20 min 34 s",
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


def test_ranks_without_boxes_are_omitted() -> None:
    ends = [End(0, -signal.SIGTERM, 5.0, stopped=True), End(1, 3, 5.0)]
    assert remarks(ends) == ["rank 0 was stopped because of rank 1"]
    assert headline(ends) == "rank 1 failed first (exit code 3)"


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
def test_exception_class_is_parsed_from_the_message(
    message: str, usage: bool, expected: tuple[str | None, str]
) -> None:
    exception = exception_of(Record(message, "Traceback", 1.0, usage))
    assert (exception["type"], exception["message"]) == expected
