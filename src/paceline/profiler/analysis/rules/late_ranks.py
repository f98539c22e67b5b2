"""A rank for which the others wait."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from paceline.profiler.analysis.metrics import Facts, differences
from paceline.profiler.analysis.rules.gains import promise, spread
from paceline.profiler.analysis.rules.slices_by_speed import expected_speedup
from paceline.profiler.analysis.straggler_check import late_since
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice, SlowRank

OWN_CODE = "own code in the loop"
NOTABLE, CERTAIN = 0.05, 4.0
"""Share of a step by which a rank's own code must be longer, and that difference by its standard error."""
LONG_STEPS, LONG_SEEN = 3, 1 / 3
"""Fewest long steps, as with an evaluation, that are told without a test of their mean, as it needs more; and the share
of their time that samples of the stack must have seen in the rank's own code. Under load samples come late."""
PROBABLY = 0.85
"""Share of the waiting from which the rank that causes it is probably slow, even if too few steps show it."""
PAUSED = 0.5
"""Share of a rank's lateness that the garbage collector's pauses must explain to be its cause."""
_SEEN = 3
"""Samples of the stack that name a function."""


BEFORE_FORWARD = "before forward (data loading or own code)"
"""Place of the time that counts as waiting for data, where no DataLoader was seen."""


def phase_name(facts: Facts, part: str) -> str:
    """Return the name of a part of a step in a sentence about one rank."""
    data = "waiting for data" if facts.has_loader else f"work {BEFORE_FORWARD}"
    return {step_parts.OTHER: OWN_CODE, step_parts.DATA: data}.get(part, part)


def own_parts(facts: Facts) -> tuple[str, ...]:
    """Return the parts of a step that may be the loop's own code."""
    return (step_parts.OTHER,) if facts.has_loader else (step_parts.OTHER, step_parts.DATA)


def paused_rank(facts: Facts) -> int | None:
    """Return the rank for which the others wait most, if Python's garbage collector makes it late; else None."""
    accounts, ranks = facts.accounts, range(len(facts.records))
    if len(ranks) < 2 or not accounts.steps:
        return None
    rank = max(ranks, key=accounts.caused)

    def longer(table: Sequence[Sequence[float]]) -> float:
        return math.fsum(differences(table, rank).values())

    # Pauses are seconds of a core: where it has none, they last longer by the delays, which are no other cause.
    delays = max(0.0, longer(accounts.delayed)) if facts.is_loaded else 0.0
    late = longer(accounts.busy()) - delays
    return rank if late > 0 and longer(accounts.collecting) >= PAUSED * late else None


def straggler(facts: Facts) -> Advice | None:
    """Advise on a rank that the others wait for, unless it is the collector's pauses that they wait for."""
    if not facts.stragglers or paused_rank(facts) == facts.stragglers[0].rank:
        return None
    slow = facts.stragglers[0]
    ranks = facts.records
    saved = facts.accounts.caused(slow.rank)
    own = ranks[slow.rank]
    others = [record for record in ranks if record.rank != slow.rank]
    text = (
        f"Look at rank {slow.rank} ({own.host}): its {phase_name(facts, slow.phase)} takes {slow.seconds * 1e3:.1f} ms "
        f"longer{since(slow)}{most_of_it(facts, slow)}"
    )
    for name, value in (("cores", own.cores), ("threads", own.threads)):
        usual = Counter(getattr(record, name) for record in others).most_common(1)[0][0]
        if value < usual:
            text += f"; it has {value} {name} and the others {usual}: give it as many"
            break
    speedup = None if own.speed else expected_speedup(facts, slow)
    slices = "" if speedup is None else f'; slices by speed, DataLoader(…, speed="measured"): {speedup:.2f}× expected'
    return promise(
        "straggler",
        text + slices,
        f"its own time, without waiting for other ranks, is {slow.slowdown:.2f} times {compared_with(facts, slow)}, in "
        f"steps {slow.first_step} to {slow.last_step} ({slow.kind}); the others wait {saved * 1e3:.1f} ms for it in a "
        "step",
        _of_one_rank(facts, (slow.phase,), saved),
    )


def since(slow: SlowRank) -> str:
    """Name the step since which a rank is slow, or its last one, if it is not slow all the time."""
    during = f" in steps {slow.first_step} to {slow.last_step}"
    return {"emerging": f" since step {slow.first_step}", "recovered": during}.get(slow.kind, "")


def most_of_it(facts: Facts, slow: SlowRank) -> str:
    """Name the function of a straggler's own code, if that makes it slow and is known."""
    function = function_of_own_code(facts, slow.rank) if slow.phase in own_parts(facts) else ""
    return f", most of it in {function}" if function else ""


def compared_with(facts: Facts, slow: SlowRank) -> str:
    """Name the ranks with which a straggler is compared: one, or the median of several."""
    others = [record.rank for record in facts.records if record.rank != slow.rank]
    return f"that of rank {others[0]}" if len(others) == 1 else "the median of the others"


