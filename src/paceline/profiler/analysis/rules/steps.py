"""Detects steps that are too small, idle tensor cores, and time spent on saves and in the loop's own code."""

from __future__ import annotations

import math
from statistics import fmean

from paceline.profiler.analysis.confidence import NOTABLE, OTHER_TRAINING
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.rules.ranks import late_by_own_code
from paceline.profiler.analysis.rules.words import function_of_own_code, part_sentence
from paceline.profiler.report.advice import Advice
from paceline.profiler.report.step_parts import CHECKPOINT, COMMUNICATION, COMPUTE, DATA, OPTIMIZER, OTHER

RARER = 10
"""Recommended factor for less frequent saves."""
IDLE = 0.5
"""A GPU that computes for less than this share of the time counts as idle."""
COMPUTING = 0.7
"""If computing takes a larger share of the operators' time than this, no advice about the cost of calls is given."""


def larger_batch(facts: Facts) -> Advice | None:
    """Detect operators that cost more to call than to compute."""
    table, rows, shares = facts.operators, facts.rows, facts.shares
    if not table.calls or rows is None or table.computing > COMPUTING:
        return None
    per_rank = rows / facts.batches / len(facts.records)
    # Only computation and data grow with the batch. With twice the rows, the rest costs half as much per row.
    growing = shares[DATA] + table.computing * math.fsum(shares[part] for part in COMPUTE)
    once = shares[COMMUNICATION] + shares[OPTIMIZER]
    small = f"communication and the optimizer take {once:.0%} of {facts.length * 1e3:.1f} ms"
    return Advice(
        "larger-batch",
        f"Use larger batches, such as {2 * per_rank:.0f} rows per rank, not {per_rank:.0f}; scale the learning rate",
        f"an operator takes {table.seconds / table.calls * 1e6:.0f} µs on average, and calling operators costs "
        f"{1 - table.computing:.0%} of that time",
        (1 - growing) / 2,
        f"Steps are too small: {small}." if len(facts.records) > 1 and once >= 2 * NOTABLE else "",
        OTHER_TRAINING,
    )


def host_bound(facts: Facts) -> Advice | None:
    """Detect a GPU that waits for the host to launch kernels."""
    figures = facts.operators.device_figures
    used, host = figures.get("utilization", 1.0), figures.get("host", 0.0)
    if used > IDLE or host < (1 - used) / 2:  # otherwise the GPU mostly waits for something else
        return None
    return Advice(
        "host-bound",
        'Use larger batches, or launch fewer kernels: torch.compile(model, mode="reduce-overhead") uses CUDA graphs',
        f"the GPU computes for {used:.0%} of the time; for {host:.0%}, only the host is busy, calling operators",
        host * math.fsum(facts.shares[part] for part in (*COMPUTE, OPTIMIZER)),
        f"The GPU is idle for {1 - used:.0%} of the time, mostly because the host launches kernels too slowly.",
    )


def mixed_precision(facts: Facts) -> Advice | None:
    """Detect idle tensor cores."""
    used = facts.operators.device_figures.get("tensor_cores", 1.0)
    if used >= NOTABLE / 2:
        return None
    return Advice(
        "mixed-precision",
        'Compute in bfloat16: torch.autocast("cuda", torch.bfloat16), or MixedPrecision of the wrapper',
        f"kernels that can use tensor cores take {used:.0%} of the GPU's time",
        math.fsum(facts.shares[part] for part in COMPUTE) / 2,
        weight=OTHER_TRAINING,
    )


def saves(facts: Facts) -> Advice | None:
    """Detect checkpoints that take long, including the steps that they slow down."""
    rows, lengths = facts.accounts.parts[CHECKPOINT], facts.accounts.lengths
    saving = {at for at, row in enumerate(rows) if any(value > 0 for value in row)}
    if not saving:
        return None
    # A save also slows the next step (through the disk, caches and waiting ranks), so exclude both from the usual
    # steps.
    others = [row for at, row in enumerate(lengths) if not saving & {at, at - 1}]
    usual = [value for row in others for value in row if not math.isnan(value)]
    share = facts.shares[CHECKPOINT]
    cost = max(share, 1 - fmean(usual) / facts.length) if usual else share
    every = len(rows) / len(saving)
    return Advice(
        "checkpoints",
        f"Save less often, such as every {RARER * every:.0f} steps instead of every {every:.0f}, or in the "
        "background: Checkpointer(…, async_save=True)",
        f"saving takes {share:.0%} of the time, or {cost:.0%} including the steps that it slows down",
        cost * (1 - 1 / RARER),
        part_sentence(facts, CHECKPOINT),
    )


def loop(facts: Facts) -> Advice | None:
    """Detect time in the loop's own code on all ranks."""
    share, function = facts.shares[OTHER], function_of_own_code(facts)
    # On a busy host, time without stack samples may be a delay.
    if late_by_own_code(facts) or (facts.is_loaded and not function):
        return None
    return Advice(
        "loop",
        f"Look at the loop's own code: {function or 'metrics, .item(), logging, moving batches'}",
        f"{share:.0%} of a step is not data, forward, backward, communication or optimizer",
        share / 2,
        part_sentence(facts, OTHER),
    )
