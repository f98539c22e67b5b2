"""Tells a straggler from a rank that was late because of other work on its host for a moment.

Such work comes and goes, but stays for a second or so: a rank that happens to share its cores with it is slower in a
hundred short steps in a row. So steps are not independent samples; stretches of a second are taken for independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

STRETCH_S, STRETCHES = 1.0, 13
"""Seconds of the shortest stretch of steps that counts as independent, and the largest number of stretches: in a long
profile they are longer, because some of the other work lasts longer, too."""
STEADY, STEADY_SHARE = 1.4, 0.9
"""Ratio to the others' time from which a rank is late beyond doubt, and the share of its steps that must show it. Load
on the host makes clean ranks so late, but lets more than one step in ten through."""
ENOUGH = round(2 / (1 - STEADY_SHARE))
"""Measured steps from which a verdict is firm: a tenth of them is then more than one step, whose length may be chance.
In windows of clean runs, beside other programs and alone, causes that the whole run did not have were told in 13 % of 3
steps, 4 % of 10, and none of 15 or more."""
LATE = 1.075
"""Ratio to the others' time from which a rank counts as late in a stretch."""
MOSTLY = 0.9
"""Share of the steps that are late after the one since which a rank is late, and that are not before it."""
CHANCE = 0.004
"""Largest probability that so many stretches are late by chance, if late and early ones are equally likely: 8 of 8, or
12 of 13."""


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
        (row[rank], median(others), length)
        for row, length in zip(busy, lengths, strict=True)
        if not math.isnan(row[rank]) and (others := others_of(row, rank)) and median(others) > 0
    ]
    stretches = _stretches([length for _, _, length in times])
    if not stretches:
        return False
    ratios = sorted(own / other for own, other, _ in times)
    if ratios[math.floor((1 - STEADY_SHARE) * len(ratios))] >= STEADY:
        return True
    late = sum(
        math.fsum(own for own, _, _ in times[stretch]) > LATE * math.fsum(other for _, other, _ in times[stretch])
        for stretch in stretches
    )
    ways = sum(math.comb(len(stretches), count) for count in range(late, len(stretches) + 1))
    return ways <= CHANCE * 2.0 ** len(stretches)


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
    """Return the values of all ranks but `rank` in a row of a table, as far as there are any."""
    return [time for place, time in enumerate(row) if place != rank and not math.isnan(time)]


def _stretches(lengths: Sequence[float]) -> list[slice]:
    """Return the steps of each stretch, without the rest at the end, which is too short for one."""
    found, first, seconds = [], 0, 0.0
    least = max(STRETCH_S, math.fsum(lengths) / (STRETCHES + 1))
    for index, length in enumerate(lengths):
        seconds += length
        if seconds >= least:
            found.append(slice(first, index + 1))
            first, seconds = index + 1, 0.0
    return found
