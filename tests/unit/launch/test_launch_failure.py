"""Distinguishing the cause of a failure from its consequences."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from paceline.launch.failure_record import Record, blamed_by
from paceline.launch.root_cause import End, failures, headline, raised, report, usage


def recorded(message: str, at: float, usage: bool = False, blamed: tuple[int, ...] | None = None) -> Record:
    return Record(message, f"Traceback\n{message}", at, usage, blamed_by(message) if blamed is None else blamed)


def gone(rank: int, at: float) -> Record:
    """Return the record of a rank in Paceline's process group that lost a peer."""
    return recorded(f"CommunicationError: rank {rank} (pid 7) has ended", at, blamed=(rank,))


LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:17325."
)
RESET = "RuntimeError: Read error [127.0.0.1]:40626: Connection reset by peer."
NCCL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited"

# Which ranks failed on their own, cause first, given the ends of ranks 0, 1, 2.
CASES = {
    "one rank raised": ([End(0, 0, 9.0), End(1, 1, 5.0, record=recorded("ValueError: x", 4.0))], [1]),
    "peer ended before the rank that raised": (
        [End(0, 1, 5.0, record=recorded(LOST, 4.2)), End(1, 1, 5.5, record=recorded("ValueError: x", 4.1))],
        [1, 0],
    ),
    "peer reported before the crash was noticed": (
        [End(0, 1, 5.0, record=recorded(RESET, 4.0)), End(1, -signal.SIGSEGV, 4.1)],
        [1, 0],
    ),
    "peer aborted by torch": (
        [End(0, -signal.SIGABRT, 4.0), End(1, 1, 5.0, record=recorded("ValueError: x", 4.5))],
        [1, 0],
    ),
    "abort without another cause": (
        [End(0, 1, 5.0, record=recorded(NCCL, 3.0)), End(1, -signal.SIGABRT, 4.0)],
        [1, 0],
    ),
    "two ranks raised": (
        [End(0, 1, 5.0, record=recorded("ValueError: x", 4.2)), End(1, 1, 4.9, record=recorded("KeyError: y", 4.3))],
        [0, 1],
    ),
    "others stopped by the launcher": (
        [End(0, -signal.SIGTERM, 6.0, stopped=True), End(1, 7, 5.0), End(2, 143, 6.0, stopped=True)],
        [1],
    ),
    "aborted rank blamed by the others": (
        [End(0, 1, 5.0, record=gone(2, 4.0)), End(1, 1, 5.0, record=gone(2, 4.0)), End(2, -signal.SIGABRT, 4.1)],
        [2, 0, 1],
    ),
    "peer that exited with another code after handling its error": (
        [End(0, 1, 4.3, leaving=4.28), End(1, -signal.SIGKILL, 4.3)],
        [1, 0],
    ),
    "two ranks died almost simultaneously": ([End(0, -signal.SIGKILL, 4.1), End(1, -signal.SIGSEGV, 4.0)], [1, 0]),
    "rank stopped while shutting down after an exception": (
        [End(0, -signal.SIGABRT, 4.0), End(1, -signal.SIGTERM, 6.0, True, recorded("ValueError: x", 3.9))],
        [1, 0],
    ),
}


@pytest.mark.parametrize(("ends", "order"), CASES.values(), ids=CASES)
def test_cause_comes_first(ends: list[End], order: list[int]) -> None:
    assert [end.rank for end in failures(ends)] == order


