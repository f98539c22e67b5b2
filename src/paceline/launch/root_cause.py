"""Failure analysis: finds the first rank to fail, and the failures that are only consequences."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.core.black_box import Snapshot, snapshot_of
from paceline.core.job_directory import JobFolder
from paceline.core.messages import duration, signal_name
from paceline.core.missing_ranks import named_ranks, ranks_by_value
from paceline.launch.failure_record import CUT, Record
from paceline.launch.verdict import Cause

UNWINDING_S = 5.0
"""Maximum time between an exception in a phase and the rank's failure."""
_DOING = {
    "data wait": "waiting for data",
    "wait": "waiting for gradients",
    "bucket wait": "waiting for gradients",
    "checkpoint": "saving a checkpoint",
    "collective": "in a collective",
    "optimizer": "in the optimizer",
}
MAYBE, LOST_A_PEER = 1, 2
UNKNOWN = 256
"""Replaces an exit code that is not known. It is larger than any exit code."""
_FRAME = re.compile(r'[\s|]*File ".*')  # with the bars of exception groups
SETTLE_S = 0.3  # time to wait for other ranks to fail independently
CAUSE_S = 1.0  # time to wait if all known failures are consequences
LEAVE_S = 2.0  # time to wait if a rank is about to leave, which may be the cause
NOTICE_S = 0.05  # delay until the launcher notices an exit; ranks record their exits immediately


@dataclass(frozen=True)
class State:
    """The step and phase of a rank at a given time."""

    completed: int | None
    """The job's last completed step; None if unknown."""
    phase: str | None = None
    """One of :data:`paceline.core.black_box.PHASES`; None before the first step."""
    seconds: float = 0.0
    """Seconds in the phase."""
    bucket: int | None = None
    """The awaited bucket."""

    @property
    def step(self) -> int | None:
        """The job's current step; the first is 1."""
        return None if self.completed is None else self.completed + 1

    @property
    def _step(self) -> str:
        return "an unknown step" if self.step is None else f"step {self.step}"

    @property
    def moment(self) -> str:
        """Description for the rank that failed, such as "300 ms into backward of step 41"."""
        return self.activity if self.phase is None else f"{duration(self.seconds)} into {self.activity}"

    @property
    def activity(self) -> str:
        """The moment without its time, such as "backward of step 41"."""
        if self.phase is None:
            return "before its first step"
        bucket = "" if self.bucket is None else f" {self.bucket}"
        name = self.phase.replace("bucket wait", "wait for bucket").replace("loop", "script's own code")
        return f"{'' if name in ('forward', 'backward') else 'the '}{name}{bucket} of {self._step}"

    @property
    def doing(self) -> str:
        """Description for the other ranks. Ranks with the same activity have the same description."""
        if self.phase is None:
            return "had not begun the first step"
        waiting = _DOING.get(self.phase)
        return f"in {self.activity}" if waiting is None else f"{waiting} in {self._step}"


NOT_BEGUN = State(None)


def state_of(snapshot: Snapshot | None, moment: float, raised: bool = True) -> State:
    """Return the state of a rank at `moment`.

    Args:
        snapshot: the rank's box; None if it was never opened.
        moment: time of the failure or the check, on ``time.monotonic``.
        raised: whether the rank may have raised an exception; if it did, its state is that of the exception's phase.
    """
    if snapshot is None:
        return NOT_BEGUN
    origin = snapshot.raised
    if raised and origin is not None and moment - origin.until <= UNWINDING_S:
        return State(snapshot.completed, origin.phase, max(origin.until - origin.since, 0.0), origin.bucket)
    return State(snapshot.completed, snapshot.phase, max(moment - snapshot.since, 0.0), snapshot.bucket)


