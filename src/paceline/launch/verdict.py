"""Decides whether to restart after a failed start of the ranks, and chooses the slots.

Only restarts without progress count. A start that completes a new step resets the count. Decision 0047 explains why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from paceline.core.messages import counted

REJOIN_S = 600.0
"""Seconds until a left-out slot is tried again."""
WELL_S = 600.0
"""A start that lasts longer than this, in seconds, resets the counts of failures."""
LIMIT = 3
"""Default limit on consecutive restarts without progress."""
EARLY_S = 120.0
"""If the steps of a start are unknown and it failed within this many seconds, it is assumed to have completed no step:
a killed rank then lost no step, and an error is blamed on the script."""


class Verdict(Enum):
    """The decision after a failure."""

    RESTART = "all ranks are started again"
    MISTAKE = "an exception before the first step is the script's fault"
    REPEATED = "the previous start failed with the same error in the same place"
    OVER = "there is no state to continue from, or the training has ended"
    IN_VAIN = "the allowed number of restarts without progress is used up"


@dataclass(frozen=True)
class Cause:
    """The cause of a failed start, which determines whether the next start would fail in the same way."""

    error: str | None = None
    """Key of the first rank's exception; equal errors have equal keys. None if the rank raised no exception."""
    may_pass: bool = False
    """Whether the exception came from the host, a device or the network, and so may not recur."""
    has_optimizer: bool = True
    """Whether the rank that raised it may have held an optimizer."""
    is_kill: bool = False
    """Whether the first rank was killed."""
    step: int | None = None
    """The first rank's last completed step of the job; None if unknown."""
    rank: int | None = None
    """The rank that failed first, if its slot on the host may be to blame, because its process ended or its device
    failed. None for an exception in the script and for an error that names several ranks."""


@dataclass(frozen=True)
class Reached:
    """Progress that a start of the ranks made with one checkpoint folder."""

    key: str
    """Key of the folder."""
    restored: int
    """The restored step."""
    completed: int
    """The last step that a rank completed; the restored step if no rank completed one."""
    prepared: int = -1
    """The last step that all ranks were ready to take, so that optimizers may have begun it; -1 for none."""
    redone: int = 0
    source: str | None = None
    rescued: int | None = None
    """The newest step in memory."""
    on_disk: int | None = None
    """The newest step in the checkpoint folder."""
    has_begun: bool = False
    """Whether a rank has marked its first step or a later one, so that all steps are known."""
    has_saved: bool = False
    """Whether this or an earlier start of the job has saved a step in the folder."""
    has_ended: bool = False
    """Whether all ranks had reached the end of their training."""
    pace: float = 0.0
    """Duration of the last step, in seconds."""
    is_unsaved: bool = False
    """Whether steps should have been saved on disk, but none has been saved."""
    virtual_ranks: int = 0
    """Number of virtual ranks; 0 for none."""
    is_alone: bool = False
    """Whether a rank has completed a step without the others, so that no rank can save the last step for all."""

    @property
    def is_rescued(self) -> bool:
        """Whether the next start can restore the last completed step."""
        return self.completed in (self.rescued, self.on_disk)

    @property
    def goes_on(self) -> str:
        """Part of a message that says which step the next start restores."""
        newest, on_disk = max(self.rescued or 0, self.on_disk or 0), self.on_disk or 0
        if not self.completed:
            return ""
        source = "saved on disk" if newest == on_disk else "rescued from memory"
        where = f" from step {newest}, {source}" if newest else " from the beginning"
        if newest >= self.completed:
            return where
        begun = f" after optimizers had begun step {self.prepared}" if self.prepared > self.completed else ""
        back = counted(self.completed - newest, "step")
        return f"{where}, {back} back, because no rank could save step {self.completed}{begun}"