@dataclass(frozen=True)
class OwnCode:
    """One rank's own code, for which the others wait."""

    rank: int
    seconds: float
    """Seconds of a step by which it is longer than on the others, since the step `since` where there is one."""
    function: str
    """Function that takes most of it, as far as samples of the stack tell."""
    since: int | None
    """Number of the step since which it is longer in nearly every step; None where it is so from the start, or now and
    then."""

    @property
    def when(self) -> str:
        """Words that tell since when."""
        return "" if self.since is None else f" since step {self.since}"


def late_by_own_code(facts: Facts) -> OwnCode | None:
    """Return the rank whose own code makes the others wait; it may do so in a few steps only, as a save does."""
    accounts = facts.accounts
    ranks = range(len(facts.records))
    if facts.stragglers or len(ranks) < 2:
        return None
    rank = max(ranks, key=accounts.caused)
    longer = {part: differences(accounts.parts[part], rank) for part in step_parts.ALL}
    numbers = list(longer[step_parts.OTHER])
    own = [math.fsum(longer[part][number] for part in own_parts(facts)) for number in numbers]
    if len(own) < 2:
        return None
    delays = list(differences(accounts.delayed, rank).values()) if facts.is_loaded else [0.0] * len(own)
    waited = accounts.caused(rank) - max(0.0, fmean(delays))
    # It has to explain half of the waiting at least, or the others wait for something else.
    if fmean(own) < max(NOTABLE * facts.length, waited / 2):
        return None
    # Late because other programs were on its core, or by chance, unless it was in few, but very long steps.
    is_delayed = fmean(own) < 2 * fmean(delays)
    is_chance = fmean(own) < CERTAIN * stdev(own) / math.sqrt(len(own))
    if (is_delayed or is_chance) and not _has_long_steps(facts, rank, own, delays):
        return None
    # Late for another reason as well, such as longer batches: that one is to be told.
    others = {*step_parts.COMPUTE, step_parts.DATA, step_parts.CHECKPOINT}.difference(own_parts(facts))
    if any(fmean(longer[part].values()) > fmean(own) for part in others):
        return None
    begin = late_since(own)
    number = None if begin is None else accounts.steps[numbers[begin]]
    return OwnCode(rank, fmean(own[begin or 0 :]), function_of_own_code(facts, rank), number)


def _has_long_steps(facts: Facts, rank: int, own: Sequence[float], delays: Sequence[float]) -> bool:
    """Return whether own code made some steps of `rank` longer by a whole step or more, and none of the others'.

    Delays do not count, neither for it nor against it, and samples of the stack must have seen the code.
    """
    more = [one - max(0.0, late) for one, late in zip(own, delays, strict=True)]
    less = [one - min(0.0, late) for one, late in zip(own, delays, strict=True)]
    long = [one for one in more if one > facts.length]
    if len(long) < LONG_STEPS or min(less) < -facts.length:
        return False
    sampled = [record.sampled_s * sum(record.own_code.values()) for record in facts.records]
    return sampled[rank] - max(sampled[:rank] + sampled[rank + 1 :]) >= LONG_SEEN * math.fsum(long)


def probably_slow(facts: Facts) -> tuple[int, float] | None:
    """Return the rank that causes nearly all waiting, and its share of it; None if there is no such rank."""
    caused = [facts.accounts.caused(rank) for rank in range(len(facts.records))]
    most, total = max(caused), math.fsum(caused)
    return (caused.index(most), most / total) if total and most > PROBABLY * total else None


def function_of_own_code(facts: Facts, rank: int | None = None) -> str:
    """Return the function that most samples of own code saw, on `rank` or on all; empty where too few saw it."""
    seen = Counter[str]()
    for record in facts.records:
        if rank is None or record.rank == rank:
            seen.update(record.own_code)
    name, count = seen.most_common(1)[0] if seen else ("", 0)
    return name if count >= max(_SEEN, sum(seen.values()) / 4) else ""


def own_code(facts: Facts) -> Advice | None:
    """Advise on one rank's own code, such as a save by hand."""
    found = late_by_own_code(facts)
    if found is None or paused_rank(facts) == found.rank:  # pauses, which may fall on any line
        return None
    where = f"{found.function} on rank {found.rank}" if found.function else f"what only rank {found.rank} does"
    how = "do it less often, beside the training, or on all ranks at once"
    if found.since is None:  # not in every step, as far as is known
        how += "; a Checkpointer with async_save=True saves in the background"
    rows = [differences(facts.accounts.parts[part], found.rank).values() for part in own_parts(facts)]
    return promise(
        "own-code",
        f"Look at {where}{found.when}: {how}",
        f"rank {found.rank}'s {OWN_CODE} takes {found.seconds * 1e3:.1f} ms longer in a step than the others'"
        f"{found.when}; they wait {facts.accounts.caused(found.rank) * 1e3:.1f} ms of a step for it on average",
        _of_one_rank(facts, own_parts(facts), math.fsum(map(fmean, rows))),
    )


def _of_one_rank(facts: Facts, parts: Sequence[str], seconds: float) -> dict[str, float]:
    """Return the shares that a step loses if one rank's `parts` get `seconds` shorter, and the others wait less."""
    share, ranks = seconds / facts.length, len(facts.records)
    return spread(share / ranks, facts.shares, parts) | {
        step_parts.BUBBLE: min(share * (ranks - 1) / ranks, facts.shares[step_parts.BUBBLE]),
    }
