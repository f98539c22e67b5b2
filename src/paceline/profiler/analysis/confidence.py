"""The confidence rule for all advice.

- Enough steps were measured (:data:`~paceline.profiler.report.report.ENOUGH`).
- A named cause takes a tenth of the time, and advice saves a twentieth: :data:`NOTABLE`, :data:`WORTH`.
- One rank is blamed only if it was late permanently (:func:`is_lasting`), or if stack samples saw the time that it lost
  (:func:`was_seen`). Other work on a host comes and goes but lasts for about a second, which slows a rank in a hundred
  short steps in a row. So stretches of a second count as independent, and steps do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from paceline.profiler.report.report import ENOUGH

NOTABLE, WORTH = 0.1, 0.05
"""Smallest share of the time for naming a cause, and smallest saving for giving advice."""
ONE_CAUSE, OTHER_TRAINING = 2.0, 0.5
"""Weights in the order of advice: of a change that removes a cause, and of one that changes the training."""
SLOWDOWN = 1.15
"""Smallest ratio of a slow rank to the others. Healthy ranks of one host differ by less, because a rank that sleeps in
a collective wakes late, and cores and caches differ."""
LATE, STEADY = 1.075, 1.4
"""Smallest ratio of a late stretch, and the ratio that is beyond doubt if nine in ten steps reach it."""
MOSTLY = 0.9
"""Share of steps that counts as all steps."""
STRETCH_S, STRETCHES = 1.0, 13
"""Seconds of the shortest stretch, and the largest number of stretches. A long profile has longer stretches, because it
may include other work that lasts longer."""
CHANCE = 0.004
"""Largest probability of the late stretches, if late and early ones are equally likely: 8 of 8 or 12 of 13."""
SEEN = 1 / 3
"""Share of the time lost in a rank's own code that stack samples must have seen. Under load they come late."""
FEWEST = 3
"""Fewest steps or samples for a conclusion."""
WAKE_S = 0.001
"""Seconds for waking another rank of the host. A shorter wait has no cause worth naming."""


def is_lasting(busy: Sequence[Sequence[float]], lengths: Sequence[float], rank: int) -> bool:
    """Return whether `rank` was late permanently in these steps.

    Either it was far behind in nearly all steps for at least one stretch, or a sign test over the stretches, by their
    sums of seconds, leaves no doubt.

    Args:
        busy: seconds of computing in each step on each rank; NaN if missing.
        lengths: seconds of each step, including waiting.
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
    """Return whether stack samples saw the seconds that `rank` lost in its own code, and on no other rank.

    Args:
        sampled: sampled seconds of each rank in its own code.
        rank: the rank in question.
        lost: seconds that it lost in each step.
    """
    # Two steps may be chance, even if they are long.
    if sum(seconds > fmean(lost) for seconds in lost) < FEWEST:
        return False
    return sampled[rank] - max(others_of(sampled, rank)) >= SEEN * math.fsum(lost)


def steps_to_profile(length: float) -> int:
    """Return the number of steps of `length` seconds that every rule needs: :data:`ENOUGH` and a whole stretch."""
    return max(ENOUGH, 10 * math.ceil(STRETCH_S / length / 10))


def late_since(differences: Sequence[float]) -> int | None:
    """Return the index from which nearly all steps are late, if nearly none was late before; None otherwise.

    Uses seconds, because ratios of short steps vary and make a rank appear slow too early.

    Args:
        differences: seconds by which each step was longer on a rank than on the others.
    """
    # Half of the median in the last eighth of the steps.
    border = median(differences[-(len(differences) // 8 + 1) :]) / 2 if differences else 0.0
    if border <= 0:
        return None
    # The suffix with most evidence. That of one step is clipped, so that a spike weighs no more than a late step.
    start, most, evidence = 0, 0.0, 0.0
    for index in reversed(range(len(differences))):
        evidence += max(-border, min(border, differences[index] - border))
        if evidence > most:
            start, most = index, evidence
    is_late = [difference > border for difference in differences]
    late, early = sum(is_late[start:]), start - sum(is_late[:start])
    return start if start and late >= MOSTLY * len(is_late[start:]) and early >= MOSTLY * start else None


def others_of(row: Sequence[float], rank: int) -> list[float]:
    """Return the values of the ranks other than `rank` in a row of a table, without missing ones."""
    return [time for place, time in enumerate(row) if place != rank and not math.isnan(time)]
