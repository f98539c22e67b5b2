"""The scenes of a bubble: the cost of a late rank, the cost of the network, and the remedies for both.

Waiting has two causes. Until the last rank has come it is a bubble, which that rank caused, and no network makes it
shorter. From then on it is communication, which a network without cost would save. The profiler splits it in the same
way. The numbers of the example are those of :mod:`paceline.tools.explain.pictures.timeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.comm.algorithms import build
from paceline.comm.algorithms.cost import Model
from paceline.core.output.wording import counted
from paceline.core.processes.missing_ranks import named_ranks, ranks_by_value
from paceline.ddp.options.buckets import Overlap, overlap
from paceline.tools.explain.pictures.gantt import (
    BUBBLE,
    COMMUNICATION,
    LATER,
    NETWORK,
    WAITING,
    Bar,
    Panel,
    charted,
)
from paceline.tools.explain.pictures.scene import Scene, figure, ms
from paceline.tools.explain.pictures.timeline import (
    BACKWARD,
    BANDWIDTH,
    FORWARD,
    LATENCY,
    LINK,
    OPTIMIZER,
    SIZES,
    network,
)

LATE_WORK = 1.5
"""Work of a late rank's batch; that of the others is 1."""
LATE = 1
"""The rank that is late in the first scene."""
MICRO_BATCHES = 4
"""Micro-batches of the second scene, where another rank is late in each."""
FAST = Model(LATENCY, 1 / (2 * BANDWIDTH))
"""The example's link with twice the bandwidth."""
EXACT = 9
"""Digits of a time in seconds: nanoseconds."""
NAMED = 3
"""Ranks that a caption names; more are counted."""
LETTERS = "abc"
ALONE = "One rank waits for nobody."
READING = (
    "A row is a rank. 1: forward, 2: backward, 3: optimizer. Red: a bubble, waiting for the last rank. "
    "Grey: waiting for the network."
)
ABOUT = (
    "All ranks average their gradients together, so a rank that has computed its own waits for the last one. Such a "
    "wait is a bubble: a faster network does not shorten it."
)
LEGEND = (("k0", "1 forward"), ("k1", "2 backward"), ("k2", "3 optimizer"))


@dataclass(frozen=True)
class RankSteps:
    """A forward and a backward on every rank, up to the moment at which all have the averages."""

    start: tuple[float, ...]
    """Begin of forward, in seconds, by rank."""
    forward: tuple[float, ...]
    """End of forward, by rank."""
    came: tuple[float, ...]
    """End of backward, by rank; from then on the rank waits."""
    network: Overlap
    """The all-reduces. A bucket is full when every rank has filled it."""

    @property
    def last(self) -> float:
        """Return when the last rank has ended its backward."""
        return max(self.came)

    @property
    def end(self) -> float:
        """Return when all have the averages."""
        return max(self.last, self.network.end[-1])

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Return the seconds that each rank waits for the last one."""
        return tuple(self.last - came for came in self.came)

    @property
    def communication(self) -> float:
        """Return the seconds that each rank waits for the network alone."""
        return self.end - self.last


def run(start: Sequence[float], work: Sequence[float], link: Model = LINK) -> RankSteps:
    """Run forward and backward, and all-reduce the buckets with a ring as soon as every rank has filled them.

    Args:
        start: seconds at which each rank begins.
        work: the work of each rank's batch; 1 takes the seconds of the example.
        link: the cost of messages.
    """
    forward = [begin + FORWARD * amount for begin, amount in zip(start, work, strict=True)]
    shares = [BACKWARD * size / sum(SIZES) for size in SIZES]
    full = [
        list(accumulate((amount * share for share in shares), initial=begin))[1:]
        for begin, amount in zip(forward, work, strict=True)
    ]
    everywhere = [max(times) for times in zip(*full, strict=True)]
    ring = build("ring_all_reduce", len(work))
    # overlap() takes the time in which each bucket fills, not the moment at which it is full.
    steps = [later - earlier for earlier, later in zip([0.0, *everywhere], everywhere, strict=False)]
    network = overlap(steps, [link.seconds(ring, size) for size in SIZES])
    return RankSteps(tuple(start), tuple(forward), tuple(times[-1] for times in full), network)


@dataclass(frozen=True)
class Computed:
    """A micro-batch on one rank, in seconds."""

    rank: int
    begin: float
    turn: float
    """The moment at which forward ends and backward begins."""
    end: float


@dataclass(frozen=True)
class Case:
    """A step of all ranks, the optimizer included."""

    title: str
    computed: tuple[Computed, ...]
    meetings: tuple[RankSteps, ...]
    """The backwards at whose end all ranks meet; the last one ends the step."""

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Return the seconds in bubbles, by rank."""
        return tuple(sum(times) for times in zip(*(meeting.bubbles for meeting in self.meetings), strict=True))

    @property
    def communication(self) -> float:
        """Return the seconds that each rank waits for the network."""
        return sum(meeting.communication for meeting in self.meetings)

    @property
    def length(self) -> float:
        """Return the seconds of the step."""
        return self.meetings[-1].end + OPTIMIZER

    @property
    def share(self) -> float:
        """Return the part of all ranks' time that is bubbles."""
        return sum(self.bubbles) / (len(self.bubbles) * self.length)


