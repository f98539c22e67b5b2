"""How much a rank computes, and with what."""

from __future__ import annotations

from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import promise, spread
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice

_MOST = 0.7
"""Share of the operators' time that computes, above which their calls are not worth advice."""


def larger_batch(facts: Facts) -> Advice | None:
    """Advise on operators that are so short that calling them is the work."""
    table, rows = facts.operators, facts.rows
    if not table.calls or rows is None:
        return None
    each, used = table.seconds / table.calls, table.computing
    if used > _MOST or facts.shares[step_parts.DATA] > 0.5:
        return None
    per_rank = rows / facts.batches / len(facts.records)
    # Only computation and data grow with the batch; the cost of calls stays, and is shared by twice the rows.
    growing = dict.fromkeys(step_parts.ALL, 0.0) | dict.fromkeys(step_parts.COMPUTE, used) | {step_parts.DATA: 1.0}
    return promise(
        "larger-batch",
        f"Take larger batches, such as {2 * per_rank:.0f} rows a rank, not {per_rank:.0f}; scale the learning rate",
        f"an operator takes {each * 1e6:.0f} µs, and the cost of calling operators is {1 - used:.0%} of their time",
        {part: facts.shares[part] * (1 - growing[part]) / 2 for part in step_parts.ALL},
    )


def fewer_ranks(facts: Facts) -> Advice | None:
    """Advise on a model that is so small that one rank would be as fast."""
    ranks = len(facts.records)
    if ranks < 2:
        return None
    # One rank loads and computes the slices of all.
    alone = sum(ranks * facts.accounts.mean(part) for part in (step_parts.DATA, *step_parts.COMPUTE))
    alone += sum(facts.accounts.mean(part) for part in (step_parts.OPTIMIZER, step_parts.CHECKPOINT, step_parts.OTHER))
    if alone >= facts.length or facts.stragglers or facts.shares[step_parts.DATA] > 0.2:
        return None
    return promise(
        "fewer-ranks",
        f"Train on one rank: the model is too small for {ranks}",
        f"a step takes {facts.length * 1e3:.1f} ms, and one rank would compute the whole batch in {alone * 1e3:.1f} ms",
        spread(1 - alone / facts.length, facts.shares, step_parts.WAITING),
    )


def mixed_precision(facts: Facts) -> Advice | None:
    """Advise on tensor cores that are idle."""
    used = facts.operators.device_figures.get("tensor_cores")
    if used is None or used > 0.05:
        return None
    return promise(
        "mixed-precision",
        'Compute in bfloat16: torch.autocast("cuda", torch.bfloat16), or MixedPrecision of the wrapper',
        f"kernels that can use tensor cores are {used:.0%} of the GPU's time",
        {part: facts.shares[part] / 2 for part in step_parts.COMPUTE},
    )
