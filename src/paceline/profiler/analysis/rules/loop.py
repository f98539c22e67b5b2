"""The parts of a step beside computing, communication and data: optimizer, checkpoints, the loop's own code, and
Python's garbage collector, which may pause any of them.
"""

from __future__ import annotations

import math
from statistics import fmean

from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import NON_COMPUTE, promise, spread
from paceline.profiler.analysis.rules.late_ranks import function_of_own_code, late_by_own_code
from paceline.profiler.analysis.step_breakdown import mean_of
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice

NOTABLE, LOADED = 0.1, 0.2
"""Share of the time from which the loop's own code is told, and where ranks lack cores."""
PAUSE, CHANCE = 0.02, 2
"""Share of a step that the garbage collector must take to be told, and number of its longest pauses that do not count
there, as any program makes a few."""
RARER = 10
"""Times as many steps between two saves that are advised."""


def optimizer(facts: Facts) -> Advice | None:
    """Advise on an optimizer for which a faster implementation was tried."""
    tried = [(record.tried, *record.faster) for record in facts.records if record.faster is not None]
    if not tried:
        return None
    name, option, _ = tried[0]
    share, ratio = facts.shares[step_parts.OPTIMIZER], fmean(ratio for *_, ratio in tried)
    return promise(
        "optimizer",
        f"Give the optimizer {option}=True: torch.optim.{name}(…, {option}=True)",
        f"it takes {share:.0%} of a step; on copies of the parameters, its step took {ratio:.2f} times as long with it",
        {step_parts.OPTIMIZER: share * (1 - ratio)},
    )


def saves(facts: Facts) -> Advice | None:
    """Advise on checkpoints that take long."""
    rows = facts.accounts.parts[step_parts.CHECKPOINT]
    saving = {at for at, row in enumerate(rows) if any(value > 0 for value in row)}
    if not saving:
        return None
    every = len(rows) / len(saving)
    share = cost_of_saves(facts, saving)
    return promise(
        "checkpoints",
        f"Save less often, such as every {RARER * every:.0f} steps in place of every {every:.0f}, or in the "
        "background: Checkpointer(…, async_save=True)",
        f"saving takes {facts.shares[step_parts.CHECKPOINT]:.0%} of the time, and with the steps that it slows down "
        f"{share:.0%}",
        spread(share * (1 - 1 / RARER), facts.shares, [step_parts.CHECKPOINT, *NON_COMPUTE, *step_parts.COMPUTE]),
    )


def cost_of_saves(facts: Facts, saving: set[int]) -> float:
    """Return the share of the time that steps would save without the saves in `saving`.

    The disk, caches and waiting ranks make the step after a save longer, too. So steps that are neither count as usual.
    """
    lengths = facts.accounts.lengths
    usual = [
        value
        for at, row in enumerate(lengths)
        if at not in saving and at - 1 not in saving
        for value in row
        if not math.isnan(value)
    ]
    share = facts.shares[step_parts.CHECKPOINT]
    return max(share, 1 - fmean(usual) / facts.length) if usual else share


def loop(facts: Facts) -> Advice | None:
    """Advise on time in the loop's own code, of all ranks."""
    share = facts.shares[step_parts.OTHER]
    function = function_of_own_code(facts)
    if share < NOTABLE or late_by_own_code(facts):
        return None
    if facts.is_loaded and (share < LOADED or not function):  # delays, which any part has, rather than code
        return None
    return promise(
        "loop",
        f"Look at the loop's own code: {function or 'metrics, .item(), logging, moving batches'}",
        f"{share:.0%} of a step is neither data, forward, backward, communication nor optimizer",
        {step_parts.OTHER: share / 2},
    )


def collector(facts: Facts) -> Advice | None:
    """Advise on pauses of Python's garbage collector; a step is as long as on the rank that pauses longest."""
    rows = facts.accounts.collecting
    longest = [max(0.0 if math.isnan(value) else value for value in row) for row in rows]
    if math.fsum(sorted(longest)[:-CHANCE]) < PAUSE * facts.length * len(rows):
        return None
    found = [mean_of([[row[rank]] for row in rows]) for rank in range(len(facts.records))]
    rank, own = found.index(max(found)), fmean(found) / facts.length
    waiting = min(fmean(longest) / facts.length - own, facts.shares[step_parts.BUBBLE])
    return promise(
        "collector",
        "Call gc.freeze() once model, data set and optimizer are there; if that is not enough, gc.disable(), and "
        "gc.collect() between epochs",
        f"Python's garbage collector takes {found[rank] / facts.length:.0%} of a step on rank {rank}, and pauses it in "
        f"{sum(row[rank] > PAUSE * facts.length for row in rows)} of {len(rows)} steps",
        spread(own, facts.shares, _paused_parts(facts, rank)) | {step_parts.BUBBLE: waiting},
    )


def _paused_parts(facts: Facts, rank: int) -> list[str]:
    """Return the parts of a step but waiting, those first that are longest beyond their mean where `rank` is paused."""
    paused = [row[rank] for row in facts.accounts.collecting]

    def goes_with_pauses(part: str) -> float:
        seconds = [row[rank] for row in facts.accounts.parts[part]]
        usual = facts.accounts.mean(part)
        pairs = zip(paused, seconds, strict=True)
        return math.fsum(pause * (one - usual) for pause, one in pairs if not math.isnan(pause + one))

    return sorted(set(step_parts.ALL).difference(step_parts.WAITING), key=goes_with_pauses, reverse=True)
