"""What hosts tell each other of a failed start."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from paceline.launch.failures.root_cause import End
from paceline.launch.multi_host import cause
from paceline.launch.rank.failure_record import Record

LOST = Record("CommunicationError: gone", "30 lines", 3.0, blamed=(1,))
KILLED = End(1, -signal.SIGKILL, 2.0)
WRONG = End(0, 1, 2.5, record=Record("ValueError: wrong", "ten lines", 2.4, may_pass=True))


def test_ends_arrive_at_other_hosts_as_they_were_but_for_tracebacks() -> None:
    told = cause.HostEnds("a", [KILLED, WRONG, End(2, 1, 3.1, record=LOST), End(3, 0, 4.0, leaving=3.9)])
    heard = cause.decoded(cause.encoded(told))
    assert heard is not None
    assert heard.host == "a"
    assert [end.detail for end in heard.ends] == [end.detail for end in told.ends]
    assert [(end.suspicion, end.when, end.has_left) for end in heard.ends] == [
        (end.suspicion, end.when, end.has_left) for end in told.ends
    ]
    assert not any("lines" in end.record.trace for end in heard.ends if end.record)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"host": "a"}', '{"host": "a", "ends": [{}]}', '{"host": 1, "ends": 2}']
)
def test_what_a_stranger_writes_is_not_taken_for_a_cause(text: str) -> None:
    assert cause.decoded(text) is None


@pytest.mark.parametrize(
    ("ends", "is_known"),
    [
        ([KILLED], True),
        ([WRONG, End(1, 1, 3.0, record=LOST)], True),
        ([End(2, 1, 3.0, record=LOST), End(3, -signal.SIGTERM, 4.0, stopped=True)], False),
        ([End(0, 1, 3.0, record=LOST), End(1, 0, 2.0, leaving=1.9)], True),  # it left while the other needed it
        ([], False),
    ],
)
def test_a_host_with_consequences_alone_does_not_know_the_cause(ends: Sequence[End], is_known: bool) -> None:
    assert cause.is_known(ends) is is_known
