"""Who failed first: the cause is told from its consequences by what each rank left behind and when. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.launch.record import Record

# How torch's backends, and we, say that another rank is gone. A rank that says so is not the cause.
PEER_LOST = re.compile(
    r"connection (was likely )?closed|connection reset|connection refused|broken pipe|got 0 bytes"
    r"|remote process exited|socket closed|rank \d+ is gone|failed on rank 0",
    re.IGNORECASE,
)
MAYBE, LOST_A_PEER = 1, 2


@dataclass(frozen=True)
class End:
    """How a rank ended: exit code, negative for a signal; when it was noticed, in seconds since the epoch.

    ``stopped`` says that the launcher ended it, because of another rank's failure.
    """

    rank: int
    code: int
    at: float
    stopped: bool = False
    record: Record | None = None

    @property
    def when(self) -> float:
        """When the rank failed: when it raised, if it told."""
        return self.record.at if self.record else self.at

    @property
    def how(self) -> str:
        """In words: "exit code 1" or "signal SIGSEGV"."""
        if self.code < 0:
            try:
                return f"signal {signal.Signals(-self.code).name}"
            except ValueError:
                return f"signal {-self.code}"
        return f"exit code {self.code}"

    @property
    def suspicion(self) -> int:
        """How likely this is a consequence only: torch aborts some ranks that lost a peer, others say so."""
        if self.record:
            return LOST_A_PEER if PEER_LOST.search(self.record.message) else 0
        return MAYBE if self.code == -signal.SIGABRT else 0


def failures(ends: Sequence[End]) -> list[End]:
    """The ranks that failed by themselves, the cause first."""
    own = [end for end in ends if end.code != 0 and (not end.stopped or end.record is not None)]
    return sorted(own, key=lambda end: (end.suspicion, end.when, end.rank))


def usage(ends: Sequence[End]) -> str | None:
    """The first mistake of the caller's that a rank reported."""
    told = [end.record for end in ends if end.record is not None and end.record.usage]
    return min(told, key=lambda record: record.at).message if told else None


def headline(ends: Sequence[End]) -> str:
    """One sentence that names the first rank to fail, and how."""
    failed = failures(ends)
    if not failed:
        return "a rank failed"
    first = failed[0]
    left = [end for end in ends if end.code == 0 and not end.stopped]
    if first.suspicion == LOST_A_PEER and left:
        early = min(left, key=lambda end: end.at)
        return (
            f"rank {early.rank} ended with exit code 0 while the others still needed it, "
            f"so rank {first.rank} failed ({_detail(first)}); all ranks must do the same number of steps"
        )
    return f"rank {first.rank} failed first ({_detail(first)})"


def report(ends: Sequence[End]) -> str:
    """Everything that is known about a failed run, the cause first, with its traceback."""
    failed = failures(ends)
    lines = [f"error: {headline(ends)}"]
    for end in failed:
        if end.suspicion and end is not failed[0]:
            lines.append(f"rank {end.rank} ended because of that ({end.how})")
            continue
        if end is not failed[0]:
            lines.append(f"rank {end.rank} failed too ({_detail(end)})")
        if end.record:
            lines += [f"  rank {end.rank} | {line}" for line in end.record.trace.rstrip().splitlines()]
    stopped = [end.rank for end in ends if end not in failed and end.stopped]
    if stopped:
        lines.append(f"stopped because of that: rank {', '.join(map(str, sorted(stopped)))}")
    return "\n".join(lines)


def _detail(end: End) -> str:
    message = end.record.message.strip().splitlines()[0] if end.record and end.record.message.strip() else ""
    return f"{end.how}: {message}" if message else end.how
