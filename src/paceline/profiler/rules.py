"""Detects ranks that wait for a slow rank, for one rank's own code, or for each other in turns."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import correlation, fmean

from paceline.profiler.analysis.confidence import MOSTLY, NOTABLE, ONE_CAUSE, WAKE_S, WORTH, late_since, was_seen
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.rules.words import OWN_CODE, function_of_own_code
from paceline.profiler.report.advice import Advice
from paceline.profiler.report.step_parts import BUBBLE, CHECKPOINT, COMPUTE, DATA, OTHER, WAITING


@dataclass(frozen=True)
class LateRank:
    """A rank that makes the others wait, described in words."""

    rank: int
    what: str
    """Part of the step that takes longer."""
    seconds: float
    """Additional seconds per step."""
    when: str
    """Description of the affected steps; empty for all steps."""
    function: str
    """Function with most of the additional time; empty if unknown."""

    def longer(self, per: str = "") -> str:
        detail = f", most of it in {self.function}" if self.function else ""
        return f"its {self.what} takes {self.seconds * 1e3:.1f} ms longer{per}{self.when}{detail}"

    def headline(self, facts: Facts) -> str:
        waiting = f"{facts.shares[BUBBLE]:.0%} of all time is spent waiting for another rank"
        return f"Rank {self.rank} slows the others down: {self.longer(' per step')}; {waiting}."


def straggler(facts: Facts) -> Advice | None:
    """Detect a rank that computes longer than the others and makes them wait."""
    if not facts.stragglers:
        return None
    slow = facts.stragglers[0]
    slow_record = facts.records[slow.rank]
    others = [record for record in facts.records if record is not slow_record]
    activity = {OTHER: OWN_CODE, DATA: "waiting for data"}.get(slow.phase, slow.phase)
    during = f" in steps {slow.first_step} to {slow.last_step}"
    when = {"emerging": f" since step {slow.first_step}", "recovered": during}.get(slow.kind, "")
    function = function_of_own_code(facts, slow.rank) if slow.phase == OTHER else ""
    late_rank = LateRank(slow.rank, activity, slow.seconds, when, function)
    remedy = ""
    for name in ("cores", "threads"):
        usual = Counter(getattr(record, name) for record in others).most_common(1)[0][0]
        if getattr(slow_record, name) < usual:
            remedy = f"; it has {getattr(slow_record, name)} {name} and the others {usual}: give it the same number"
            break
    compared = f"that of rank {others[0].rank}" if len(others) == 1 else "the median of the others"
    waited = facts.accounts.caused(slow.rank)
    return Advice(
        "straggler",
        f"Look at rank {slow.rank} ({slow_record.host}): {late_rank.longer()}{remedy}",
        f"its own time, excluding waits for other ranks, is {slow.slowdown:.2f} times {compared}{during} "
        f"({slow.kind}); the others wait {waited * 1e3:.1f} ms for it per step",
        _saved_by_one_rank(facts, waited),
        late_rank.headline(facts),
        ONE_CAUSE,
    )


def own_code(facts: Facts) -> Advice | None:
    """Detect one rank's own code that makes the others wait, such as a hand-written save or an evaluation."""
    finding = late_by_own_code(facts)
    if finding is None:
        return None
    where = f"{finding.function} on rank {finding.rank}" if finding.function else f"what only rank {finding.rank} does"
    how = "do it less often, in the background, or on all ranks at once"
    if not finding.when:  # perhaps not in every step
        how += "; a Checkpointer with async_save=True saves in the background"
    return Advice(
        "own-code",
        f"Look at {where}{finding.when}: {how}",
        f"rank {finding.rank}'s {OWN_CODE} takes {finding.seconds * 1e3:.1f} ms longer per step than that of the others"
        f"{finding.when}; they wait {facts.accounts.caused(finding.rank) * 1e3:.1f} ms per step for it on average",
        _saved_by_one_rank(facts, fmean(facts.longer(finding.rank, OTHER).values())),
        finding.headline(facts),
        ONE_CAUSE,
    )


