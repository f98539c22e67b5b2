"""The verdict on a run, and advice: changes that would shorten a step, each with its reason and gain.

Each rule is a function of the :class:`~paceline.profiler.facts.Facts`. It finds one cause of lost time and the change
that removes it, or returns None. A gain is the predicted share of the time per sample that this change alone would
save.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import correlation, fmean

from paceline.core.messages import counted
from paceline.ddp.options import capacities
from paceline.planner.predictions import BUCKETS_MIB, Layer, Workload, backward_timeline
from paceline.planner.profiles import HOST_LOAD, fit
from paceline.profiler.facts import (
    FEWEST,
    MOSTLY,
    NOTABLE,
    ONE_CAUSE,
    OTHER_TRAINING,
    WAKE_S,
    WORTH,
    Facts,
    all_reduce_times,
    backward_seconds,
    late_since,
    layers_of,
    sentence,
    steps_to_profile,
    was_seen,
)
from paceline.profiler.host_load import OTHERS, Load, neighbours
from paceline.profiler.step_parts import (
    BUBBLE,
    CHECKPOINT,
    COLLECTOR,
    COMMUNICATION,
    COMPUTE,
    DATA,
    NAMES,
    OPTIMIZER,
    OTHER,
    WAITING,
)

NAMED = (DATA, OPTIMIZER, CHECKPOINT, COLLECTOR, OTHER)
"""Parts that the verdict can name without advice, besides communication."""
MOST = 0.95
"""Largest predicted gain."""
OWN_CODE = "own code in the loop"
ACCUMULATED, TIMES = (2, 4, 8), 4
"""Accumulation factors for the predictions of all-reduce's share, and the factor to recommend."""
MOST_WORKERS = 8
RARER = 10
"""Recommended factor for less frequent saves."""
SWITCH_S = 8e-6
"""Seconds of a core that a context switch costs, including the refill of caches; measured: 6 to 10 µs."""
SAMPLES = 8
"""Minimum number of samples to blame a rank for a function; of fewer, all may be from one rank by chance."""
FREED_S = 2e-7
"""Seconds that the garbage collector needs to free one object."""
IDLE = 0.5
"""A GPU that computes for less than this share of the time counts as idle."""
COMPUTING = 0.7
"""If computing takes a larger share of the operators' time than this, no advice about the cost of calls is given."""


@dataclass(frozen=True)
class Advice:
    """A cause of lost time, with the change that removes it."""

    kind: str
    """Kind of advice, such as ``straggler``, ``accumulation``, ``data-loading``."""
    text: str
    """The change to make, in one sentence."""
    reason: str
    """The measurement behind it."""
    gain: float
    """Share of the time per sample that the change is predicted to save, between 0 and 1."""
    headline: str = ""
    """Verdict to give if this is the largest cost."""
    weight: float = 1.0
    """Weight of the gain when advice is ordered."""
    predictions: Mapping[str, float] = field(default_factory=dict)
    """Predicted share of all-reduce, by accumulation factor."""


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
    if not facts.is_explained_by_load(WAITING):
        # Virtual ranks do not support accumulation: their slices are already micro-batches.
        rules += (bucket_size,) if facts.records[0].virtual_ranks else (accumulation, bucket_size, outer_steps)
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
    if first and 2 * advice[0].gain >= max(*costs.values(), facts.shares[COMMUNICATION]):
        return first
    costs[COMMUNICATION] = facts.waiting
    worst = max(costs, key=lambda part: costs[part])
    if costs[worst] < NOTABLE:
        computing = math.fsum(facts.shares[part] for part in COMPUTE)
        return f"Nothing slows the ranks down: they compute for {computing:.0%} of the time."
    return part_sentence(facts, worst)


def function_of_own_code(facts: Facts, rank: int | None = None) -> str:
    """Return the function seen in most samples of own code, on `rank` or on all ranks; empty if samples are too few.

    Without `rank`, the result names the rank if nearly all samples, at least :data:`SAMPLES`, are from one.
    """
    counts = Counter[str]()
    for record in facts.records:
        if rank is None or record.rank == rank:
            counts.update(record.own_code)
    name, count = counts.most_common(1)[0] if counts else ("", 0)
    if count < max(FEWEST, counts.total() / 4):
        return ""
    only = [record.rank for record in facts.records if record.own_code.get(name, 0) >= MOSTLY * count]
    is_one = rank is None and len(facts.records) > 1 and count >= SAMPLES
    return f"{name} on rank {only[0]}" if is_one and only else name


