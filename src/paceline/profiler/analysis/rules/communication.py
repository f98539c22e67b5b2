"""Communication that a step shows."""

from __future__ import annotations

from paceline.profiler.analysis.bucket_size_simulation import all_reduce_times, best_capacity, fit, slow_bucket
from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.rules.gains import promise, spread
from paceline.profiler.analysis.rules.host_load import is_explained
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Advice

NOTABLE = 0.1
_ACCUMULATED = (2, 4, 8)
_SENT, _FEW = 0.3, 0.5
"""Share of a dense gradient's cost that a sparse one is taken to have where the rows were not seen; and the largest
share at which it is advised."""
_MESSAGES, _MESSAGE_S = 3, 0.0003
"""Messages in which a sparse gradient travels, and the seconds that one takes among processes at least, however small:
in a step with a sparse table of ``benchmarks/faulty_training.py`` ranks wait 1.4 ms in four of them."""
_TAKE_SPARSE = ("", "SGD", "SparseAdam", "Adagrad")
"""Optimizers of torch that take sparse gradients."""
_SEVERAL = 1.5
"""Mean number of backwards in a step from which more than one averages gradients."""
TIMES = 4
"""Times as many batches in a step that are advised."""


def accumulation(facts: Facts) -> Advice | None:
    """Advise on communication that backward does not hide."""
    share = facts.shares[step_parts.COMMUNICATION]
    if len(facts.records) < 2 or share < NOTABLE:
        return None
    if facts.averages > _SEVERAL:
        return _average_once(facts)
    shares = {times: facts.all_reduce_share(times) for times in _ACCUMULATED}
    now = facts.all_reduce_share()
    then = ", ".join(f"{predicted:.0%} at {times}" for times, predicted in shares.items())
    # With four times the batches in a step, communication and optimizer run once in place of four times.
    once = (step_parts.COMMUNICATION, step_parts.OPTIMIZER)
    saved = {part: facts.shares[part] * (1 - 1 / TIMES) for part in once}
    many = f"{TIMES}" if facts.batches == 1 else f"{facts.batches * TIMES:.0f} in place of {facts.batches:.0f}"
    return promise(
        "accumulation",
        f"Accumulate {many} batches between optimizer steps: paceline.accumulate(model, batches, steps)",
        f"communication costs {share:.0%} of a step; all-reduce is {now:.0%} of the work, and would be {then} times "
        "the batches",
        saved,
        {str(times): predicted for times, predicted in shares.items()},
        {"accumulate": round(TIMES * facts.batches)},
    )


def _average_once(facts: Facts) -> Advice:
    """Advise on gradients that are accumulated, but averaged in every backward."""
    share, times = facts.shares[step_parts.COMMUNICATION], facts.averages
    return promise(
        "accumulation",
        f"Average gradients once in a step, not {times:.0f} times: model.no_sync() around every forward and backward "
        "but the last, or paceline.accumulate(model, batches, steps)",
        f"communication costs {share:.0%} of a step, because each of its {times:.0f} backwards averages all gradients",
        {step_parts.COMMUNICATION: share * (1 - 1 / times)},
        trial={"accumulate": round(facts.batches)},
    )


def sparse_gradients(facts: Facts) -> Advice | None:
    """Advise on an embedding whose gradient makes up most of the communication, where its rows were seen to be zeros.

    Lack of cores makes communication longer, above all its waiting, so only the ranks' own work on buckets counts then.
    """
    record = facts.records[0]
    total = sum(nbytes for _, nbytes in record.parameters)
    tables = [(nbytes, name) for name, nbytes in record.parameters if name in record.embeddings]
    share = facts.shares[step_parts.COMMUNICATION]
    if not tables or share < NOTABLE or len(facts.records) < 2:
        return None
    nbytes, name = max(tables)
    touched, to_fill, to_average = (*record.touched.get(name, (None,)), 0.0, 0.0)[:3]
    # Each rank sends the rows that it touches to all others.
    sent = _SENT if touched is None else touched * len(facts.records)
    if nbytes < total / 2 or sent > _FEW or (touched is None and is_explained(facts)):
        return None
    if facts.is_loaded:
        share = min(share, facts.bucket_work / facts.length)
    # In place of one large message, ranks exchange the numbers of their rows, the rows' places, and the rows.
    times = all_reduce_times(facts)
    message = max(_MESSAGE_S if record.device == "cpu" else 0.0, fit(times)[0] if times else 0.0)
    instead = to_average + _MESSAGES * message
    saved = {step_parts.COMMUNICATION: max(0.0, share * nbytes / total * (1 - sent) - instead / facts.length)}
    condition = ", if a batch uses few of its rows"
    reason = f"its gradient is {nbytes / total:.0%} of the {total / 1e6:.1f} MB that are averaged in a step"
    if touched is not None:
        # Backward fills a dense gradient with zeros before it adds the rows of the batch.
        filling = min(facts.batches * to_fill / facts.length, facts.shares[step_parts.BACKWARD])
        saved[step_parts.BACKWARD] = filling * (1 - touched)
        saved[step_parts.OPTIMIZER] = facts.shares[step_parts.OPTIMIZER] * nbytes / total * (1 - touched)
        condition, reason = "", f"{reason}, and {1 - touched:.1%} of its rows are zeros"
    if record.optimizer not in _TAKE_SPARSE:
        condition += ", and give its parameters to SparseAdam or SGD"
    return promise("sparse-gradients", f"Build the embedding of {name} with sparse=True{condition}", reason, saved)


def bucket_size(facts: Facts) -> Advice | None:
    """Advise on a bucket size that would overlap better."""
    better = best_capacity(facts)
    if better is None:
        return None
    capacity, saved = better
    return promise(
        "bucket-size",
        f"Set bucket_cap_mb={capacity:g}",
        f"simulated with the times at which this run's gradients came, communication after backward would be "
        f"{saved * 1e3:.1f} ms shorter",
        spread(saved / facts.length, facts.shares, [step_parts.COMMUNICATION, step_parts.BUBBLE]),
        trial={"bucket_cap_mb": capacity},
    )


def one_slow_bucket(facts: Facts) -> Advice | None:
    """Advise on a bucket that takes far longer than its size explains."""
    found = slow_bucket(facts)
    if found is None:
        return None
    number, seconds, expected, nbytes = found
    return promise(
        "slow-bucket",
        f"Look at bucket {number} ({nbytes / 1e6:.2f} MB): a communication hook, its memory, or what runs beside it",
        f"its all-reduce takes {seconds * 1e3:.1f} ms; the other buckets suggest {expected * 1e3:.1f} ms",
        spread((seconds - expected) / facts.length, facts.shares, [step_parts.COMMUNICATION, step_parts.BUBBLE]),
    )