# Headlines, given the ends of ranks 0, 1, 2, …
HEADLINES = {
    "exited rank instead of its waiting peer": (
        [End(0, 1, 5.0, record=recorded(LOST, 4.0)), End(1, 0, 4.1)],
        "rank 1 ended with exit code 0 while the others still needed it, so rank 0",
    ),
    "failed rank while another had finished": (
        [End(0, 1, 5.0, record=recorded("ValueError: x", 4.0)), End(1, 0, 3.0)],
        "rank 0 failed first (exit code 1: ValueError: x)",
    ),
    "the missed one of two exited ranks": (
        [End(0, 1, 5.0, record=gone(2, 4.0)), End(1, 0, 2.0), End(2, 0, 4.1)],
        "rank 2 ended with exit code 0 while the others still needed it, so rank 0 failed",
    ),
    "two exited ranks, neither blamed by others": (
        [End(0, 1, 5.0, record=recorded(LOST, 4.0)), End(1, 0, 4.2, leaving=4.0), End(2, 0, 4.1, leaving=3.9)],
        "ranks 1, 2 ended with exit code 0 while the others still needed it",
    ),
    "exited rank stopped during interpreter shutdown": (
        [End(0, 1, 5.0, record=gone(1, 4.0)), End(1, -signal.SIGTERM, 6.0, True, leaving=3.9)],
        "rank 1 was about to end while the others still needed it, so rank 0 failed",
    ),
    "waiting peer aborted by torch": (
        [End(0, -signal.SIGABRT, 4.2), End(1, 0, 4.1, leaving=3.9), End(2, 1, 5.0, record=recorded(LOST, 4.0))],
        "rank 1 ended with exit code 0 while the others still needed it, so rank 2 failed",
    ),
    "abort long after another rank finished": (
        [End(0, -signal.SIGABRT, 8.0), End(1, 0, 4.1, leaving=3.9)],
        "rank 0 failed first (signal SIGABRT)",
    ),
    "exited rank and a peer that may have handled its absence": (
        [End(0, 1, 5.0, leaving=4.5), End(1, 0, 4.1, leaving=3.9)],
        "rank 0 failed first (exit code 1), after rank 1 had ended with exit code 0",
    ),
    "exiting rank with an unknown code stopped": (
        [End(0, 3, 5.0, leaving=4.5), End(1, -signal.SIGTERM, 5.1, stopped=True, leaving=4.4)],
        "rank 0 failed first (exit code 3), after rank 1 had begun to end",
    ),
    "rank that never started": (
        [
            End(0, 1, 5.0, record=recorded("CommunicationError: rank 1 did not take part", 4.0, blamed=(1,))),
            End(1, -signal.SIGKILL, 9.0, stopped=True),
            End(2, 0, 3.0, leaving=2.9),
        ],
        "rank 1 kept the others waiting, so rank 0 failed (exit code 1: CommunicationError: rank 1 did not",
    ),
    "rank that raised, stopped later": (
        [End(0, -signal.SIGTERM, 4.0, True, recorded("ValueError: x", 3.9)), End(1, 1, 4.0, record=gone(0, 4.0))],
        "rank 0 failed first (ValueError: x)",
    ),
    "rank killed by the kernel": (
        [End(0, -signal.SIGKILL, 4.0)],
        "rank 0 failed first (signal SIGKILL, which the kernel",
    ),
}


@pytest.mark.parametrize(("ends", "expected"), HEADLINES.values(), ids=HEADLINES)
def test_headline_names_the_rank_that_caused_the_failure(ends: list[End], expected: str) -> None:
    assert headline(ends).startswith(expected)


def test_report_ends_with_the_headline_below_a_single_traceback() -> None:
    # Each failing rank was shown twice and every consequence with a traceback, so the cause scrolled away.
    ends = [
        End(0, 1, 5.0, record=recorded("ValueError: x", 4.0)),
        End(1, 1, 5.0, record=recorded("KeyError: y", 4.0)),
        End(2, 1, 5.0, record=recorded(LOST, 4.1)),
        End(3, -signal.SIGKILL, 6.0, stopped=True),
        End(4, -signal.SIGTERM, 6.0, True, gone(0, 4.2)),
    ]
    shown: set[object] = set()
    assert report(ends, shown).splitlines() == [
        "rank 1 also failed (exit code 1: KeyError: y)",
        "ranks 2, 4 failed because of rank 0",
        "rank 3 was stopped because of rank 0",
        "  rank 0 | Traceback",
        "  rank 0 | ValueError: x",
        "error: rank 0 failed first (exit code 1: ValueError: x)",
    ]
    again = report(ends, shown).splitlines()  # after a restart, or if the rank exited slowly
    assert again[-2:] == ["the traceback of rank 0 is shown above", "error: " + headline(ends)]
    assert report(ends, {0}).splitlines() == again  # its stderr already went to the launcher's


def test_ranks_with_equal_errors_share_a_line() -> None:
    ends = [End(rank, 1, 5.0, rank > 2, recorded("OSError: no data", 4.0 + rank)) for rank in range(6)]
    ends[5] = replace(ends[5], record=replace(recorded("OSError: no data", 9.0), trace='File "elsewhere.py", line 1'))
    others = ["ranks 1–4 failed in the same way", "rank 5 also failed (OSError: no data)"]
    assert report(ends, set()).splitlines()[:2] == others
    ends[0] = replace(ends[0], record=recorded("KeyError: x", 4.0))
    assert report(ends, set()).splitlines()[0] == "ranks 1–4 also failed (exit code 1: OSError: no data)"


def test_errors_that_differ_only_in_rank_numbers_are_equal() -> None:
    ends = [End(rank, 1, 5.0, record=recorded(f"ValueError: rank {rank}: no data", 4.0 + rank)) for rank in range(11)]
    assert report(ends, set()).splitlines()[0] == "ranks 1–10 failed in the same way"
    assert sum("no data" in line for line in raised(ends, set())) == 1


def test_first_usage_error_wins() -> None:
    ends = [
        End(0, 2, 5.0, record=recorded("second", 4.2, True)),
        End(1, 2, 5.0, record=recorded("first", 4.1, True)),
    ]
    assert usage(ends) == "first"
    assert usage([End(0, 1, 5.0, record=recorded("ValueError: x", 4.0))]) is None