def part_sentence(facts: Facts, part: str) -> str:
    """Return a sentence that gives a part's share of the step."""
    share, function = f"{facts.shares[part]:.0%}", function_of_own_code(facts)
    much = f", much of it in {function}" if function else ""
    if part == COMMUNICATION and facts.shares[BUBBLE]:
        # No cause was found, so count small differences in arrival as part of the cost of communication.
        return f"Communication takes {facts.waiting:.0%} of a step, including the time ranks wait for each other."
    return {
        DATA: f"The loop waits for data for {share} of the time.",
        OPTIMIZER: f"The optimizer takes {share} of a step.",
        CHECKPOINT: f"Saving checkpoints takes {share} of the time.",
        COLLECTOR: f"Python's garbage collector takes {share} of a step.",
        OTHER: f"The loop's own code takes {share} of a step{much}.",
        COMMUNICATION: f"Communication takes {share} of a step.",
    }[part]


def accumulation(facts: Facts) -> Advice | None:
    """Detect communication that backward does not hide."""
    share, averages = facts.shares[COMMUNICATION] - facts.outer_share, facts.mean("averages")
    if len(facts.records) < 2 or share < NOTABLE:
        return None
    verdict = part_sentence(facts, COMMUNICATION)
    if averages > 3 / 2:
        return Advice(
            "accumulation",
            f"Average gradients once per step, not {averages:.0f} times: model.no_sync() around every forward and "
            f"backward but the last, or paceline.accumulate(model, batches, every={averages:.0f})",
            f"communication costs {share:.0%} of a step, because each of its {averages:.0f} backward passes "
            "averages all gradients",
            share * (1 - 1 / averages),
            verdict,
        )
    predictions = {str(times): facts.all_reduce_share(times) for times in ACCUMULATED}
    then = ", ".join(f"{predicted:.0%} at {times}" for times, predicted in predictions.items())
    every = f"{facts.batches * TIMES:.0f}"
    many = every if facts.batches == 1 else f"{every} instead of {facts.batches:.0f}"
    return Advice(
        "accumulation",
        f"Accumulate {many} batches between optimizer steps: paceline.accumulate(model, batches, every={every})",
        f"communication costs {share:.0%} of a step; all-reduce is {facts.all_reduce_share():.0%} of the work, and "
        f"would be {then} times the batches",
        # Communication and the optimizer run once instead of four times.
        (share + facts.shares[OPTIMIZER]) * (1 - 1 / TIMES),
        verdict,
        OTHER_TRAINING,
        predictions,
    )


def outer_steps(facts: Facts) -> Advice | None:
    """Detect exchanges of LocalSGD or DiLoCo that ranks wait for."""
    outer, share = facts.outer_steps, facts.outer_share
    if outer is None or share < NOTABLE:
        return None
    wait, inner = outer.exchange_s * outer.every, max(facts.length - outer.wait_s, 1e-6)
    delay = min(math.ceil(wait / inner), round(outer.every) - 1)
    hidden = min(1.0, delay * inner / wait)
    less = f'compress="int8", or twice the sync_every, which saves {share / 2:.0%}; fragments shorten each wait'
    overlap = f"Overlap the exchange with steps: DiLoCo(…, delay={delay}), or {delay} more than now; or send less"
    return Advice(
        "outer-steps",
        f"{overlap if delay else 'Send less'}: {less}",
        f"the exchange between islands takes {wait * 1e3:.1f} ms every {outer.every:.0f} steps, which is "
        f"{outer.exchange_s * 1e3:.1f} ms per step on average",
        share * max(hidden, 1 / 2),
        f"The wait for outer steps takes {share:.0%} of the time.",
        OTHER_TRAINING,
    )


def bucket_size(facts: Facts) -> Advice | None:
    """Detect a bucket size that would overlap better, by simulating others with the recorded arrival of gradients."""
    times = all_reduce_times(facts)
    layers = layers_of(facts, backward_seconds(facts)) if times else []
    if not sum(seconds for seconds, _ in layers):
        return None
    work, (message, byte) = Workload(0.0, [Layer(*layer) for layer in layers], 1.0), fit(times)

    def exposed(sizes: tuple[int, ...]) -> float:
        """Return the seconds of communication after backward with buckets of these capacities."""
        return backward_timeline(replace(work, bucket_bytes=sizes), lambda nbytes: message + byte * nbytes).exposed

    best, capacity = min((exposed(capacities(size, None)), size) for size in BUCKETS_MIB)
    # Capacities equal to the buckets' sizes reproduce the buckets.
    saved = exposed(tuple(nbytes for nbytes, _ in times if nbytes)) - best
    return Advice(
        "bucket-size",
        f"Set bucket_cap_mb={capacity:g}",
        f"in a simulation with this run's gradient arrival times, communication after backward is {saved * 1e3:.1f} ms "
        "shorter",
        min(saved / facts.length, facts.waiting),
        part_sentence(facts, COMMUNICATION),
    )


