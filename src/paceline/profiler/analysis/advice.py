"""Advice: changes that would make a step shorter, with reason and gain, predicted from this run's own figures.

Each rule is a function of the :class:`~paceline.profiler.analysis.metrics.Facts`, and returns None where it does not
apply.
Gains are shares of the time for a sample that would be saved, if that alone were changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from paceline.profiler.analysis.bucket_size_simulation import best_capacity, slow_bucket
from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice

LEAST = 0.02
"""Least gain that is worth a change."""
PROBABLY = 0.85
"""Share of the waiting from which the rank that causes it is probably slow, even if too few steps show it."""
_SHORT_OPERATOR = 15e-6
"""Seconds of an operator below which calling it costs more than its computation."""
_ACCUMULATED = (2, 4, 8)
_CAUSES, _NOTABLE = ("straggler", "slow-bucket"), 0.05
"""Kinds of advice that remove a cause, and the gain from which they come first."""

Rule = Callable[[Facts], Advice | None]


def advise(facts: Facts) -> list[Advice]:
    """Return all advice that applies, the greatest gain first, but advice that removes a cause ahead of all other."""
    if not facts.accounts.steps:
        return []
    found = [advice for rule in RULES if (advice := rule(facts)) is not None and advice.gain >= LEAST]
    return sorted(found, key=lambda advice: (advice.kind not in _CAUSES or advice.gain < _NOTABLE, -advice.gain))


def straggler(facts: Facts) -> Advice | None:
    """Advise on a rank that the others wait for."""
    if not facts.stragglers:
        return None
    slow = facts.stragglers[0]
    ranks = facts.records
    saved = facts.accounts.caused(slow.rank)
    own = ranks[slow.rank]
    others = [record for record in ranks if record.rank != slow.rank]
    text = f"Look at rank {slow.rank} ({own.host}): its {slow.phase} takes {slow.seconds * 1e3:.1f} ms longer"
    for name, value in (("cores", own.cores), ("threads", own.threads)):
        usual = Counter(getattr(record, name) for record in others).most_common(1)[0][0]
        if value < usual:
            text += f"; it has {value} {name} and the others {usual}: give it as many"
            break
    return Advice(
        "straggler",
        text,
        f"it computes {slow.slowdown:.2f} times as long as the median of the others, in steps {slow.first_step} to "
        f"{slow.last_step} ({slow.kind}); the others wait {saved * 1e3:.1f} ms for it in a step",
        saved / facts.length,
    )


def balance(facts: Facts) -> Advice | None:
    """Advise on ranks that wait for each other in turns."""
    share = facts.shares[step_parts.BUBBLE]
    if facts.stragglers or share < 0.05 or len(facts.records) < 2:
        return None
    caused = [facts.accounts.caused(rank) for rank in range(len(facts.records))]
    most, last = max(caused) / math.fsum(caused), caused.index(max(caused))
    blame = f"no rank is always the last: rank {last} causes most, {most:.0%} of it"
    if most > PROBABLY:
        blame = f"rank {last} causes {most:.0%} of it and is probably slow: profile longer to be sure"
    rows = [value for step in facts.accounts.rows for value in step if not math.isnan(value)]
    uneven = f"; batches have {min(rows):.0f} to {max(rows):.0f} rows" if rows and max(rows) > min(rows) else ""
    return Advice(
        "balance",
        "Give ranks batches of equal cost: DataLoader(…, cost=len) does so. If they are, see what else runs",
        f"ranks wait for each other for {share:.0%} of the time; {blame}{uneven}",
        share,
    )


def data_loading(facts: Facts) -> Advice | None:
    """Advise on a loop that waits for its batches."""
    share = facts.shares[step_parts.DATA]
    seen = any(record.loaders_seen for record in facts.records)
    how = "raise num_workers of the DataLoader" if seen else "load batches in a DataLoader with num_workers"
    return Advice(
        "data-loading",
        f"Load data beside the training: {how}, or do less work on a sample",
        f"the loop waits {share * facts.length * 1e3:.1f} ms of a step for its batch, {share:.0%}",
        share,
    )


def accumulation(facts: Facts) -> Advice | None:
    """Advise on communication that backward does not hide."""
    share = facts.shares[step_parts.COMMUNICATION]
    if len(facts.records) < 2 or share < 0.05:
        return None
    shares = {times: facts.all_reduce_share(times) for times in _ACCUMULATED}
    now = facts.all_reduce_share()
    then = ", ".join(f"{predicted:.0%} at {times}" for times, predicted in shares.items())
    # With four times the batches in a step, communication and optimizer run once in place of four times.
    saved = (share + facts.shares[step_parts.OPTIMIZER]) * (1 - 1 / 4)
    many = "4" if facts.batches == 1 else f"{facts.batches * 4:.0f} in place of {facts.batches:.0f}"
    return Advice(
        "accumulation",
        f"Accumulate {many} batches between optimizer steps: paceline.accumulate(model, batches, steps)",
        f"communication costs {share:.0%} of a step; all-reduce is {now:.0%} of the work, and would be {then} times "
        "the batches",
        saved,
        {str(times): predicted for times, predicted in shares.items()},
    )


def sparse_gradients(facts: Facts) -> Advice | None:
    """Advise on an embedding whose gradient makes up most of the communication."""
    record = facts.records[0]
    total = sum(nbytes for _, nbytes in record.parameters)
    share = facts.shares[step_parts.COMMUNICATION]
    tables = [(nbytes, name) for name, nbytes in record.parameters if name in record.embeddings]
    if not tables or share < 0.1 or len(facts.records) < 2:
        return None
    nbytes, name = max(tables)
    if nbytes < total / 2:
        return None
    return Advice(
        "sparse-gradients",
        f"Build the embedding of {name} with sparse=True, if a batch uses few of its rows",
        f"its gradient is {nbytes / total:.0%} of the {total / 1e6:.1f} MB that are averaged in a step",
        share * nbytes / total * 0.7,
    )


def larger_batch(facts: Facts) -> Advice | None:
    """Advise on operators that are so short that calling them is the work."""
    table, rows = facts.operators, facts.rows
    if not table.calls or rows is None:
        return None
    each = table.seconds / table.calls
    used = min(1.0, each / _SHORT_OPERATOR)
    if used > 0.7:
        return None
    per_rank = rows / facts.batches / len(facts.records)
    compute = facts.shares[step_parts.FORWARD] + facts.shares[step_parts.BACKWARD]
    # Only computation and data grow with the batch; the cost of calls stays, and is shared by twice the rows.
    growing = compute * used + facts.shares[step_parts.DATA]
    return Advice(
        "larger-batch",
        f"Take larger batches, such as {2 * per_rank:.0f} rows a rank, not {per_rank:.0f}; scale the learning rate",
        f"an operator takes {each * 1e6:.0f} µs: most of forward and backward is the cost of calling operators",
        (1 - growing) / 2,
    )


def bucket_size(facts: Facts) -> Advice | None:
    """Advise on a bucket size that would overlap better."""
    better = best_capacity(facts)
    if better is None:
        return None
    capacity, saved = better
    return Advice(
        "bucket-size",
        f"Set bucket_cap_mb={capacity:g}",
        f"simulated with the times at which this run's gradients came, communication after backward would be "
        f"{saved * 1e3:.1f} ms shorter",
        saved / facts.length,
    )


def one_slow_bucket(facts: Facts) -> Advice | None:
    """Advise on a bucket that takes far longer than its size explains."""
    found = slow_bucket(facts)
    if found is None:
        return None
    number, seconds, expected, nbytes = found
    return Advice(
        "slow-bucket",
        f"Look at bucket {number} ({nbytes / 1e6:.2f} MB): a communication hook, its memory, or what runs beside it",
        f"its all-reduce takes {seconds * 1e3:.1f} ms; the other buckets suggest {expected * 1e3:.1f} ms",
        min(
            facts.shares[step_parts.COMMUNICATION] + facts.shares[step_parts.BUBBLE],
            (seconds - expected) / facts.length,
        ),
    )


def fewer_ranks(facts: Facts) -> Advice | None:
    """Advise on a model that is so small that one rank would be as fast."""
    ranks = len(facts.records)
    if ranks < 2:
        return None
    mean = facts.accounts.mean
    alone = (
        ranks * (mean(step_parts.FORWARD) + mean(step_parts.BACKWARD))
        + mean(step_parts.OPTIMIZER)
        + mean(step_parts.DATA)
        + mean(step_parts.OTHER)
    )
    if alone >= facts.length:
        return None
    return Advice(
        "fewer-ranks",
        f"Train on one rank: the model is too small for {ranks}",
        f"a step takes {facts.length * 1e3:.1f} ms, and one rank would compute the whole batch in {alone * 1e3:.1f} ms",
        1 - alone / facts.length,
    )


def mixed_precision(facts: Facts) -> Advice | None:
    """Advise on tensor cores that are idle."""
    used = facts.operators.device_figures.get("tensor_cores")
    if used is None or used > 0.05:
        return None
    compute = facts.shares[step_parts.FORWARD] + facts.shares[step_parts.BACKWARD]
    return Advice(
        "mixed-precision",
        'Compute in bfloat16: torch.autocast("cuda", torch.bfloat16), or MixedPrecision of the wrapper',
        f"kernels that can use tensor cores are {used:.0%} of the GPU's time",
        compute / 2,
    )


def threads(facts: Facts) -> Advice | None:
    """Advise on a host with more threads than cores."""
    hosts = Counter(record.host for record in facts.records)
    for record in facts.records:
        wanted = sum(other.threads for other in facts.records if other.host == record.host)
        if wanted > record.cores and hosts[record.host] > 1 and record.device == "cpu":
            over = 1 - record.cores / wanted
            compute = facts.shares[step_parts.FORWARD] + facts.shares[step_parts.BACKWARD]
            return Advice(
                "threads",
                f"Give each rank fewer threads: OMP_NUM_THREADS={max(1, record.cores // hosts[record.host])}, which "
                "paceline run sets if you do not; --pin keeps each rank to cores of its own",
                f"{hosts[record.host]} ranks on {record.host} have {wanted} threads together, for {record.cores} cores",
                # A cautious estimate: threads that take turns lose time at the barriers of every operator.
                over * compute / 4,
            )
    return None


def saves(facts: Facts) -> Advice | None:
    """Advise on checkpoints that take long."""
    return Advice(
        "checkpoints",
        "Save less often",
        f"saving takes {facts.shares[step_parts.CHECKPOINT]:.0%} of the time",
        facts.shares[step_parts.CHECKPOINT] / 2,
    )


def loop(facts: Facts) -> Advice | None:
    """Advise on time in the loop's own code."""
    share = facts.shares[step_parts.OTHER]
    if share < 0.1:
        return None
    return Advice(
        "loop",
        "Look at the loop's own code: metrics, .item(), logging, moving batches",
        f"{share:.0%} of a step is neither data, forward, backward, communication nor optimizer",
        share / 2,
    )


RULES: tuple[Rule, ...] = (
    straggler,
    balance,
    data_loading,
    accumulation,
    sparse_gradients,
    larger_batch,
    one_slow_bucket,
    bucket_size,
    fewer_ranks,
    mixed_precision,
    threads,
    saves,
    loop,
)
