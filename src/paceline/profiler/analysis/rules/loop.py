"""The parts of a step beside computing and communication: data, optimizer, checkpoints, the loop's own code."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean

from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import NON_COMPUTE, promise, spread
from paceline.profiler.analysis.rules.late_ranks import function_of_own_code, late_by_own_code
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice

NOTABLE = 0.1
MOST_WORKERS = 8
RARER = 10
"""Times as many steps between two saves that are advised."""


def data_loading(facts: Facts) -> Advice | None:
    """Advise on a loop that waits for its batches."""
    share = facts.shares[step_parts.DATA]
    if share < NOTABLE:
        return None
    count, then = workers_and_step(facts)
    saved = min(share, 1 - then / facts.length)
    if facts.records[0].workers:
        how = f"give the DataLoader num_workers={count} in place of {facts.records[0].workers}"
    elif any(record.loaders_seen for record in facts.records):
        how = f"give the DataLoader num_workers={count}"
    else:
        how = f"load batches in a DataLoader with num_workers={count}"
    return promise(
        "data-loading",
        f"Load data beside the training: {how}, or do less work on a sample",
        f"the loop waits {share * facts.length * 1e3:.1f} ms of a step for its batch, {share:.0%}",
        {step_parts.DATA: saved},
        trial={"num_workers": count},
    )


def workers_and_step(facts: Facts) -> tuple[int, float]:
    """Return the workers of a rank that keep up with the training, with one to spare, and the seconds of a step then.

    A step is as long as the rest of it, as its batch takes a worker by their number, or as all work of the ranks of a
    host on its cores.
    """
    record, data = facts.records[0], facts.accounts.mean(step_parts.DATA)
    rest = max(facts.length - data, 1e-6)
    batch = facts.length * record.workers if record.workers else data
    count = min(MOST_WORKERS, max(record.workers, math.ceil(batch / rest)) + 1)
    waiting = sum(facts.accounts.mean(part) for part in step_parts.WAITING)
    loading = fmean(step.loading for one in facts.records for step in one.steps if step.is_measured())
    ranks = max(Counter(one.host for one in facts.records).values())
    on_cores = ranks * (rest - waiting + loading) / record.cores
    return count, max(rest, batch / count, on_cores)


def optimizer(facts: Facts) -> Advice | None:
    """Advise on an optimizer for which a faster implementation was tried."""
    tried = [record.faster for record in facts.records if record.faster is not None]
    if not tried:
        return None
    option, ratio = tried[0][0], fmean(ratio for _, ratio in tried)
    share, name = facts.shares[step_parts.OPTIMIZER], facts.records[0].optimizer
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
    if share < 0.1 or late_by_own_code(facts):
        return None
    function = function_of_own_code(facts)
    return promise(
        "loop",
        f"Look at the loop's own code: {function or 'metrics, .item(), logging, moving batches'}",
        f"{share:.0%} of a step is neither data, forward, backward, communication nor optimizer",
        {step_parts.OTHER: share / 2},
    )
