"""When a figure becomes a verdict: one rule for all advice.

- Enough steps were measured (:data:`~paceline.profiler.report.report.ENOUGH`).
- What is named takes a tenth of the time, and what is advised saves a twentieth: :data:`NOTABLE`, :data:`WORTH`.
- One rank is blamed only if it was late for good (:func:`is_lasting`), or if samples of its stack saw the time that it
  lost (:func:`was_seen`). Other work on a host comes and goes, but stays for a second or so: a rank that happens to
  share its cores with it is slower in a hundred short steps in a row. So stretches of a second are taken for
  independent, not steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from paceline.profiler.report.report import ENOUGH

NOTABLE, WORTH = 0.1, 0.05
"""Share of the time that a cause must take to be named, and that advice must save to be given."""
ONE_CAUSE, OTHER_TRAINING = 2.0, 0.5
"""Factors of the gain in the order of advice: if one change removes the cause, and if it makes it another training."""
SLOWDOWN = 1.15
"""Ratio to the other ranks' time from which a rank is slow. Less is usual among clean ranks of one host: a rank that
sleeps in a collective wakes late, and cores and caches differ."""
LATE, STEADY = 1.075, 1.4
"""Ratio from which a rank is late in a stretch, and from which it is late beyond doubt if nine steps in ten show it."""
MOSTLY = 0.9
"""Share of steps that stands for all of them."""
STRETCH_S, STRETCHES = 1.0, 13
"""Seconds of the shortest stretch, and the largest number of stretches: in a long profile they are longer, because some
of the other work lasts longer, too."""
CHANCE = 0.004
"""Largest probability that so many stretches are late by chance, if late and early ones are equally likely: 8 of 8, or
12 of 13."""
SEEN = 1 / 3
"""Share of the time that a rank lost in its own code which samples of the stack must have seen. Under load they come
late."""
FEWEST = 3
"""Fewest steps, or samples, from which anything is concluded."""
WAKE_S = 0.001
"""Seconds in which ranks of one host wake each other: no rank is to blame for less."""


def is_lasting(busy: Sequence[Sequence[float]], lengths: Sequence[float], rank: int) -> bool:
    """Return whether `rank` was late for good in these steps.

    Either it was steadily far behind for the length of a stretch, or it was late in so many stretches, by their sums of
    seconds, that a sign test leaves no doubt.

    Args:
        busy: seconds of computing in each step on each rank; NaN where one is missing.
        lengths: seconds of each step, waiting included.
        rank: the rank in question.
    """
    times = [
        (row[rank], usual, length)
        for row, length in zip(busy, lengths, strict=True)
        if not math.isnan(row[rank]) and (others := others_of(row, rank)) and (usual := median(others)) > 0
    ]
    least = max(STRETCH_S, math.fsum(length for _, _, length in times) / (STRETCHES + 1))
    stretches = late = 0
    own = usual = seconds = 0.0
    for own_time, usual_time, length in times:
        own, usual, seconds = own + own_time, usual + usual_time, seconds + length
        if seconds >= least:
            stretches, late = stretches + 1, late + (own > LATE * usual)
            own = usual = seconds = 0.0
    if not stretches:
        return False
    if sum(own_time >= STEADY * usual_time for own_time, usual_time, _ in times) >= MOSTLY * len(times):
        return True
    return sum(math.comb(stretches, count) for count in range(late, stretches + 1)) <= CHANCE * 2.0**stretches


def was_seen(sampled: Sequence[float], rank: int, lost: Sequence[float]) -> bool:
    """Return whether samples of the stack saw the seconds that `rank` lost in its own code, and saw them only there.

    Args:
        sampled: seconds for which samples saw each rank in its own code.
        rank: the rank in question.
        lost: seconds that it lost in each step.
    """
    # Time that was lost in two steps may be chance, however long they are.
    if sum(seconds > fmean(lost) for seconds in lost) < FEWEST:
        return False
    return sampled[rank] - max(others_of(sampled, rank)) >= SEEN * math.fsum(lost)


def steps_to_profile(length: float) -> int:
    """Return how many steps of `length` seconds give every rule what it needs: :data:`ENOUGH`, and a whole stretch."""
    return max(ENOUGH, 10 * math.ceil(STRETCH_S / length / 10))


def late_since(differences: Sequence[float]) -> int | None:
    """Return the index since which nearly all steps are late, where nearly none was before; None if there is none.

    It goes by seconds. Ratios of short steps vary so much that a rank seems to be slow long before it is.

    Args:
        differences: seconds by which each step was longer on a rank than on the others.
    """
    # Half of what it is late at the end, by the last eighth of the steps.
    border = median(differences[-(len(differences) // 8 + 1) :]) / 2 if differences else 0.0
    if border <= 0:
        return None
    # The suffix with most evidence, where one step has no more than `border`: one that is very long says no more.
    start, most, evidence = 0, 0.0, 0.0
    for index in reversed(range(len(differences))):
        evidence += max(-border, min(border, differences[index] - border))
        if evidence > most:
            start, most = index, evidence
    is_late = [difference > border for difference in differences]
    late, early = sum(is_late[start:]), start - sum(is_late[:start])
    return start if start and late >= MOSTLY * len(is_late[start:]) and early >= MOSTLY * start else None


def others_of(row: Sequence[float], rank: int) -> list[float]:
    """Return the values of all ranks but `rank` in a row of a table, except missing ones."""
    return [time for place, time in enumerate(row) if place != rank and not math.isnan(time)]
