"""Bubbles: the cost of a late rank, the cost of the network, and the remedies for both.

Ranks wait for two reasons. Until the last rank arrives, the others are in a bubble, which a faster network cannot
shorten. From then on, all ranks wait for communication, which would take no time on an infinitely fast network. The
profiler makes the same distinction. The example uses the numbers of :mod:`paceline.tools.explain.buckets`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from rich.table import Table

from paceline.comm.schedules import Model, build
from paceline.core.messages import counted
from paceline.core.missing_ranks import named_ranks, ranks_by_value
from paceline.core.tables import new_table
from paceline.ddp.buckets import Overlap, overlap
from paceline.tools.explain import buckets
from paceline.tools.explain.drawing import BUBBLE, COMMUNICATION, NETWORK, WAITING, Bar, Chart, Panel
from paceline.tools.explain.scene import Scene, figure, ms

LATE_WORK = 1.5
"""Work in the batch of a late rank, relative to the batches of the other ranks."""
LATE = 1
"""The rank that is late in the first scene."""
MICRO_BATCHES = 4
"""Number of micro-batches in the second scene. In each, another rank is late."""
EXACT = 9
"""Decimal places to which times in seconds are rounded, that is, nanoseconds."""
ALONE = "A single rank never waits."
WORK = f"a forward of {1000 * buckets.FORWARD:g} ms and a backward of {1000 * buckets.BACKWARD:g}"
ASSUMPTION = f"Normal work is {WORK}; {buckets.BUCKETS}."
READING = (
    "Each row is a rank. 1: forward, 2: backward, 3: optimizer. Red: a bubble, waiting for the last rank. "
    f"Gray: waiting for the network. {ASSUMPTION}"
)
ABOUT = "Ranks average gradients together, so each waits for the last: a bubble, which no faster network can shorten."
LEGEND = (("k0", "1 forward"), ("k1", "2 backward"), ("k2", "3 optimizer"), *WAITING)


class MicroBatch(NamedTuple):
    """Forward and backward of one micro-batch on every rank, ending when all ranks have the averaged gradients.

    Times are in seconds.
    """

    start: list[float]
    """Start of forward, by rank."""
    forward: list[float]
    """End of forward, by rank."""
    came: list[float]
    """End of backward, by rank; from then on the rank waits."""
    network: Overlap
    """The all-reduces. A bucket is full when every rank has filled it."""
    last: float
    """When the last rank finishes backward. Until then, the other ranks are in a bubble."""
    end: float
    """When all ranks have the averaged gradients. From `last` until `end`, they wait for the network."""


class Case(NamedTuple):
    """A training step on all ranks, including the optimizer step."""

    title: str
    computed: list[MicroBatch]
    meetings: list[MicroBatch]
    """The micro-batches after which gradients are averaged."""
    bubbles: list[float]
    """Seconds in bubbles, by rank."""
    communication: float
    """Seconds that each rank waits for the network."""
    length: float
    """Seconds of the step."""

    @property
    def share(self) -> float:
        """Return the share of all ranks' time that is spent in bubbles."""
        return sum(self.bubbles) / (len(self.bubbles) * self.length)


def micro_batch(start: Sequence[float], work: Sequence[float], bandwidth: float) -> MicroBatch:
    """Compute the times of forward and backward, given the start and the relative amount of work of each rank."""
    forward = [begin + buckets.FORWARD * amount for begin, amount in zip(start, work, strict=True)]
    full = [
        list(accumulate((amount * share for share in buckets.SHARES), initial=begin))[1:]
        for begin, amount in zip(forward, work, strict=True)
    ]
    everywhere = [max(times) for times in zip(*full, strict=True)]
    ring, link = build("ring_all_reduce", len(work)), Model(buckets.LATENCY, 1 / bandwidth)
    # overlap() takes the duration of filling each bucket, not the moment when it is full.
    filling = [later - earlier for earlier, later in zip([0.0, *everywhere], everywhere, strict=False)]
    network = overlap(filling, [link.seconds(ring, size) for size in buckets.SIZES])
    came = [times[-1] for times in full]
    return MicroBatch(list(start), forward, came, network, max(came), max(*came, network.end[-1]))


def run_case(title: str, work: Sequence[Sequence[float]], every: int = 1, bandwidth: float = buckets.BANDWIDTH) -> Case:
    """Compute a step of ``work[micro-batch][rank]`` with gradients averaged after every `every` micro-batches."""
    start = [0.0] * len(work[0])
    computed = []
    for number, amounts in enumerate(work, start=1):
        batch = micro_batch(start, amounts, bandwidth)
        computed.append(batch)
        # Rounded, because the same time can differ in the last bit between ranks, and would become two events.
        start = [round(came, EXACT) for came in batch.came] if number % every else [batch.end] * len(start)
    met = computed[every - 1 :: every]
    bubbles = [sum(mb.last - mb.came[rank] for mb in met) for rank in range(len(start))]
    return Case(title, computed, met, bubbles, sum(mb.end - mb.last for mb in met), batch.end + buckets.OPTIMIZER)


def late_rank(ranks: int) -> list[Case]:
    """Return a step with one late rank, with a faster network, and with equal work; for one rank, a plain step."""
    if ranks == 1:
        return [run_case("one rank", [[1.0]])]
    uneven = [LATE_WORK if rank == LATE else 1.0 for rank in range(ranks)]
    equal = [sum(uneven) / ranks] * ranks
    return [
        run_case(f"rank {LATE} has {LATE_WORK:g} times the work of the others", [uneven]),
        run_case("the same with twice the bandwidth", [uneven], bandwidth=2 * buckets.BANDWIDTH),
        run_case("the same samples, split by cost", [equal]),
    ]