def doings(ranks: Iterable[tuple[int, str]]) -> list[str]:
    """Return one line per activity, such as "ranks 0, 2: waiting for gradients in step 41"."""
    return [f"{named_ranks(numbers)}: {text}" for text, numbers in ranks_by_value(ranks).items()]


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code (negative for a signal) and when the launcher noticed.

    Args:
        at: when the launcher noticed, in seconds since the epoch.
        stopped: whether the launcher terminated it because another rank had failed.
        leaving: when the rank reached the end of its script or called ``sys.exit``.
        state: its activity when it failed or, if it was stopped, when the first rank failed; None if unknown.
        hang: description of the hang, if the launcher killed the rank for hanging.
        stacks: stacks of its threads, if the launcher requested them.
    """

    rank: int
    code: int
    at: float
    stopped: bool = False
    record: Record | None = None
    leaving: float | None = None
    state: State | None = None
    hang: str = ""
    stacks: str = ""

    @property
    def when(self) -> float:
        """Time of the failure or exit, from the rank's record if available."""
        if self.record:
            return self.record.at
        return self.at - NOTICE_S if self.leaving is None else self.leaving

    @property
    def how(self) -> str:
        """Text such as "exit code 1" or "signal SIGSEGV"; empty if the launcher terminated the rank."""
        if self.stopped:
            return ""
        if self.hang:
            return self.hang
        if self.code == UNKNOWN:
            return "exit code unknown, because another wait() took it or something in the launcher ignores SIGCHLD"
        if self.code >= 0:
            return f"exit code {self.code}"
        if self.code == -signal.SIGKILL:
            return "signal SIGKILL, which the kernel sends when memory runs out"
        return f"signal {signal_name(-self.code)}"

    @property
    def suspicion(self) -> int:
        """How likely the failure is a consequence. A rank that lost a peer raises an error or is aborted by torch."""
        if self.record:
            return 0 if self.record.blamed is None else LOST_A_PEER
        return MAYBE if self.code == -signal.SIGABRT else 0

    @property
    def has_left(self) -> bool:
        """Whether the rank exited by itself without an error, or was about to."""
        return self.record is None and (self.code == 0 or (self.stopped and self.leaving is not None))

    @property
    def detail(self) -> str:
        """How the rank ended, with the first line of its error."""
        lines = self.record.message.strip().splitlines() if self.record else []  # also at "\r"
        return ": ".join(part for part in (self.how, *lines[:1]) if part)


def failures(ends: Sequence[End]) -> list[End]:
    """Return the ranks that failed by themselves, with the cause first."""
    failed = [end for end in ends if end.code != 0 and (not end.stopped or end.record is not None)]
    return sorted(failed, key=lambda end: (end.suspicion, end.when, end.rank))


def missed(ends: Sequence[End]) -> list[End]:
    """Return the ranks that caused the failures without raising an error, in chronological order.

    These are ranks that left while others needed them or, if there are none, ranks that kept the others waiting.
    """
    failed = failures(ends)
    complaints = [end.record for end in failed if end.suspicion == LOST_A_PEER and end.record]
    if not complaints or failed[0].suspicion == 0:
        return []
    named = {rank for record in complaints for rank in record.blamed or ()}
    early_exits = [end for end in ends if end.has_left and (end.rank in named or not named)]
    if failed[0].suspicion == MAYBE:  # ranks that left after the abort did not cause it
        early_exits = [end for end in early_exits if end.when < failed[0].when]
    elif not early_exits:
        early_exits = [end for end in ends if end.rank in named and end.stopped and end.record is None]
    return sorted(early_exits, key=lambda end: (end.when, end.rank))


def patience(ended: Sequence[End], running: Sequence[End]) -> float:
    """Return how many seconds to wait for the cause after a failure."""
    ends = [*ended, *running]
    if any(end.suspicion == 0 for end in failures(ends)):
        return SETTLE_S
    if any(end.has_left for end in running):
        return LEAVE_S
    return SETTLE_S if any(end.has_left for end in missed(ends)) else CAUSE_S