def run_case(title: str, work: Sequence[Sequence[float]], every: int = 1, link: Model = LINK) -> Case:
    """Run a step of micro-batches, ``work[micro-batch][rank]``, whose gradients are averaged after `every` of them."""
    start = [0.0] * len(work[0])
    computed: list[Computed] = []
    meetings: list[RankSteps] = []
    for number_of, amounts in enumerate(work, start=1):
        step = run(start, amounts, link)
        computed += [
            Computed(rank, *times) for rank, times in enumerate(zip(step.start, step.forward, step.came, strict=True))
        ]
        if number_of % every == 0:
            meetings.append(step)
            start = [step.end] * len(start)
        else:
            # Rounded, because equal sums of floats in another order differ in their last bit, and would be two events.
            start = [round(came, EXACT) for came in step.came]
    return Case(title, tuple(computed), tuple(meetings))


def late_rank(ranks: int) -> list[Case]:
    """Return a step with one late rank, with a faster network, and with equal work; with one rank, that alone."""
    if ranks == 1:
        return [run_case("one rank", [[1.0]])]
    late = [LATE_WORK if rank == LATE else 1.0 for rank in range(ranks)]
    equal = [sum(late) / ranks] * ranks
    return [
        run_case(f"rank {LATE} has {LATE_WORK:g} times the work of the others", [late]),
        run_case("the same over twice the bandwidth", [late], link=FAST),
        run_case("the same samples, split by what they cost", [equal]),
    ]


def accumulation(ranks: int) -> list[Case]:
    """Return a step of micro-batches in which one rank after the other is late, averaged after each, and at the end."""
    work = [[LATE_WORK if rank == late % ranks else 1.0 for rank in range(ranks)] for late in range(MICRO_BATCHES)]
    return [
        run_case(f"averaged after each of {MICRO_BATCHES} micro-batches", work),
        run_case("averaged once (no_sync, accumulate)", work, every=MICRO_BATCHES),
    ]


def assumption() -> str:
    """Describe the example's numbers."""
    return f"Work 1 is a forward of {1000 * FORWARD:g} ms and a backward of {1000 * BACKWARD:g}; {network()}."


def late_outcome(ranks: int) -> str:
    """Describe the cost of a late rank, and the remedy."""
    if ranks == 1:
        return ALONE
    late, fast, equal = late_rank(ranks)
    return (
        f"Each other rank waits {ms(max(late.bubbles))} for rank {LATE} and {figure(late.communication)} for the "
        f"network. Twice the bandwidth leaves {figure(max(fast.bubbles))} and {figure(fast.communication)}, equal "
        f"work {figure(max(equal.bubbles))} and {figure(equal.communication)}."
    )


