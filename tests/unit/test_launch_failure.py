"""The cause of a failure is told from its consequences."""

from __future__ import annotations

import signal

import pytest

from paceline.launch.failure import End, failures, headline, report, usage
from paceline.launch.record import Record


def told(message: str, at: float, usage: bool = False) -> Record:
    return Record(message, f"Traceback\n{message}", at, usage)


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:17325."
RESET = "RuntimeError: Read error [127.0.0.1]:40626: Connection reset by peer."
NCCL = "torch.distributed.DistBackendError: remote process exited or there was a network error"

# Who failed by itself, cause first, out of how rank 0, 1, 2 ended.
CASES = {
    "one raised": ([End(0, 0, 9.0), End(1, 1, 5.0, record=told("ValueError: x", 4.0))], [1]),
    "a peer died sooner than the one that raised": (
        [End(0, 1, 5.0, record=told(LOST, 4.2)), End(1, 1, 5.5, record=told("ValueError: x", 4.1))],
        [1, 0],
    ),
    "a peer told sooner than the crash was noticed": (
        [End(0, 1, 5.0, record=told(RESET, 4.0)), End(1, -signal.SIGSEGV, 4.1)],
        [1, 0],
    ),
    "torch aborted the peer": (
        [End(0, -signal.SIGABRT, 4.0), End(1, 1, 5.0, record=told("ValueError: x", 4.5))],
        [1, 0],
    ),
    "an abort is a cause if nothing else is": (
        [End(0, 1, 5.0, record=told(NCCL, 3.0)), End(1, -signal.SIGABRT, 4.0)],
        [1, 0],
    ),
    "two raised": (
        [End(0, 1, 5.0, record=told("ValueError: x", 4.2)), End(1, 1, 4.9, record=told("KeyError: y", 4.3))],
        [0, 1],
    ),
    "the launcher stopped the others": (
        [End(0, -signal.SIGTERM, 6.0, stopped=True), End(1, 7, 5.0), End(2, 143, 6.0, stopped=True)],
        [1],
    ),
    "one that raised was stopped while it was still shutting down": (
        [End(0, -signal.SIGABRT, 4.0), End(1, -signal.SIGTERM, 6.0, True, told("ValueError: x", 3.9))],
        [1, 0],
    ),
}


@pytest.mark.parametrize(("ends", "order"), CASES.values(), ids=CASES)
def test_the_cause_comes_first(ends: list[End], order: list[int]) -> None:
    assert [end.rank for end in failures(ends)] == order


def test_a_rank_that_left_early_is_named_rather_than_the_one_that_missed_it() -> None:
    ends = [End(0, 1, 5.0, record=told(LOST, 4.0)), End(1, 0, 4.1)]
    assert headline(ends).startswith("rank 1 ended with exit code 0 while the others still needed it, so rank 0")


def test_a_rank_that_was_done_is_not_blamed_for_anothers_own_error() -> None:
    ends = [End(0, 1, 5.0, record=told("ValueError: x", 4.0)), End(1, 0, 3.0)]
    assert headline(ends) == "rank 0 failed first (exit code 1: ValueError: x)"


def test_the_report_shows_every_causes_traceback_and_no_consequences() -> None:
    ends = [
        End(0, 1, 5.0, record=told("ValueError: x", 4.0)),
        End(1, 1, 5.0, record=told("KeyError: y", 4.0)),
        End(2, 1, 5.0, record=told(LOST, 4.1)),
        End(3, -signal.SIGKILL, 6.0, stopped=True),
    ]
    assert report(ends).splitlines() == [
        "error: rank 0 failed first (exit code 1: ValueError: x)",
        "  rank 0 | Traceback",
        "  rank 0 | ValueError: x",
        "rank 1 failed too (exit code 1: KeyError: y)",
        "  rank 1 | Traceback",
        "  rank 1 | KeyError: y",
        "rank 2 ended because of that (exit code 1)",
        "stopped because of that: rank 3",
    ]


def test_the_first_usage_error_is_taken() -> None:
    ends = [
        End(0, 2, 5.0, record=told("second", 4.2, True)),
        End(1, 2, 5.0, record=told("first", 4.1, True)),
    ]
    assert usage(ends) == "first"
    assert usage([End(0, 1, 5.0, record=told("ValueError: x", 4.0))]) is None