def usage(ends: Sequence[End]) -> str | None:
    """Return the message of the first UsageError."""
    mistakes = [end.record for end in ends if end.record is not None and end.record.usage]
    return min(mistakes, key=lambda record: record.at).message if mistakes else None


def cause(ends: Sequence[End]) -> Cause:
    """Return the cause of a failed start."""
    first = next(iter(failures(ends)), None)
    if first is None:
        return Cause()
    record = first.record
    step, is_kill = None if first.state is None else first.state.completed, first.code == -signal.SIGKILL
    if record is None or record.blamed is not None:
        # Losing a peer is not held against a rank's slot, but keeping the others waiting may be.
        absent = next(iter(missed(ends)), None if first.suspicion == LOST_A_PEER else first)
        return Cause(is_kill=is_kill, step=step, rank=None if absent is None else absent.rank)
    rank = first.rank if record.may_pass else None
    return Cause(identity(record), record.may_pass, record.has_optimizer, is_kill, step, rank)


def identity(record: Record) -> str:
    """Return a key built from the error's class and location, because messages contain addresses, times and sizes."""
    lines = record.trace.partition(CUT)[0].splitlines()
    return "\n".join([record.message.partition(":")[0], *(line for line in lines if _FRAME.match(line))])


def headline(ends: Sequence[End]) -> str:
    """Return a sentence that names the first rank to fail and says how it failed."""
    failed = failures(ends)
    if not failed:
        return "a rank failed"
    culprits = missed(ends)
    if not culprits:
        if failed[0].hang:
            return f"rank {failed[0].rank} hung and was killed ({failed[0].hang})"
        text = f"rank {failed[0].rank} failed first ({failed[0].detail})"
        if failed[0].state is not None:
            text += f" {failed[0].state.moment}"
        left_before = [end for end in ends if end.has_left and end.when < failed[0].when]
        # A script that lost a peer may exit with an error code without raising.
        if not left_before or failed[0].record is not None or failed[0].code <= 0:
            return text
        did = "had begun to end" if any(end.code for end in left_before) else "had ended with exit code 0"
        return f"{text}, after {named_ranks(sorted(end.rank for end in left_before))} {did}"
    who, victim = named_ranks(sorted(end.rank for end in culprits)), _complaint(failed)
    so = f"so rank {victim.rank} failed ({victim.detail})"
    if not culprits[0].has_left:
        return f"{who} kept the others waiting, {so}"
    did = "was about to end" if any(end.code for end in culprits) else "ended with exit code 0"
    return f"{who} {did} while the others still needed it, {so}; all ranks must do the same number of steps"


def report(ends: Sequence[End], shown: set[object]) -> str:
    """Return the full report of a failed run, with the headline last."""
    return "\n".join([*details(ends, shown), f"error: {headline(ends)}"])


def details(ends: Sequence[End], shown: set[object]) -> list[str]:
    """Return the remarks on other ranks, followed by the traceback of the rank in the headline; see :func:`once`."""
    failed = failures(ends)
    first = _complaint(failed) if missed(ends) else failed[0] if failed else None
    # The stacks of a hang have already been shown.
    absent = [line for end in missed(ends) for line in quoted(end.rank, end.stacks)]
    trace = once(first.rank, first.record.trace, shown) if first and first.record else []
    return remarks(ends) + absent + trace


def raised(ends: Sequence[End], shown: set[object]) -> list[str]:
    """Return the tracebacks of all errors that are not consequences, for a job stopped by a signal."""
    notes = [(end.rank, end.record) for end in ends if end.record and end.record.blamed is None]
    return [line for rank, note in notes for line in once(rank, note.trace, shown)]


def once(rank: int, trace: str, shown: set[object]) -> list[str]:
    """Return the lines of a rank's traceback, or a reference if `shown`, which is updated, contains it or the rank.

    Tracebacks are the same if they differ only in the rank's number.
    """
    key, count = nameless(rank, trace), len(shown)
    shown.add(key)
    is_new = len(shown) > count and rank not in shown
    return quoted(rank, trace) if is_new else [f"the traceback of rank {rank} is shown above"]