def accumulation_outcome(ranks: int) -> str:
    """Describe the saving by accumulation."""
    if ranks == 1:
        return ALONE
    each, once = accumulation(ranks)
    return (
        f"Bubbles take {each.share:.1%} of the ranks' time if they meet after each micro-batch, and {once.share:.1%} "
        f"if they meet once, as being late in turn evens out. Waiting for the network falls from "
        f"{ms(each.communication)} to {figure(once.communication)}."
    )


def scenes(ranks: int) -> list[Scene]:
    """Draw both scenes."""
    of = counted(ranks, "rank")
    late = f"rank {LATE}: all others wait for it in red, however fast the network is; grey is waiting for the network."
    even = "the red parts: above, whoever is late in a micro-batch makes all others wait; below, being late evens out."
    return [
        _scene(f"a late rank, {of}", late_rank(ranks), late_outcome(ranks), late if ranks > 1 else ALONE),
        _scene(
            f"bubbles and accumulation, {of}",
            accumulation(ranks),
            accumulation_outcome(ranks),
            even if ranks > 1 else ALONE,
        ),
    ]


def _scene(title: str, cases: Sequence[Case], outcome: str, hint: str) -> Scene:
    panels = [_panel(case, letter) for letter, case in zip(LETTERS, cases, strict=False)]
    reading, legend = f"{READING} {assumption()}", (*LEGEND, *WAITING, *LATER)
    return charted(Scene(title, outcome, reading, hint=hint, about=ABOUT, legend=legend), panels, _events(cases))


def _panel(case: Case, letter: str) -> Panel:
    ranks = len(case.bubbles)
    shares = (f"bubbles {case.share:.1%}", f"network {case.communication / case.length:.1%}") if ranks > 1 else ()
    rows = (*(f"rank {rank}" for rank in range(ranks)), *(["network"] if ranks > 1 else []))
    return Panel(f"{letter}: {case.title}", rows, tuple(_bars(case)), (f"{ms(case.length)} in total", *shares))


def _bars(case: Case) -> Iterator[Bar]:
    ranks = len(case.bubbles)
    for micro in case.computed:
        yield Bar(micro.rank, micro.begin, micro.turn, "k0", "1")
        yield Bar(micro.rank, micro.turn, micro.end, "k1", "2")
    for meeting in case.meetings:
        for rank, came in enumerate(meeting.came):
            if meeting.last > came:
                yield Bar(rank, came, meeting.last, BUBBLE)
            if meeting.end > meeting.last:
                yield Bar(rank, meeting.last, meeting.end, COMMUNICATION)
        if ranks > 1:
            for begin, end in zip(meeting.network.begin, meeting.network.end, strict=True):
                yield Bar(ranks, begin, end, NETWORK)
    for rank in range(ranks):
        yield Bar(rank, case.length - OPTIMIZER, case.length, "k2", "3")


def _events(cases: Sequence[Case]) -> dict[float, list[str]]:
    """Return the events of the step by their moment: its begin, and the ends of backwards, of meetings and of all."""
    found: dict[float, list[str]] = {0.0: ["the step begins"]}
    for letter, case in zip(LETTERS, cases, strict=False):
        events = [(case.length, "the step is over")]
        for meeting in case.meetings:
            for came, ranks in ranks_by_value(enumerate(meeting.came)).items():
                who = named_ranks(ranks) if len(ranks) <= NAMED else f"{len(ranks)} ranks"
                events.append((came, f"{who} ended backward"))
            if meeting.communication > 0:
                events.append((meeting.end, "all have the averages"))
        for moment, event in events:
            found.setdefault(round(moment, EXACT), []).append(f"{letter}: {event}")
    return found
