"""The verdict on a run in one sentence: the largest thing that costs time, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.output.wording import counted
from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.balance import cost_of_a_cell
from paceline.profiler.analysis.rules.host_load import is_explained
from paceline.profiler.analysis.rules.late_ranks import (
    BEFORE_FORWARD,
    OWN_CODE,
    function_of_own_code,
    late_by_own_code,
    most_of_it,
    paused_rank,
    phase_name,
    probably_slow,
    since,
)
from paceline.profiler.analysis.straggler_check import steps_to_profile
from paceline.profiler.records.core_use import Load
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import sentence
from paceline.profiler.report.report import Advice

NOTABLE = 0.1
"""Share of the time from which a part of a step is named."""
_LATE = {"straggler", "own-code"}
"""Advice about one rank. What comes before it saves far more, and has the headline."""
_SHORTENED = {
    "balance": step_parts.BUBBLE,
    "data-loading": step_parts.DATA,
    "checkpoints": step_parts.CHECKPOINT,
    "optimizer": step_parts.OPTIMIZER,
    "sparse-gradients": step_parts.COMMUNICATION,
    "loop": step_parts.OTHER,
}
"""Part of a step that each kind of advice makes shorter."""


def headline(facts: Facts, advice: Sequence[Advice]) -> str:
    """Return the verdict in one sentence."""
    if not facts.accounts.steps:
        return "No step was measured."
    verdict = _verdict(facts, advice)
    if facts.is_firm:
        return verdict
    steps = len(facts.accounts.steps)
    few = f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} too few to tell"
    return f"Provisional, as {few}: profile {steps_to_profile(facts.length)}. {verdict}"


def _verdict(facts: Facts, advice: Sequence[Advice]) -> str:
    """Name the largest thing that costs time, as far as the steps show."""
    kinds = {one.kind for one in advice}
    is_collector = bool(advice) and advice[0].kind == "collector"
    if is_collector and (advice[0].gain >= max(one.gain for one in advice) or paused_rank(facts) is not None):
        # Whatever it pauses, which may be any part, on any rank.
        return sentence(advice[0].reason)
    if facts.load is not None and is_explained(facts):
        cause = next(filter(None, (_cause(facts, one.kind) for one in advice)), "")
        return f"{cause} Beside that, {_lack_of_cores(facts.load)}" if cause else sentence(_lack_of_cores(facts.load))
    is_far_less = bool(kinds & _LATE) and advice[0].kind not in {*_LATE, "threads"}
    late = "" if is_far_less else _one_rank(facts, kinds)
    return late or _too_small(facts, kinds) or _largest_part(facts, kinds, advice[0].kind if advice else "")


def _lack_of_cores(load: Load) -> str:
    """Say who keeps the most delayed rank from its cores."""
    lacked = f"rank {load.rank} was ready to run and had no core for"
    crowd = load.neighbours.description()
    if not load.is_by_ranks():
        return f"other programs hold the ranks up: {lacked} {load.share:.0%} of its time."
    if not load.is_by_others():
        return f"the ranks hold each other up: {crowd}, and {lacked} {load.share:.0%} of its time."
    return (
        f"other programs hold the ranks up, and these each other: {lacked} {load.of_others:.0%} of its time because of "
        f"other programs, and for {load.of_ranks:.0%} because {crowd}."
    )


def _cause(facts: Facts, kind: str) -> str:
    """Name what advice of `kind` removes, if it is one that is sure under load."""
    if kind == "larger-batch":
        return _too_small(facts, {kind})
    part = _SHORTENED.get(kind)
    return _one_rank(facts, {kind}) if part is None else _sentence(facts, part, facts.shares[part])


def _one_rank(facts: Facts, kinds: set[str]) -> str:
    """Name the rank for which the others wait."""
    waiting = f"{facts.shares[step_parts.BUBBLE]:.0%} of all time is spent waiting for a rank"
    if facts.stragglers:
        slow = facts.stragglers[0]
        phase = phase_name(facts, slow.phase)
        return (
            f"Rank {slow.rank} holds the others up: its {phase} takes {slow.seconds * 1e3:.1f} ms "
            f"longer in a step{since(slow)}{most_of_it(facts, slow)}; {waiting}."
        )
    if (own := late_by_own_code(facts)) is not None:
        where = f", most of it in {own.function}" if own.function else ""
        return (
            f"Rank {own.rank} holds the others up: its {OWN_CODE} takes {own.seconds * 1e3:.1f} ms longer in a "
            f"step{own.when}{where}; {waiting}."
        )
    probable = probably_slow(facts)
    # Only beside its card, which in_turns() makes where batches do not explain the waiting.
    if probable is not None and "balance" in kinds and cost_of_a_cell(facts) is None:
        share = f"{facts.shares[step_parts.BUBBLE]:.0%}"
        return f"Rank {probable[0]} is probably slow, profile longer to be sure: others wait for {share} of the time."
    return ""


def _too_small(facts: Facts, kinds: set[str]) -> str:
    """Say that steps are too small, where what they cost once each is more than any other part of them."""
    once = facts.shares[step_parts.COMMUNICATION] + facts.shares[step_parts.OPTIMIZER]
    others = (step_parts.DATA, step_parts.CHECKPOINT, step_parts.OTHER, step_parts.BUBBLE)
    # Larger batches share a slow optimizer out, too, but one word of code makes it faster, so it is named first.
    is_slow_optimizer = facts.shares[step_parts.OPTIMIZER] > facts.shares[step_parts.COMMUNICATION] * (
        1 if "optimizer" in kinds else 2
    )
    if len(facts.records) < 2 or "larger-batch" not in kinds or is_slow_optimizer or "balance" in kinds:
        return ""
    if once < 2 * NOTABLE or once < max(facts.shares[part] for part in others):
        return ""
    return f"Steps are too small: communication and the optimizer take {once:.0%} of {facts.length * 1e3:.1f} ms."


def _largest_part(facts: Facts, kinds: set[str], first: str) -> str:
    """Name the largest part of a step; `first` is the kind of the first advice."""
    shares = facts.shares
    costs = {
        part: shares[part] for part in (step_parts.DATA, step_parts.OPTIMIZER, step_parts.CHECKPOINT, step_parts.OTHER)
    }
    if "balance" in kinds:
        costs |= {part: shares[part] for part in step_parts.WAITING}
    else:  # ranks that come a little sooner or later, without a cause, are a part of what meeting costs
        costs[step_parts.COMMUNICATION] = sum(shares[part] for part in step_parts.WAITING)
    worst = max(costs, key=lambda part: costs[part])
    advised = _SHORTENED.get(first, worst)
    if worst == step_parts.COMMUNICATION and shares[worst] < shares[advised]:
        worst = advised  # the ranks meet late because of it
    if costs[worst] < NOTABLE:
        compute = sum(shares[part] for part in step_parts.COMPUTE)
        return f"Nothing holds the ranks up: they compute for {compute:.0%} of the time."
    sentence = _sentence(facts, worst, costs[worst])
    if worst == step_parts.COMMUNICATION and shares[step_parts.BUBBLE] and "balance" not in kinds:
        return sentence.removesuffix(".") + ", waiting for each other included."
    return sentence


def _sentence(facts: Facts, part: str, of_time: float) -> str:
    """Say that a part of a step takes this share of the time."""
    share, function = f"{of_time:.0%}", function_of_own_code(facts)
    much = f", much in {function}" if function else ""
    return {
        step_parts.DATA: f"The loop waits for data for {share} of the time."
        if facts.has_loader
        else f"Work {BEFORE_FORWARD} takes {share} of a step{much}.",
        step_parts.OPTIMIZER: f"The optimizer takes {share} of a step.",
        step_parts.CHECKPOINT: f"Saving checkpoints takes {share} of the time.",
        step_parts.OTHER: f"The loop's own code takes {share} of a step{much}.",
        step_parts.BUBBLE: f"Ranks wait for each other, in turns, for {share} of the time.",
        step_parts.COMMUNICATION: f"Communication takes {share} of a step.",
    }[part]