def nameless(rank: int, text: str) -> str:
    """Return an error's text without the number of the `rank` that raised it."""
    return re.sub(rf"\b([Rr]ank\W?){rank}\b", r"\1N", text)


def quoted(rank: int, text: str) -> list[str]:
    """Return the lines of `text`, each prefixed with the rank."""
    return [f"  rank {rank} | {line}" for line in text.rstrip().splitlines()]


def remarks(ends: Sequence[End]) -> list[str]:
    """Return lines that say what the other ranks were doing and how they ended."""
    failed, early_exits, by_rank = failures(ends), missed(ends), sorted(ends, key=lambda end: end.rank)
    culprits = early_exits or failed[:1]
    others = [end for end in ends if end not in culprits]
    consequences = [end for end in others if end in failed and end.suspicion]
    lines = doings((end.rank, _doing(end)) for end in by_rank if end.state and (early_exits or end not in culprits))
    alike: dict[str, list[End]] = {}
    for end in failed:
        if end in others and end not in consequences:
            alike.setdefault(_likeness(end), []).append(end)
    same = {_likeness(end) for end in culprits if end.record}
    for key, group in alike.items():
        ranks = named_ranks(sorted(end.rank for end in group))
        lines.append(f"{ranks} failed in the same way" if key in same else f"{ranks} also failed ({group[0].detail})")
    because = f"because of {named_ranks(sorted(end.rank for end in culprits))}"
    if consequences:
        lines.append(f"{named_ranks(sorted(end.rank for end in consequences))} failed {because}")
    if stopped := [end.rank for end in others if end.stopped and end not in failed]:
        lines.append(f"{named_ranks(sorted(stopped))} {'was' if len(stopped) == 1 else 'were'} stopped {because}")
    return lines


def _likeness(end: End) -> str:
    """Return a key that is equal for ranks that failed in the same way, whether or not the launcher stopped them."""
    return nameless(end.rank, f"{end.record.message}\n{identity(end.record)}") if end.record else end.how


def _doing(end: End) -> str:
    """Return the activity of the rank, for a line of :func:`doings`."""
    assert end.state is not None
    if not end.has_left:
        return end.state.doing
    return "left" if end.state.completed is None else f"left after step {end.state.completed}"


def _complaint(failed: Sequence[End]) -> End:
    """Return the first rank that failed because it lost a peer."""
    return next(end for end in failed if end.suspicion == LOST_A_PEER)


class LastMoments:
    """The states of the ranks of one start when the first one failed."""

    def __init__(self, boxes: JobFolder) -> None:
        self._boxes = boxes
        self._seen: dict[int, Snapshot | None] = {}
        """Each rank's black box at the first failure; empty before that failure."""
        self._seen_at = 0.0
        """Time of the first failure, on ``time.monotonic``."""

    def note_failure(self) -> None:
        """Read all boxes at the first failure of a start, before other ranks fail or are terminated."""
        if not self._seen:
            self._seen_at = time.monotonic()
            self._seen = {rank: snapshot_of(self._boxes.path, rank) for rank in range(self._boxes.note.nproc)}

    def with_diagnosis(self, ends: Sequence[End]) -> list[End]:
        """Return `ends` with each rank's state added. Call this after the ranks have exited."""
        return [replace(end, state=self._state(end)) for end in ends]

    def _state(self, end: End) -> State | None:
        if not any(self._seen.values()):  # no rank has opened its box
            return None
        now, epoch = time.monotonic(), time.time()
        if end.stopped:  # its box now shows the termination, so use the earlier copy
            return state_of(self._seen[end.rank], self._seen_at)
        has_report = end.record is not None or end.leaving is not None
        when = end.when if has_report else end.at
        box = snapshot_of(self._boxes.path, end.rank)
        return state_of(box, min(now - (epoch - when), now), raised=has_report or end.code >= 0)
