"""The verdict on a run, and advice: changes that would shorten a step, each with its reason and gain.

Each rule is a function of the :class:`~paceline.profiler.facts.Facts`. A gain is the predicted share of the
time per sample that this change alone would save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.core.messages import counted
from paceline.profiler import step_parts
from paceline.profiler.facts import NOTABLE, WORTH, Facts, sentence, steps_to_profile
from paceline.profiler.rules import (
    Advice,
    accumulation,
    balance,
    bucket_size,
    data_loading,
    host_bound,
    host_load,
    lack_of_cores,
    larger_batch,
    loop,
    mixed_precision,
    own_code,
    part_sentence,
    saves,
    straggler,
    threads,
)

Rule = Callable[[Facts], Advice | None]
SURE: tuple[Rule, ...] = (straggler, own_code, balance, data_loading, saves, larger_batch, threads, loop)
"""Rules that are valid even on a busy host, which slows all parts of a step and affects waiting most."""
NAMED = (step_parts.DATA, step_parts.OPTIMIZER, step_parts.CHECKPOINT, step_parts.OTHER)
"""Parts other than communication that the verdict can name if there is no advice."""
MOST = 0.95
"""Largest predicted gain."""


def find_advice(facts: Facts) -> list[Advice]:
    """Return advice, largest gain first, preferring changes that remove a cause without changing the training.

    If a lack of cores explains the measurements, return only advice that is valid anyway, and report the lack of cores
    even if fixing it saves little.
    """
    if not facts.is_firm:
        return []
    is_explained, rules = facts.is_explained_by_load(), SURE
    if not is_explained:
        rules += (host_bound, mixed_precision)
    if not facts.is_explained_by_load(step_parts.WAITING):
        # Virtual ranks do not support accumulation: their slices are already micro-batches.
        rules += (bucket_size,) if facts.records[0].virtual_ranks else (accumulation, bucket_size)
    candidates = [advice for rule in rules if (advice := rule(facts)) is not None and advice.gain >= WORTH]
    if any(advice.kind == "host-bound" for advice in candidates):  # host-bound advice already recommends larger batches
        candidates = [advice for advice in candidates if advice.kind != "larger-batch"]
    candidates.sort(key=lambda advice: -advice.gain * advice.weight)
    if is_explained:
        lacks = [threads(facts) if facts.load is not None and facts.load.is_by_ranks else None, host_load(facts)]
        kinds = {advice.kind for advice in candidates}
        candidates += [lack for lack in lacks if lack is not None and lack.kind not in kinds]
    return [replace(advice, gain=min(MOST, advice.gain)) for advice in candidates]


def headline(facts: Facts, advice: Sequence[Advice]) -> str:
    """Return the verdict: one sentence that names the largest cost."""
    steps = len(facts.accounts.steps)
    if not steps:
        return "No step was measured."
    if not facts.is_firm:
        few = f"{counted(steps, 'measured step')} {'is' if steps == 1 else 'are'} too few for a verdict"
        return f"{few}: profile {steps_to_profile(facts.length)}."
    first = advice[0].headline if advice else ""
    if facts.load is not None and facts.is_explained_by_load():
        lack = lack_of_cores(facts.load)
        return f"{first} In addition, {lack}" if first else sentence(lack)
    costs = {part: facts.shares[part] for part in NAMED}
    # The first piece of advice is the verdict, unless another part costs far more.
    if first and 2 * advice[0].gain >= max(*costs.values(), facts.shares[step_parts.COMMUNICATION]):
        return first
    costs[step_parts.COMMUNICATION] = facts.waiting
    worst = max(costs, key=lambda part: costs[part])
    if costs[worst] < NOTABLE:
        computing = math.fsum(facts.shares[part] for part in step_parts.COMPUTE)
        return f"Nothing slows the ranks down: they compute for {computing:.0%} of the time."
    return part_sentence(facts, worst)