def late_by_own_code(facts: Facts) -> LateRank | None:
    """Return the rank whose own code makes the others wait, in all steps or only in some, such as steps with a save."""
    accounts = facts.accounts
    if facts.stragglers or len(facts.records) < 2 or not facts.is_firm:
        return None
    rank = max(range(len(facts.records)), key=accounts.caused)
    longer = facts.longer(rank, OTHER)
    if not longer:
        return None
    delays = facts.delays(rank)
    lost = [seconds - delays.get(row, 0.0) for row, seconds in longer.items()]
    # The rank must explain at least half of the waiting.
    waited = accounts.caused(rank) - max(0.0, fmean(delays.values()) if delays else 0.0)
    if fmean(lost) < max(WORTH * facts.length, waited / 2):
        return None
    if not was_seen([record.sampled_s * sum(record.own_code.values()) for record in facts.records], rank, lost):
        return None
    # Something else, such as longer batches, costs more.
    if any(fmean(facts.longer(rank, part).values()) > fmean(longer.values()) for part in (*COMPUTE, DATA, CHECKPOINT)):
        return None
    begin = late_since(list(longer.values()))
    when = "" if begin is None else f" since step {accounts.steps[list(longer)[begin]]}"
    seconds = fmean(list(longer.values())[begin or 0 :])
    return LateRank(rank, OWN_CODE, seconds, when, function_of_own_code(facts, rank))


def _saved_by_one_rank(facts: Facts, seconds: float) -> float:
    """Return the share of all ranks' time that is saved if one rank takes `seconds` less and the others wait less."""
    share, ranks = seconds / facts.length, len(facts.records)
    return share / ranks + min(share * (ranks - 1) / ranks, facts.shares[BUBBLE])


def balance(facts: Facts) -> Advice | None:
    """Detect ranks that wait for each other in turns, for example because of batches of unequal size."""
    if len(facts.records) < 2 or facts.stragglers or late_by_own_code(facts) or facts.records[0].virtual_ranks:
        return None
    share = facts.shares[BUBBLE]
    in_turns = f"Ranks wait for each other, in turns, for {share:.0%} of the time."
    if _sizes_explain_times(facts):
        cells = [value for row in facts.accounts.figures("cells") for value in row if not math.isnan(value)]
        return Advice(
            "balance",
            "Give ranks batches of equal cost: paceline.data.DataLoader(…, cost=lambda sample: …), with the length of "
            "a sample, and padded=True if batches are padded to their longest sample",
            f"ranks wait for each other in turns for {share:.0%} of the time, because their batches have "
            f"{min(cells):,.0f} to {max(cells):,.0f} cells, including padding",
            share,
            in_turns,
        )
    if facts.is_explained_by_load(WAITING):
        return None
    # A rank's delay makes the other ranks wait.
    share -= 0.0 if facts.load is None else 2 * facts.load.share
    # Ranks that wait for other ranks' data loading get separate advice.
    rows = [row for row in facts.accounts.parts[DATA] if not any(map(math.isnan, row))]
    share -= fmean(max(row) - fmean(row) for row in rows) / facts.length if rows else 0.0
    if share < NOTABLE or share * facts.length < WAKE_S:
        return None
    caused = [facts.accounts.caused(rank) for rank in range(len(facts.records))]
    rank = caused.index(max(caused))
    part = caused[rank] / math.fsum(caused)
    if part >= MOSTLY:
        text = f"Profile longer to make sure that rank {rank} is slow, and check what else runs there"
        why = f"; rank {rank} causes {part:.0%} of it and is probably slow"
        verdict = f"Rank {rank} is probably slow; profile longer to make sure: others wait for {share:.0%} of the time."
    else:
        text = "Find out which samples take longer: paceline.data.DataLoader(…, cost=…) gives ranks equal cost"
        why, verdict = ", in turns, although their batches have equal sizes", in_turns
    reason = f"ranks wait for each other for {share:.0%} of the time{why}"
    return Advice("balance", text, reason, share, verdict)


def _sizes_explain_times(facts: Facts) -> bool:
    """Return whether ranks compute longer when their batches are larger than the other ranks' batches."""
    accounts, sizes, times = facts.accounts, list[float](), list[float]()
    for at, cells in enumerate(accounts.figures("cells")):
        # Delays caused by other programs are random, and would hide the effect of the sizes.
        lost = accounts.delayed[at] if facts.is_loaded else [0.0] * len(cells)
        forward, backward = (accounts.parts[part][at] for part in COMPUTE)
        computing = [first + second - waited for first, second, waited in zip(forward, backward, lost, strict=True)]
        if not any(map(math.isnan, computing)):
            # Subtract the mean, because a step that is larger on all ranks makes no rank wait.
            sizes += [value - fmean(cells) for value in cells]
            times += [value - fmean(computing) for value in computing]
    return len(set(sizes)) > 1 and len(set(times)) > 1 and correlation(sizes, times) > 1 / 2
