"""Conditions that measurements must meet before the profiler gives advice.

- At least :data:`ENOUGH` steps were measured.
- The cause takes at least a tenth of the time (:data:`NOTABLE`), or the change saves at least a twentieth
  (:data:`WORTH`).
- A single rank is blamed only if it was late throughout (:func:`is_lasting`), or if stack samples show the time that it
  lost (:func:`was_seen`). Other programs can slow a rank for about a second, which may be a hundred short steps in a
  row. The statistics therefore treat stretches of a second as independent, but not single steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

ENOUGH = 20
"""Minimum number of measured steps for a verdict, advice and shares of the time. In excerpts of healthy runs, the
profiler named a cause that the whole run did not have: in 13% of the 3-step excerpts, in 4% of the 10-step excerpts,
and never in 15 or more steps."""
NOTABLE, WORTH = 0.1, 0.05
"""Minimum share of the time to name a cause, and minimum saving to give advice."""
ONE_CAUSE, OTHER_TRAINING = 2.0, 0.5
"""Weights for ordering advice: for a change that removes a cause, and for a change to the training itself."""
SLOWDOWN = 1.15
"""Minimum ratio for a rank to count as slower than the others. Healthy ranks on one host differ by less, because ranks
that sleep in a collective wake late, and cores and caches differ."""
LATE, STEADY = 1.075, 1.4
"""Minimum ratio for a stretch to count as late, and the ratio that proves lateness if nine in ten steps reach it."""
MOSTLY = 0.9
"""Share of steps that counts as nearly all steps."""
STRETCH_S, STRETCHES = 1.0, 13
"""Minimum length of a stretch in seconds, and maximum number of stretches. A long profile has longer stretches, because
other programs may slow it for longer."""
CHANCE = 0.004
"""Largest p-value of the sign test. To pass, at least 8 of 8 or 12 of 13 stretches must be late."""
SEEN = 1 / 3
"""Minimum share of the time lost in a rank's own code that stack samples must account for. The share is low, because
samples are late on a busy host."""
FEWEST = 3
"""Minimum number of steps or samples needed to draw a conclusion."""
WAKE_S = 0.001
"""Seconds that it takes ranks on one host to wake each other. No rank is blamed for less."""


def is_lasting(busy: Sequence[Sequence[float]], lengths: Sequence[float], rank: int) -> bool:
    """Return whether `rank` was late throughout these steps, not just for a while.

    Compares the rank with the median of the others. The rank was late throughout if it was far slower in nearly all
    steps (which must last at least one stretch), or if a sign test on the total time of each stretch rules out chance.

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
    shortest = max(STRETCH_S, math.fsum(length for _, _, length in times) / (STRETCHES + 1))
    stretches = late_count = 0
    own_seconds = usual = seconds = 0.0
    for own_time, usual_time, length in times:
        own_seconds, usual, seconds = own_seconds + own_time, usual + usual_time, seconds + length
        if seconds >= shortest:
            stretches, late_count = stretches + 1, late_count + (own_seconds > LATE * usual)
            own_seconds = usual = seconds = 0.0
    if not stretches:
        return False
    if sum(own_time >= STEADY * usual_time for own_time, usual_time, _ in times) >= MOSTLY * len(times):
        return True
    return sum(math.comb(stretches, count) for count in range(late_count, stretches + 1)) <= CHANCE * 2.0**stretches


def was_seen(sampled: Sequence[float], rank: int, lost: Sequence[float]) -> bool:
    """Return whether stack samples show that only `rank` lost this time in its own code.

    Args:
        sampled: sampled seconds of each rank in its own code.
        rank: the rank in question.
        lost: seconds that it lost in each step.
    """
    # Two steps may be due to chance, even if they are long.
    if sum(seconds > fmean(lost) for seconds in lost) < FEWEST:
        return False
    return sampled[rank] - max(others_of(sampled, rank)) >= SEEN * math.fsum(lost)


def steps_to_profile(length: float) -> int:
    """Return how many steps of `length` seconds to profile: at least :data:`ENOUGH`, and at least one full stretch."""
    return max(ENOUGH, 10 * math.ceil(STRETCH_S / length / 10))


def late_since(differences: Sequence[float]) -> int | None:
    """Return the index of the step at which a rank became late; None if it did not.

    From that step on, a share of at least :data:`MOSTLY` of the steps is late; of the earlier steps, at least the same
    share is not late. Seconds are compared, because ratios of short steps are noisy and would put the change too early.

    Args:
        differences: how many seconds longer than the others the rank took for each step.
    """
    # A step is late if its difference exceeds half of the median over the last eighth of the steps.
    border = median(differences[-(len(differences) // 8 + 1) :]) / 2 if differences else 0.0
    if border <= 0:
        return None
    # Find the suffix with the most evidence. Each step's evidence is clipped, so a spike counts like any late step.
    start, largest, evidence = 0, 0.0, 0.0
    for index in reversed(range(len(differences))):
        evidence += max(-border, min(border, differences[index] - border))
        if evidence > largest:
            start, largest = index, evidence
    is_late = [difference > border for difference in differences]
    late_count, early_count = sum(is_late[start:]), start - sum(is_late[:start])
    return start if start and late_count >= MOSTLY * len(is_late[start:]) and early_count >= MOSTLY * start else None


def others_of(row: Sequence[float], rank: int) -> list[float]:
    """Return the values of all ranks except `rank`, skipping missing values."""
    return [time for place, time in enumerate(row) if place != rank and not math.isnan(time)]
