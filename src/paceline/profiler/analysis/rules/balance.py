"""Ranks that wait for each other in turns, and batches of equal cost."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.data.split.balance import split_by_cost, split_by_padded_cost
from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import promise, spread
from paceline.profiler.analysis.rules.host_load import unexplained
from paceline.profiler.analysis.rules.late_ranks import late_by_own_code, paused_rank, probably_slow
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice

EXPLAINED = 0.3
"""Share of the variance of ranks' computing times in a step that sizes of batches must explain to be the cause."""
NOTABLE, NOTABLE_S = 0.1, 0.002
"""Waiting without a known cause from which it is told, as a share and in seconds: less is the ranks' usual jitter."""
DRAWS = 200
"""Global batches that are made up from the lengths of samples."""


@dataclass(frozen=True)
class Slices:
    """Means over global batches: cells, padding included, of the rank with most, and of all ranks."""

    largest: float
    mean: float


def cost_of_a_cell(facts: Facts) -> float | None:
    """Return the seconds that a cell of the input costs, where ranks' batches differ by it; None where they do not."""
    accounts = facts.accounts
    sizes, times = [], []
    for cells, forward, backward, delayed in zip(
        accounts.cells,
        accounts.parts[step_parts.FORWARD],
        accounts.parts[step_parts.BACKWARD],
        accounts.delayed,
        strict=True,
    ):
        # Other programs take a random part of both, in which the sizes would not be seen.
        lost = delayed if facts.is_loaded else [0.0] * len(delayed)
        compute = [one + other - late for one, other, late in zip(forward, backward, lost, strict=True)]
        if any(map(math.isnan, compute)):
            continue
        sizes += [value - fmean(cells) for value in cells]
        times += [value - fmean(compute) for value in compute]
    # Without their mean in each step, because steps differ in size for all ranks alike, which makes none wait.
    squares, both = math.fsum(x * x for x in sizes), math.fsum(x * y for x, y in zip(sizes, times, strict=True))
    varies = math.fsum(y * y for y in times)
    if not squares or not varies or both <= 0 or both * both / squares / varies < EXPLAINED:
        return None
    return both / squares


def slices_now(facts: Facts) -> Slices:
    """Return the sizes of the slices that were measured."""
    rows = [row for row in facts.accounts.cells if not any(map(math.isnan, row))]
    return Slices(fmean(map(max, rows)), fmean(map(fmean, rows)))


def slices_of(lengths: Sequence[int], batch: int, ranks: int, split: str) -> Slices:
    """Return the sizes of slices that `split` makes of drawn global batches: ``count``, ``cost``, ``padded``, ``sum``.

    Batches are padded, except with ``sum``, which splits by count.
    """
    draw = random.Random(0)  # a report that is written again has the same figures
    largest, mean = [], []
    for _ in range(DRAWS):
        costs = draw.choices(lengths, k=batch)
        if split in ("count", "sum"):
            shares = [list(range(batch * rank // ranks, batch * (rank + 1) // ranks)) for rank in range(ranks)]
        else:
            shares, _ = (split_by_padded_cost if split == "padded" else split_by_cost)(costs, ranks)
        taken = [[costs[place] for place in share] for share in shares]
        cells = [math.fsum(one) if split == "sum" else len(one) * max(one, default=0) for one in taken]
        largest.append(max(cells))
        mean.append(fmean(cells))
    return Slices(fmean(largest), fmean(mean))


def _waits_in_turns(facts: Facts) -> bool:
    """Return whether ranks can wait for each other without one that is the cause."""
    is_many = len(facts.records) > 1 and bool(facts.accounts.steps)
    return is_many and not facts.stragglers and late_by_own_code(facts) is None


def uneven_batches(facts: Facts) -> Advice | None:
    """Advise on ranks that wait for each other because their batches differ in size."""
    if not _waits_in_turns(facts) or (cell := cost_of_a_cell(facts)) is None:
        return None
    record, ranks, now = facts.records[0], len(facts.records), slices_now(facts)
    batch = round((facts.rows or 0) / facts.batches)
    # Lengths of samples show nothing here: there are none, too few for the ranks, or they are balanced by them already.
    if not record.cost or batch < ranks or record.balance == "padded":
        share = facts.shares[step_parts.BUBBLE]
        return _uneven(facts, "cost=…, with what a sample costs", spread(share, facts.shares, [step_parts.BUBBLE]))
    split = record.balance or "count"
    padded, packed = (slices_of(record.lengths, batch, ranks, one) for one in (split, "sum"))
    # A collate function may pad to the longest sample of a batch, or string samples together.
    are_padded = abs(now.mean - padded.mean) < abs(now.mean - packed.mean)
    made_up = padded if are_padded else packed
    then = slices_of(record.lengths, batch, ranks, "padded").largest if are_padded else packed.mean
    saved = cell * now.largest * (1 - then / made_up.largest)
    # Fewer padded cells shorten computing, too, by what the bubbles do not have.
    order = (step_parts.BUBBLE, step_parts.BACKWARD, step_parts.FORWARD)
    how = f"cost=lambda sample: {record.cost}" + (", padded=True" if are_padded else "")
    return _uneven(facts, how, spread(min(saved / facts.length, 0.95), facts.shares, order))


def _uneven(facts: Facts, how: str, parts: dict[str, float]) -> Advice:
    cells = [value for row in facts.accounts.cells for value in row if not math.isnan(value)]
    share, now = facts.shares[step_parts.BUBBLE], slices_now(facts)
    return promise(
        "balance",
        f"Give ranks batches of equal cost: paceline.data.DataLoader(…, {how})",
        f"ranks wait for each other in turns for {share:.0%} of the time, because their batches have "
        f"{min(cells):,.0f} to {max(cells):,.0f} cells, padding included: in a step {now.largest:,.0f} on the rank "
        f"with most, {now.mean:,.0f} on the mean of the ranks",
        parts,
    )


def _waiting_for_data(facts: Facts) -> float:
    """Return the share of the time that ranks wait for one that waits for its batch, at most."""
    rows = [row for row in facts.accounts.parts[step_parts.DATA] if not any(map(math.isnan, row))]
    return fmean(max(row) - fmean(row) for row in rows) / facts.length if rows else 0.0


def in_turns(facts: Facts) -> Advice | None:
    """Advise on ranks that wait for each other, where their batches do not tell why."""
    if not _waits_in_turns(facts) or cost_of_a_cell(facts) is not None or paused_rank(facts) is not None:
        return None
    share = unexplained(facts.shares[step_parts.BUBBLE], facts)
    if share < NOTABLE or share * facts.length < NOTABLE_S:
        return None
    if (slow := probably_slow(facts)) is not None:
        return promise(
            "balance",
            f"Profile longer to be sure that rank {slow[0]} is slow, and look at what else runs there",
            f"ranks wait for each other for {share:.0%} of the time; rank {slow[0]} causes {slow[1]:.0%} of it and is "
            "probably slow: profile longer to be sure",
            {step_parts.BUBBLE: share},
        )
    # Other batches would not help ranks that wait for each other's loaders; those have advice of their own.
    share -= _waiting_for_data(facts)
    if share < NOTABLE or facts.records[0].virtual_ranks:  # which refuse cost=
        return None
    return promise(
        "balance",
        "Find out which samples take longer: if their cost is known before, paceline.data.DataLoader(…, cost=…) gives "
        "ranks batches of equal cost",
        f"ranks wait for each other in turns for {share:.0%} of the time, although their batches have equal sizes",
        {step_parts.BUBBLE: share},
    )
