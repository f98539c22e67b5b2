"""A rank for which the others wait."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, stdev

from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import promise
from paceline.profiler.analysis.rules.slices_by_speed import expected_speedup
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice, SlowRank

OWN_CODE = "own code in the loop"
NOTABLE, CERTAIN = 0.05, 4.0
"""Share of a step by which a rank's own code must be longer, and that difference by its standard error."""
PROBABLY = 0.85
"""Share of the waiting from which the rank that causes it is probably slow, even if too few steps show it."""
_SEEN = 3
"""Samples of the stack that name a function."""


def phase_name(part: str) -> str:
    """Return the name of a part of a step in a sentence about one rank."""
    return OWN_CODE if part == step_parts.OTHER else {step_parts.DATA: "waiting for data"}.get(part, part)


def straggler(facts: Facts) -> Advice | None:
    """Advise on a rank that the others wait for."""
    if not facts.stragglers:
        return None
    slow = facts.stragglers[0]
    ranks = facts.records
    saved = facts.accounts.caused(slow.rank)
    own = ranks[slow.rank]
    others = [record for record in ranks if record.rank != slow.rank]
    text = (
        f"Look at rank {slow.rank} ({own.host}): its {phase_name(slow.phase)} takes {slow.seconds * 1e3:.1f} ms longer"
    )
    if slow.phase == step_parts.OTHER and (function := function_of_own_code(facts, slow.rank)):
        text += f", most of it in {function}"
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
        _of_one_rank(facts, slow.phase, saved),
    )


def compared_with(facts: Facts, slow: SlowRank) -> str:
    """Name the ranks with which a straggler is compared: one, or the median of several."""
    others = [record.rank for record in facts.records if record.rank != slow.rank]
    return f"that of rank {others[0]}" if len(others) == 1 else "the median of the others"


@dataclass(frozen=True)
class OwnCode:
    """One rank's own code, for which the others wait."""

    rank: int
    seconds: float
    """Seconds of a step by which it is longer than on the others."""
    function: str
    """Function that takes most of it, as far as samples of the stack tell."""


def late_by_own_code(facts: Facts) -> OwnCode | None:
    """Return the rank whose own code makes the others wait; it may do so in a few steps only, as a save does."""
    accounts = facts.accounts
    ranks = range(len(facts.records))
    if facts.stragglers or len(ranks) < 2:
        return None
    rank = max(ranks, key=accounts.caused)
    longer = {part: _differences(accounts.parts[part], rank) for part in step_parts.ALL}
    own, waited = longer[step_parts.OTHER], accounts.caused(rank)
    if len(own) < 2 or fmean(own) < max(NOTABLE * facts.length, waited / 2):
        return None
    if facts.is_loaded and fmean(own) < 2 * fmean(_differences(accounts.delayed, rank)):
        return None  # it is late because other programs were on its core
    if fmean(own) < CERTAIN * stdev(own) / math.sqrt(len(own)):
        return None
    # Late for another reason as well, such as longer batches: that one is to be told.
    if any(fmean(longer[part]) > fmean(own) for part in (*step_parts.COMPUTE, step_parts.DATA, step_parts.CHECKPOINT)):
        return None
    return OwnCode(rank, fmean(own), function_of_own_code(facts, rank))


def probably_slow(facts: Facts) -> tuple[int, float] | None:
    """Return the rank that causes nearly all waiting, and its share of it; None if there is no such rank."""
    caused = [facts.accounts.caused(rank) for rank in range(len(facts.records))]
    most, total = max(caused), math.fsum(caused)
    return (caused.index(most), most / total) if total and most > PROBABLY * total else None


def _differences(table: list[list[float]], rank: int) -> list[float]:
    found = []
    for row in table:
        others = [value for place, value in enumerate(row) if place != rank and not math.isnan(value)]
        if others and not math.isnan(row[rank]):
            found.append(row[rank] - fmean(others))
    return found


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
    if found is None:
        return None
    where = f"{found.function} on rank {found.rank}" if found.function else f"what only rank {found.rank} does"
    return promise(
        "own-code",
        f"Look at {where}: do it less often, beside the training, or on all ranks at once; a Checkpointer with "
        "async_save=True saves in the background",
        f"rank {found.rank}'s {OWN_CODE} takes {found.seconds * 1e3:.1f} ms longer in a step than the others', who "
        f"wait {facts.accounts.caused(found.rank) * 1e3:.1f} ms for it",
        _of_one_rank(facts, step_parts.OTHER, found.seconds),
    )


def _of_one_rank(facts: Facts, part: str, seconds: float) -> dict[str, float]:
    """Return the shares that a step loses if one rank's `part` gets `seconds` shorter, and the others wait less."""
    share, ranks = seconds / facts.length, len(facts.records)
    return {
        part: min(share / ranks, facts.shares[part]),
        step_parts.BUBBLE: min(share * (ranks - 1) / ranks, facts.shares[step_parts.BUBBLE]),
    }
