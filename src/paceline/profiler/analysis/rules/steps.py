"""How much a rank does in a step, and what it does beside computing: saves, and the loop's own code."""

from __future__ import annotations

import math
from statistics import fmean

from paceline.profiler.analysis.confidence import NOTABLE
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.rules.finding import (
    OTHER_TRAINING,
    Finding,
    function_of_own_code,
    part_sentence,
    spread,
)
from paceline.profiler.analysis.rules.ranks import late_by_own_code
from paceline.profiler.report import step_parts

RARER = 10
"""Times as many steps between two saves that are advised."""
COMPUTING = 0.7
"""Share of the operators' time that computes, above which their calls are not worth advice."""


def larger_batch(facts: Facts) -> Finding | None:
    """Find operators that are so short that calling them is the work."""
    table, rows = facts.operators, facts.rows
    if not table.calls or rows is None or table.computing > COMPUTING:
        return None
    per_rank = rows / facts.batches / len(facts.records)
    # Only computation and data grow with the batch; the cost of calls stays, and is shared by twice the rows.
    growing = dict.fromkeys(step_parts.COMPUTE, table.computing) | {step_parts.DATA: 1.0}
    once = facts.shares[step_parts.COMMUNICATION] + facts.shares[step_parts.OPTIMIZER]
    small = f"communication and the optimizer take {once:.0%} of {facts.length * 1e3:.1f} ms"
    return Finding(
        "larger-batch",
        f"Take larger batches, such as {2 * per_rank:.0f} rows a rank, not {per_rank:.0f}; scale the learning rate",
        f"an operator takes {table.seconds / table.calls * 1e6:.0f} µs, and the cost of calling operators is "
        f"{1 - table.computing:.0%} of their time",
        {part: facts.shares[part] * (1 - growing.get(part, 0.0)) / 2 for part in step_parts.ALL},
        f"Steps are too small: {small}." if len(facts.records) > 1 and once >= 2 * NOTABLE else "",
        OTHER_TRAINING,
    )


def mixed_precision(facts: Facts) -> Finding | None:
    """Find tensor cores that are idle."""
    used = facts.operators.device_figures.get("tensor_cores", 1.0)
    if used >= NOTABLE / 2:
        return None
    return Finding(
        "mixed-precision",
        'Compute in bfloat16: torch.autocast("cuda", torch.bfloat16), or MixedPrecision of the wrapper',
        f"kernels that can use tensor cores are {used:.0%} of the GPU's time",
        {part: facts.shares[part] / 2 for part in step_parts.COMPUTE},
        weight=OTHER_TRAINING,
    )


def saves(facts: Facts) -> Finding | None:
    """Find checkpoints that take long, with the steps that they slow down."""
    rows, lengths = facts.accounts.parts[step_parts.CHECKPOINT], facts.accounts.lengths
    saving = {at for at, row in enumerate(rows) if any(value > 0 for value in row)}
    if not saving:
        return None
    # The disk, caches and waiting ranks make the step after a save longer, too. So steps that are neither count.
    others = [row for at, row in enumerate(lengths) if not saving & {at, at - 1}]
    usual = [value for row in others for value in row if not math.isnan(value)]
    share = facts.shares[step_parts.CHECKPOINT]
    cost = max(share, 1 - fmean(usual) / facts.length) if usual else share
    every = len(rows) / len(saving)
    return Finding(
        "checkpoints",
        f"Save less often, such as every {RARER * every:.0f} steps in place of every {every:.0f}, or in the "
        "background: Checkpointer(…, async_save=True)",
        f"saving takes {share:.0%} of the time, and with the steps that it slows down {cost:.0%}",
        spread(cost * (1 - 1 / RARER), facts.shares, [step_parts.CHECKPOINT, *step_parts.WAITING, *step_parts.ALL]),
        part_sentence(facts, step_parts.CHECKPOINT),
    )


def loop(facts: Facts) -> Finding | None:
    """Find time in the loop's own code, on all ranks."""
    share, function = facts.shares[step_parts.OTHER], function_of_own_code(facts)
    if share < NOTABLE or late_by_own_code(facts):
        return None
    if facts.is_loaded and not function:  # delays, which any part has, rather than code
        return None
    return Finding(
        "loop",
        f"Look at the loop's own code: {function or 'metrics, .item(), logging, moving batches'}",
        f"{share:.0%} of a step is neither data, forward, backward, communication nor optimizer",
        {step_parts.OTHER: share / 2},
        part_sentence(facts, step_parts.OTHER),
    )