def host_load(facts: Facts) -> Advice | None:
    """Detect other programs that take cores away from the ranks."""
    load = facts.load
    if load is None or not load.is_by_others:
        return None
    return Advice(
        HOST_LOAD,
        "Profile again when the host is idle, or give the ranks cores of their own; under this load, advice on "
        "communication and on waiting in turns would be unreliable",
        f"rank {load.rank} was ready to run but had no core for {load.of_others:.0%} of its time because of other "
        f"programs, which keep {load.others:.1f} of {load.neighbours.cores:g} cores busy",
        load.of_others,
    )


def threads(facts: Facts) -> Advice | None:
    """Detect ranks that together have more threads than cores."""
    crowded = [group for rank in range(len(facts.records)) if (group := neighbours(facts.records, rank)).is_crowded]
    load = facts.load if facts.load is not None and facts.load.is_by_ranks else None
    # With GPUs, threads mostly sleep, so their number alone is not a problem.
    if not crowded or (facts.records[0].device != "cpu" and load is None):
        return None
    crowd = max(crowded, key=lambda group: group.threads / group.cores)
    ranks, room, reason = len(crowd.records), max(1, math.floor(crowd.cores)), crowd.description()
    if load is not None:
        reason += f"; because of the other threads, rank {load.rank} had no core for {load.of_ranks:.0%} of its time"
    verdict = "" if facts.is_explained_by_load() else f"The ranks slow each other down: {crowd.description()}."
    if ranks > room:
        text = f"Start {counted(room, 'rank')} on these cores, with the batches of all {ranks}"
        if any(record.threads > 1 for record in crowd.records):
            text += ", and OMP_NUM_THREADS=1"
        idle = 0.0
        if facts.load is not None:  # the same work on the same cores, without idle time
            free = max(crowd.cores - facts.load.others, 1e-6)
            idle = max(0.0, 1 - math.fsum(record.own_cores for record in crowd.records) / free)
        return Advice("threads", text, reason, idle, verdict, ONE_CAUSE)
    switches = math.fsum(record.switches for record in crowd.records)
    return Advice(
        "threads",
        f"Set OMP_NUM_THREADS={room // ranks} and remove calls of torch.set_num_threads",
        f"{reason}; the cores switch between threads {switches:,.0f} times per second",
        SWITCH_S * switches / crowd.cores,
        verdict,
        ONE_CAUSE,
    )


def lack_of_cores(load: Load) -> str:
    """Return a sentence that explains why the most delayed rank lacked cores."""
    lacked = f"rank {load.rank} was ready to run but had no core for {load.share:.0%} of its time."
    others, crowd = "other programs slow the ranks down", load.neighbours.description()
    if not load.is_by_ranks:
        return f"{others}: {lacked}"
    if not load.is_by_others:
        return f"the ranks slow each other down: {crowd}, and {lacked}"
    return f"{others}, and the ranks slow each other down, because {crowd}: {lacked}"


def data_loading(facts: Facts) -> Advice | None:
    """Detect a loop that waits for its batches."""
    record, share = facts.records[0], facts.shares[DATA]
    if not record.workers:
        share = _own_loading(facts) / facts.length
    if share < NOTABLE:
        return None
    reason = f"the loop waits {share * facts.length * 1e3:.1f} ms per step for its batch, {share:.0%} of the time"
    batch, is_waiting = _batch(facts)
    count, then = _workers_and_step(facts, batch, is_waiting)
    saved = min(share, 1 - then / facts.length)
    if count <= record.workers or (saved < NOTABLE and not is_waiting):
        return _cheaper(facts, reason, is_waiting)
    how = f"give the DataLoader num_workers={count}{f' instead of {record.workers}' if record.workers else ''}"
    if count > record.cores:
        how += " (more than there are cores, because they mostly wait; torch warns about it)"
    return _advice(facts, f"Load data in parallel with training: {how}, or do less work per sample", reason, saved)


def _advice(facts: Facts, text: str, reason: str, gain: float) -> Advice:
    return Advice("data-loading", text, reason, gain, part_sentence(facts, DATA))


def _cheaper(facts: Facts, reason: str, is_waiting: bool) -> Advice:
    """Return advice for data loading that would not be faster with more workers."""
    text = "Make loading cheaper: cache what it computes, or do less work per sample"
    if not is_waiting:
        group, others = neighbours(facts.records, 0), 0.0 if facts.load is None else facts.load.others
        workers = "more workers" if facts.records[0].workers else "workers"
        ranks = "the rank computes" if len(group.records) == 1 else f"{len(group.records)} ranks compute"
        text += f"; {workers} would not help, because loading is computation, and no core is free for it"
        reason += f"; {ranks} on {group.cores:g} cores"
        reason += f", and other programs keep {others:.1f} of them busy" if others >= OTHERS else ""
    return _advice(facts, text, reason, facts.shares[DATA] / 2)


