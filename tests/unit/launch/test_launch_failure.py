"""Distinguishing the cause of a failure from its consequences."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from insides import End, Record, blamed_by, failures, headline, raised, report, usage


def recorded(message: str, at: float, usage: bool = False, blamed: tuple[int, ...] | None = None) -> Record:
    return Record(message, f"Traceback\n{message}", at, usage, blamed_by(message) if blamed is None else blamed)


def gone(rank: int, at: float) -> Record:
    """Return the record of a rank in Paceline's process group that lost a peer."""
    return recorded(f"CommunicationError: rank {rank} (pid 7) has ended", at, blamed=(rank,))


def raising(rank: int, message: str, raised: float, at: float = 5.0) -> End:
    """Return the end of a rank whose script raised an error."""
    return End(rank, 1, at, record=recorded(message, raised))


def losing(rank: int, peer: int) -> End:
    """Return the end of a rank in Paceline's process group that lost `peer`."""
    return End(rank, 1, 5.0, record=gone(peer, 4.0))


ABORT, KILL, SEGV, TERM = -signal.SIGABRT, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM
ERROR = "ValueError: x"
NEEDED = "ended with exit code 0 while the others still needed it"
LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:17325."
)
RESET = "RuntimeError: Read error [127.0.0.1]:40626: Connection reset by peer."
NCCL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited"

# Which ranks failed on their own, cause first, given the ends of ranks 0, 1, 2.
CASES = {
    "one rank raised": ([End(0, 0, 9.0), raising(1, ERROR, 4.0)], [1]),
    "peer ended before the rank that raised": ([raising(0, LOST, 4.2), raising(1, ERROR, 4.1, at=5.5)], [1, 0]),
    "peer reported before the crash was noticed": ([raising(0, RESET, 4.0), End(1, SEGV, 4.1)], [1, 0]),
    "peer aborted by torch": ([End(0, ABORT, 4.0), raising(1, ERROR, 4.5)], [1, 0]),
    "abort without another cause": ([raising(0, NCCL, 3.0), End(1, ABORT, 4.0)], [1, 0]),
    "two ranks raised": ([raising(0, ERROR, 4.2), raising(1, "KeyError: y", 4.3, at=4.9)], [0, 1]),
    "stopped by the launcher": ([End(0, TERM, 6.0, stopped=True), End(1, 7, 5.0), End(2, 143, 6.0, stopped=True)], [1]),
    "aborted rank blamed by the others": ([losing(0, 2), losing(1, 2), End(2, ABORT, 4.1)], [2, 0, 1]),
    "peer that handled its error and exited": ([End(0, 1, 4.3, leaving=4.28), End(1, KILL, 4.3)], [1, 0]),
    "two ranks died almost simultaneously": ([End(0, KILL, 4.1), End(1, SEGV, 4.0)], [1, 0]),
    "rank stopped after an exception": ([End(0, ABORT, 4.0), End(1, TERM, 6.0, True, recorded(ERROR, 3.9))], [1, 0]),
}


@pytest.mark.parametrize(("ends", "order"), CASES.values(), ids=CASES)
def test_cause_comes_first(ends: list[End], order: list[int]) -> None:
    assert [end.rank for end in failures(ends)] == order


# Headlines, given the ends of ranks 0, 1, 2, …
HEADLINES = {
    "exited rank instead of its waiting peer": ([raising(0, LOST, 4.0), End(1, 0, 4.1)], f"rank 1 {NEEDED}, so rank 0"),
    "failed rank while another had finished": (
        [raising(0, ERROR, 4.0), End(1, 0, 3.0)],
        "rank 0 failed first (exit code 1: ValueError: x)",
    ),
    "the missed one of two exited": ([losing(0, 2), End(1, 0, 2.0), End(2, 0, 4.1)], f"rank 2 {NEEDED}, so rank 0"),
    "two exited ranks, neither blamed by others": (
        [raising(0, LOST, 4.0), End(1, 0, 4.2, leaving=4.0), End(2, 0, 4.1, leaving=3.9)],
        f"ranks 1, 2 {NEEDED}",
    ),
    "exited rank stopped during interpreter shutdown": (
        [losing(0, 1), End(1, TERM, 6.0, True, leaving=3.9)],
        "rank 1 was about to end while the others still needed it, so rank 0 failed",
    ),
    "waiting peer aborted by torch": (
        [End(0, ABORT, 4.2), End(1, 0, 4.1, leaving=3.9), raising(2, LOST, 4.0)],
        f"rank 1 {NEEDED}, so rank 2 failed",
    ),
    "abort after another rank ended": (
        [End(0, ABORT, 8.0), End(1, 0, 4.1, leaving=3.9)],
        "rank 0 failed first (signal SIGABRT)",
    ),
    "exited rank and a peer that may have handled its absence": (
        [End(0, 1, 5.0, leaving=4.5), End(1, 0, 4.1, leaving=3.9)],
        "rank 0 failed first (exit code 1), after rank 1 had ended with exit code 0",
    ),
    "exiting rank with an unknown code stopped": (
        [End(0, 3, 5.0, leaving=4.5), End(1, TERM, 5.1, stopped=True, leaving=4.4)],
        "rank 0 failed first (exit code 3), after rank 1 had begun to end",
    ),
    "rank that never started": (
        [losing(0, 1), End(1, KILL, 9.0, stopped=True), End(2, 0, 3.0, leaving=2.9)],
        "rank 1 kept the others waiting, so rank 0 failed (exit",
    ),
    "rank that raised, stopped later": (
        [End(0, TERM, 4.0, True, recorded(ERROR, 3.9)), End(1, 1, 4.0, record=gone(0, 4.0))],
        "rank 0 failed first (ValueError: x)",
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
    ends = [End(0, 2, 5.0, record=recorded("second", 4.2, True)), End(1, 2, 5.0, record=recorded("first", 4.1, True))]
    assert usage(ends) == "first"
    assert usage([End(0, 1, 5.0, record=recorded("ValueError: x", 4.0))]) is None
