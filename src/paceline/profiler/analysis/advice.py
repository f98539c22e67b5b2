"""The verdict on a run, and advice: changes that would make a step shorter, with reason and gain.

Each rule is a function of the :class:`~paceline.profiler.analysis.facts.Facts`. Gains are shares of the time for a
sample that would be saved, if that alone were changed, predicted from this run's own figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.output.wording import counted
from paceline.profiler.analysis.confidence import NOTABLE, WORTH, steps_to_profile
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.rules.communication import accumulation, bucket_size
from paceline.profiler.analysis.rules.cores import explains, host_load, lack_of_cores, threads
from paceline.profiler.analysis.rules.data import data_loading
from paceline.profiler.analysis.rules.finding import Finding, part_sentence
from paceline.profiler.analysis.rules.ranks import late_in_turns, own_code, straggler, uneven_batches
from paceline.profiler.analysis.rules.steps import larger_batch, loop, mixed_precision, saves
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import sentence
from paceline.profiler.report.report import Advice

Rule = Callable[[Facts], Finding | None]
SURE: tuple[Rule, ...] = (straggler, own_code, uneven_batches, data_loading, saves, larger_batch, threads, loop)
"""Rules that hold under load, too, which makes every part of a step longer, but most of all waiting."""
OF_WAITING: tuple[Rule, ...] = (late_in_turns, accumulation, bucket_size)
"""Rules about communication and bubbles, which a lack of cores makes longer than all else."""
NAMED = (step_parts.DATA, step_parts.OPTIMIZER, step_parts.CHECKPOINT, step_parts.OTHER)
"""Parts beside communication that a verdict names where no advice does."""
NOT_WITH_VIRTUAL_RANKS: tuple[Rule, ...] = (accumulation, uneven_batches)
"""Rules whose advice virtual ranks refuse: their slices are micro-batches already, cut in one way."""


def find_causes(facts: Facts) -> list[Finding]:
    """Return what costs time: one cause that a change removes first, and changes to the training last, else by gain.

    Where a lack of cores explains what was measured, there is only what is sure in spite of it, and the lack is told
    even if its end saves little.
    """
    if not facts.is_firm:
        return []
    is_explained = explains(facts)
    rules = SURE if is_explained else (*SURE, mixed_precision)
    if not explains(facts, step_parts.WAITING):
        rules += OF_WAITING
    if facts.records[0].virtual_ranks:
        rules = tuple(rule for rule in rules if rule not in NOT_WITH_VIRTUAL_RANKS)
    causes = [cause for rule in rules if (cause := rule(facts)) is not None and cause.gain >= WORTH]
    causes.sort(key=lambda cause: -cause.gain * cause.weight)
    if is_explained:
        lacks = (threads(facts) if facts.load is not None and facts.load.is_by_ranks() else None, host_load(facts))
        kinds = {cause.kind for cause in causes}
        causes += [lack for lack in lacks if lack is not None and lack.kind not in kinds]
    return causes


def advise(facts: Facts, causes: Sequence[Finding]) -> list[Advice]:
    """Return the remedies of `causes`, with what each still saves once all before it are followed.

    A remedy shortens a part by the same ratio, whatever is left of it. One that then saves too little is left out.
    """
    remaining, found = dict(facts.shares), list[Advice]()
    for cause in causes:
        after = dict(remaining)
        for part, gain in cause.parts.items():
            if facts.shares[part] > 0:
                after[part] *= max(0.0, 1 - gain / facts.shares[part])
        left = sum(remaining.values()) - sum(after.values())
        if not found or left >= WORTH / 2 or cause.kind in ("host-load", "threads"):
            remaining = after
            about = (cause.kind, cause.text, cause.reason, cause.gain, dict(cause.parts))
            found.append(Advice(*about, min(left, cause.gain) if found else None, cause.predictions))
    return found


def headline(facts: Facts, causes: Sequence[Finding]) -> str:
    """Return the verdict in one sentence: the largest thing that costs time."""
    steps = len(facts.accounts.steps)
    if not steps:
        return "No step was measured."
    if not facts.is_firm:
        few = f"{counted(steps, 'measured step')} {'is' if steps == 1 else 'are'} too few for a verdict"
        return f"{few}: profile {steps_to_profile(facts.length)}."
    first = causes[0] if causes else None
    if facts.load is not None and explains(facts):
        lack, cause = lack_of_cores(facts.load), "" if first is None else first.headline
        return f"{cause} Beside that, {lack}" if cause else sentence(lack)
    shares = facts.shares
    costs = {part: shares[part] for part in NAMED}
    costs[step_parts.COMMUNICATION] = sum(shares[part] for part in step_parts.WAITING)
    worst = max(costs, key=lambda part: costs[part])
    if first is not None and first.headline:
        shortened = max(first.parts, key=lambda part: first.parts[part])
        shortened = step_parts.COMMUNICATION if shortened in step_parts.WAITING else shortened
        if shortened == worst or 2 * first.gain >= costs[worst]:
            return first.headline
    if costs[worst] < NOTABLE:
        computing = sum(shares[part] for part in step_parts.COMPUTE)
        return f"Nothing holds the ranks up: they compute for {computing:.0%} of the time."
    return part_sentence(facts, worst)