def _batch(facts: Facts) -> tuple[float, bool]:
    """Return the seconds that a worker needs for a batch, and whether it mostly waits, which takes no core."""
    record = facts.records[0]
    if record.workers:  # workers are always busy, because the loop waits for them
        wall = facts.length * record.workers
        cpu = fmean(max(0.0, item.own_cores - item.loop_cores) for item in facts.records) * facts.length
        is_starved = (record.busy_cores or 0.0) > MOSTLY * neighbours(facts.records, 0).cores
    else:
        wall, cpu, is_starved = _own_loading(facts), facts.mean("loading"), False
    # If the system does not report the thread's CPU time, assume that it ran whenever it was not delayed.
    delay = _delay(facts) / facts.length
    ran = fmean(item.loop_cores for item in facts.records) or 1 - delay
    # Loading that computes is delayed as much as the rest of the step.
    is_waiting = not is_starved and min(cpu, wall) * (1 + delay / max(ran, 1e-3)) < wall / 2
    return wall if is_waiting else cpu, is_waiting


def _own_loading(facts: Facts) -> float:
    """Return the seconds per step that the loop needs for its batches, without those when it may have had no core."""
    return max(facts.mean("loading"), facts.accounts.mean(DATA) - _delay(facts))


def _delay(facts: Facts) -> float:
    return fmean(facts.accounts.delay_of(rank) for rank in range(len(facts.records)))


def _workers_and_step(facts: Facts, batch: float, is_waiting: bool) -> tuple[int, float]:
    """Return how many workers per rank keep up with the training, and the resulting seconds per step."""
    group, busy = neighbours(facts.records, 0), facts.records[0].busy_cores or 0.0
    rest = max(facts.length - facts.accounts.mean(DATA), 1e-6)
    wanted = min(MOST_WORKERS, math.ceil(batch / rest) + 1)
    # Workers that wait need no free core.
    free = wanted if is_waiting else math.floor(max(0.0, group.cores - busy) / len(group.records))
    count = min(wanted, free)
    return count, max(rest, batch / count) if count else facts.length


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
    activity = NAMES | {OTHER: OWN_CODE, DATA: "waiting for data"}
    during = f" in steps {slow.first_step} to {slow.last_step}"
    when = {"emerging": f" since step {slow.first_step}", "recovered": during}.get(slow.kind, "")
    function = function_of_own_code(facts, slow.rank) if slow.phase == OTHER else ""
    late_rank = LateRank(slow.rank, activity[slow.phase], slow.seconds, when, function)
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
    others = (*COMPUTE, DATA, CHECKPOINT, COLLECTOR)
    if any(fmean(facts.longer(rank, part).values()) > fmean(longer.values()) for part in others):
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


def larger_batch(facts: Facts) -> Advice | None:
    """Detect operators that cost more to call than to compute."""
    table, rows, shares = facts.operators, facts.rows, facts.shares
    if not table.calls or rows is None or table.computing > COMPUTING:
        return None
    per_rank = rows / facts.batches / len(facts.records)
    # Only computation and data grow with the batch. With twice the rows, the rest costs half as much per row.
    growing = shares[DATA] + shares[COLLECTOR] + table.computing * sum(shares[part] for part in COMPUTE)
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


def collector(facts: Facts) -> Advice | None:
    """Detect pauses by Python's garbage collector."""
    accounts = facts.accounts
    rows = zip(accounts.busy(), accounts.parts[COLLECTOR], accounts.figures("collected"), strict=True)
    # Objects that refer to each other must still be freed at some time.
    pairs = [
        [(own, own - max(0.0, pause - FREED_S * freed)) for own, pause, freed in zip(*row, strict=True)] for row in rows
    ]
    # A step is as long as on its slowest rank; NaN is not larger than any number.
    now, then = (fmean(max(0.0, *(pair[at] for pair in row)) for row in pairs) for at in (0, 1))
    return Advice(
        "garbage-collection",
        "Call gc.freeze() and gc.disable() before the loop, and gc.collect() every 100 steps; until then, objects that "
        "refer to each other keep their memory",
        f"Python's garbage collector takes {facts.mean_parts[COLLECTOR] * 1e3:.1f} ms per step and frees "
        f"{facts.mean('collected'):,.0f} objects; gc.freeze() excludes existing objects from collection",
        (now - then) / facts.length,
        part_sentence(facts, COLLECTOR),
        ONE_CAUSE,
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


Rule = Callable[[Facts], Advice | None]
SURE: tuple[Rule, ...] = (straggler, own_code, balance, data_loading, saves, collector, larger_batch, threads, loop)
"""Rules that are valid even on a busy host, which slows all parts of a step and affects waiting most."""