@dataclass(frozen=True)
class Failure:
    """A failed start of the ranks."""

    cause: Cause
    reached: Sequence[Reached] = ()
    """One entry for each checkpoint folder that a rank has opened."""
    seconds: float = 0.0
    """Duration of the start."""

    @property
    def completed(self) -> dict[str, int]:
        """The last completed step for each checkpoint folder, by the folder's key."""
        return {record.key: record.completed for record in self.reached}

    @property
    def error(self) -> tuple[object, ...] | None:
        """Key for recognizing the same error at the same step; None if a repetition cannot be recognized.

        A transient error at an unknown step counts as a new error each time.
        """
        cause = self.cause
        if cause.error is None or (cause.may_pass and not self.reached and cause.step is None):
            return None
        # Without the folders' keys, because a script may use a new folder in each start.
        steps: tuple[object, ...] = tuple(sorted(self.completed.values())) or (cause.step,)
        return (cause.error, *steps)

    @property
    def has_trained(self) -> bool:
        """Whether the ranks are known to have completed a step, or to have resumed from one."""
        return any(record.completed or record.has_saved for record in self.reached) or bool(self.cause.step)

    @property
    def is_untrained(self) -> bool:
        """Whether the ranks have completed no step, or are assumed to have completed none.

        A Checkpointer marks every step. Without a Checkpointer, black boxes count optimizer steps, but a loop may have
        no optimizer. Without either, all that is known is whether there was an optimizer.
        """
        if self.has_trained:
            return False
        if any(record.has_begun for record in self.reached):
            return True
        is_likely = bool(self.reached) or self.cause.step is not None or not self.cause.has_optimizer
        return is_likely and self.seconds < EARLY_S


@dataclass(frozen=True)
class Past:
    """A summary of a job's earlier failed starts."""

    best: Mapping[str, int] = field(default_factory=dict)
    """The last step that any start has completed for each checkpoint folder, by the folder's key."""
    in_vain: int = 0
    """Number of failures since a start last made progress."""
    error: tuple[object, ...] | None = None
    """:attr:`Failure.error` of the latest failure."""
    has_trained: bool = False
    """Whether a start is known to have completed a step, or to have resumed from one."""

    @property
    def next_in_vain(self) -> int:
        """Number of the next restart, counting from 1 after the latest start that made progress."""
        return self.in_vain + any(self.best.values())

    def with_one_more(self, failure: Failure) -> Past:
        """Return the summary with `failure` added."""
        completed = failure.completed
        # A script may use a new folder in each start, so compare a new folder with folders that are no longer used.
        furthest = max((step for key, step in self.best.items() if key not in completed), default=0)
        is_progress = any(step > self.best.get(key, furthest) for key, step in completed.items())
        best = {**self.best, **{key: max(step, self.best.get(key, 0)) for key, step in completed.items()}}
        has_trained = self.has_trained or failure.has_trained
        return Past(best, 0 if is_progress else self.in_vain + 1, failure.error, has_trained)


def verdict(failure: Failure, past: Past, limit: int | None) -> Verdict:
    """Decide what to do after `failure`.

    Args:
        failure: the latest failed start.
        past: summary of the earlier failed starts.
        limit: maximum number of consecutive restarts without progress. None means :data:`LIMIT` if the ranks report
            their steps or were killed early, else 0.
    """
    cause, reached = failure.cause, failure.reached
    if cause.error is not None and not cause.may_pass and failure.is_untrained and not past.has_trained:
        return Verdict.MISTAKE
    if failure.error is not None and failure.error == past.error:
        return Verdict.REPEATED
    # Without a Checkpointer in this start or an earlier one, progress is unknown.
    is_early_kill = cause.is_kill and not cause.step and failure.seconds < EARLY_S
    is_over = all(record.has_ended for record in reached) if reached else not (past.best or is_early_kill)
    if is_over and (limit is None or any(record.is_unsaved for record in reached)):
        return Verdict.OVER
    allowed = LIMIT if limit is None else limit
    return Verdict.RESTART if past.with_one_more(failure).next_in_vain <= allowed and allowed else Verdict.IN_VAIN