def accumulation(ranks: int) -> list[Case]:
    """Return a step with a different late rank in each micro-batch, averaged after each one or only at the end."""
    work = [[LATE_WORK if rank == late % ranks else 1.0 for rank in range(ranks)] for late in range(MICRO_BATCHES)]
    return [
        run_case(f"averaged after each of {MICRO_BATCHES} micro-batches", work),
        run_case("averaged once (no_sync, accumulate)", work, every=MICRO_BATCHES),
    ]


def late_outcome(late: Case, fast: Case, equal: Case) -> str:
    """Describe the cost of a late rank, and the remedy."""
    return (
        f"Each other rank waits {ms(max(late.bubbles))} for rank {LATE} and {figure(late.communication)} for the "
        f"network. With twice the bandwidth it waits {figure(max(fast.bubbles))} and {figure(fast.communication)}, "
        f"with equal work {figure(max(equal.bubbles))} and {figure(equal.communication)}."
    )


def accumulation_outcome(each: Case, once: Case) -> str:
    """Describe the savings from accumulating gradients."""
    return (
        f"Bubbles take {each.share:.1%} of the ranks' time with averaging after each micro-batch, and {once.share:.1%} "
        f"with averaging once, because delays of different ranks cancel out. Waiting for the network falls from "
        f"{ms(each.communication)} to {figure(once.communication)}."
    )


def scenes(ranks: int) -> list[Scene]:
    """Draw both scenes."""
    late, even = late_rank(ranks), accumulation(ranks)
    if ranks == 1:
        return [_scene("a late rank", late, ALONE, ALONE), _scene("bubbles and accumulation", even, ALONE, ALONE)]
    hint = f"rank {LATE}: all others wait for it (red), however fast the network is; gray: waiting for the network."
    evens = "the red parts: above, the late rank of each micro-batch makes the others wait; below, delays cancel out."
    return [
        _scene("a late rank", late, late_outcome(*late), hint),
        _scene("bubbles and accumulation", even, accumulation_outcome(*even), evens),
    ]


def _scene(subject: str, cases: Sequence[Case], outcome: str, hint: str) -> Scene:
    title, lettered = f"{subject}, {counted(len(cases[0].bubbles), 'rank')}", list(zip("abc", cases, strict=False))
    chart = Chart([_panel(letter, case) for letter, case in lettered], "time since the step began (ms)")
    events = [(moment, f"{letter}: {event}") for letter, case in lettered for moment, event in _events(case)]
    frames, table = chart.frames([(0.0, "the step begins"), *events]), _table(title, cases, outcome)
    return Scene(title, ABOUT, outcome, READING, hint, frames, chart.still(), table, legend=LEGEND)


def _panel(letter: str, case: Case) -> Panel:
    names, results = [f"rank {rank}" for rank in range(len(case.bubbles))], [f"{ms(case.length)} in total"]
    if len(names) > 1:
        names.append("network")
        results += [f"bubbles {case.share:.1%}", f"network {case.communication / case.length:.1%}"]
    return Panel(f"{letter}: {case.title}", names, list(_bars(case)), results)


def _bars(case: Case) -> Iterator[Bar]:
    ranks = len(case.bubbles)
    for micro in case.computed:
        for rank in range(ranks):
            yield Bar(rank, micro.start[rank], micro.forward[rank], "k0", "1")
            yield Bar(rank, micro.forward[rank], micro.came[rank], "k1", "2")
    for meeting in case.meetings if ranks > 1 else ():
        for rank, came in enumerate(meeting.came):
            if meeting.last > came:
                yield Bar(rank, came, meeting.last, BUBBLE)
            yield Bar(rank, meeting.last, meeting.end, COMMUNICATION)
        for begin, end in zip(meeting.network.begin, meeting.network.end, strict=True):
            yield Bar(ranks, begin, end, NETWORK)
    for rank in range(ranks):
        yield Bar(rank, case.length - buckets.OPTIMIZER, case.length, "k2", "3")


def _events(case: Case) -> Iterator[tuple[float, str]]:
    """Yield the ends of each backward pass, each exchange and the step."""
    for meeting in case.meetings:
        for came, ranks in ranks_by_value(enumerate(meeting.came)).items():
            yield round(came, EXACT), f"{named_ranks(ranks)} finished backward"
        if meeting.end > meeting.last:
            yield round(meeting.end, EXACT), "all ranks have the averaged gradients"
    yield round(case.length, EXACT), "the step is over"


def _table(title: str, cases: Sequence[Case], outcome: str) -> Table:
    """Show how long each rank computes and waits."""
    columns = ["case", "rank", "computes", "bubble", "network", "step"]
    caption = f"{outcome} {ASSUMPTION} Times are in ms."
    table = new_table(columns, title=title, caption=caption, words=["case"], wraps=["case"])
    for case in cases:
        for rank, waits in enumerate(case.bubbles):
            computes = case.length - waits - case.communication
            times = (computes, waits, case.communication, case.length)
            table.add_row("" if rank else case.title, str(rank), *map(figure, times))
        table.add_section()
    return table
