"""Advice: changes that would make a step shorter, with reason and gain, predicted from this run's own figures.

Each rule is a function of the :class:`~paceline.profiler.analysis.metrics.Facts`, and returns None where it does not
apply.
Gains are shares of the time for a sample that would be saved, if that alone were changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.balance import in_turns, uneven_batches
from paceline.profiler.analysis.rules.communication import accumulation, bucket_size, one_slow_bucket, sparse_gradients
from paceline.profiler.analysis.rules.computing import fewer_ranks, larger_batch, mixed_precision
from paceline.profiler.analysis.rules.data import data_loading
from paceline.profiler.analysis.rules.gains import in_turn
from paceline.profiler.analysis.rules.host_load import explains, is_explained, lack_of_cores, threads
from paceline.profiler.analysis.rules.late_ranks import own_code, straggler
from paceline.profiler.analysis.rules.loop import collector, loop, optimizer, saves
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice

LEAST = 0.02
"""Least gain that is worth a change."""
_CAUSES, _NOTABLE = ("straggler", "own-code", "slow-bucket", "optimizer", "threads", "collector"), 0.05
"""Kinds of advice that remove a cause, or need one word, and the gain from which they come first."""
_FAR = 2.0
"""Times as much as other advice saves if it comes first all the same."""
_TRAINS_OTHERWISE = ("larger-batch", "accumulation", "mixed-precision", "fewer-ranks")
"""Kinds of advice that change the training. Advice that leaves it as it is comes first unless they save far more."""
Rule = Callable[[Facts], Advice | None]
SURE: tuple[Rule, ...] = (
    straggler,
    own_code,
    uneven_batches,
    data_loading,
    saves,
    optimizer,
    larger_batch,
    sparse_gradients,
    threads,
    collector,
    loop,
)
"""Rules that hold under load, too, which makes every part of a step longer, but most of all waiting."""
OF_WAITING: tuple[Rule, ...] = (in_turns, accumulation, one_slow_bucket, bucket_size, fewer_ranks)
"""Rules about communication and bubbles, which a lack of cores makes longer than all else."""

NOT_WITH_VIRTUAL_RANKS: tuple[Rule, ...] = (accumulation, uneven_batches, sparse_gradients)
"""Rules whose advice virtual ranks refuse: their slices are micro-batches already, cut in one way, of dense sums."""


def advise(facts: Facts) -> list[Advice]:
    """Return the advice that applies, the greatest gain first, but advice that removes a cause ahead of all other.

    Gains of advice that changes the training count for less, because it takes more than an edit to follow it. Advice
    that saves nothing more once the advice before it is followed is left out. Where a lack of cores explains what was
    measured, there is only what is sure in spite of it, and the lack is told even if its end saves little.
    """
    if not facts.accounts.steps:
        return []
    # Figures under load are less sure, so what is told in spite of it has to save more.
    rules, least = (SURE, _NOTABLE) if is_explained(facts) else ((*SURE, mixed_precision), LEAST)
    if not explains(facts, step_parts.WAITING):
        rules += OF_WAITING
    if facts.records[0].virtual_ranks:
        rules = tuple(rule for rule in rules if rule not in NOT_WITH_VIRTUAL_RANKS)
    found = [advice for rule in rules if (advice := rule(facts)) is not None and advice.gain >= least]
    worth = {one.kind: one.gain / (_FAR if one.kind in _TRAINS_OTHERWISE else 1.0) for one in found}
    first = max(_NOTABLE, max((advice.gain for advice in found), default=0.0) / _FAR)
    found.sort(key=lambda advice: (advice.kind not in _CAUSES or advice.gain < first, -worth[advice.kind]))
    found = [one for one in in_turn(found, facts.shares) if one.left is None or one.left >= LEAST]
    # The advice on threads is among the sure rules, too.
    found += [one for one in lack_of_cores(facts) if one.kind not in {other.kind for other in found}]
    return [replace(one, is_firm=facts.is_firm) for one in found]