@dataclass(frozen=True)
class Change:
    """A change in the number of ranks, or only in their slots, from one start to the next."""

    before: int
    after: int
    why: str


class Slots:
    """The slots that the ranks of one job use on this host.

    A slot holds one rank, as in Open MPI. It keeps its number for the whole job and, on a host with GPUs, stands
    for the GPU with that number. If the rank in a slot has caused two early failures, the slot is left out for a while
    and the job runs with fewer ranks. Decision 0057 explains why.

    Args:
        count: number of ranks that the user asked for.
        minimum: minimum number of ranks; None for `count`.
    """

    used: tuple[int, ...]
    """The slot of each local rank."""

    def __init__(self, count: int, minimum: int | None = None) -> None:
        self._count, self._least = count, count if minimum is None else minimum
        self.used = tuple(range(count))
        self._failures = Counter[int]()
        """Number of early failures that each slot caused."""
        self._until: dict[int, float] = {}
        """When to try each left-out slot again."""

    @property
    def lacks_some(self) -> bool:
        """Whether the current start has fewer ranks than the user asked for."""
        return len(self.used) < self._count

    def failed(self, rank: int | None, seconds: float, now: float) -> bool:
        """Count a failed start that lasted `seconds`; return whether a slot is left out because of it.

        Args:
            rank: the rank whose slot may be the cause; None if no slot is to blame.
        """
        if seconds > WELL_S:
            self._failures.clear()
        if rank is None or self._least == self._count:
            return False
        slot = self.used[rank]
        self._failures[slot] += 1
        if self._failures[slot] > 1:
            self._until[slot] = now + REJOIN_S
        return self._failures[slot] > 1

    def next(self, virtual_ranks: int | None, now: float) -> tuple[int, ...]:
        """Return the slots for the next start: all slots that are not left out, or every slot if too few remain.

        Args:
            virtual_ranks: number of virtual ranks, which must be divisible by the number of ranks; 0 for none; None if
                unknown. If unknown, the number of ranks must be a power of two.
        """
        available = [slot for slot in range(self._count) if self._until.get(slot, now) <= now]
        sizes = [size for size in range(self._least, len(available) + 1) if self._divides(size, virtual_ranks)]
        return tuple(available[: sizes[-1]]) if sizes else tuple(range(self._count))

    def _divides(self, size: int, virtual_ranks: int | None) -> bool:
        # The requested number of ranks is always valid. The number of virtual ranks is a power of two, and so is every
        # divisor of it.
        if size == self._count or (virtual_ranks is None and not _is_power_of_two(self._count)):
            return True
        return _is_power_of_two(size) if virtual_ranks is None else virtual_ranks % size == 0

    def move(self, virtual_ranks: int | None, now: float) -> Change | None:
        """Switch to the slots of the next start; return the change, or None if they stay the same."""
        previous, self.used = self.used, self.next(virtual_ranks, now)
        if previous == self.used:
            return None
        if len(previous) < len(self.used):
            back = _named([slot for slot in self.used if slot not in previous])
            return Change(len(previous), len(self.used), f"{back} tried again")
        left_out = _named([slot for slot, until in sorted(self._until.items()) if until > now])
        return Change(len(previous), len(self.used), f"{left_out} left out for {REJOIN_S:g} s after two failures")

    @property
    def are_the_first(self) -> bool:
        """Whether every rank's slot has the same number as the rank."""
        return self.used == tuple(range(len(self.used)))

    def select(self, shares: Sequence[str]) -> list[str]:
        """Return the entries of `shares` for the used slots; all of `shares` if it has too few."""
        return [shares[slot] for slot in self.used] if len(shares) >= self._count else list(shares)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _named(slots: Sequence[int]) -> str:
    return f"slot {slots[0]} is" if len(slots) == 1 else f"slots {', '.join(map(str, slots))} are"
