"""The scene of a backward: buckets that fill up, and their all-reduces, at its end or during it.

The numbers are an example; all else follows from them by :func:`paceline.ddp.options.buckets.overlap` and the cost of
the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.comm.algorithms import build
from paceline.comm.algorithms.cost import Model
from paceline.core.output.wording import counted
from paceline.ddp.options.buckets import CAPACITY, FIRST_CAPACITY, MIB, Overlap, overlap
from paceline.tools.explain.pictures.gantt import LATER, Bar, Panel, Scale, charted
from paceline.tools.explain.pictures.scene import Scene, figure, ms

SIZES = (FIRST_CAPACITY, CAPACITY, CAPACITY, CAPACITY, CAPACITY)
"""Bytes of the buckets, with the wrapper's own capacities."""
BACKWARD = 0.150
"""Seconds of backward without communication, spread over the buckets by their bytes."""
FORWARD = BACKWARD / 2
"""Seconds: backward computes two gradients where forward computes one output."""
OPTIMIZER = 0.010
"""Seconds."""
LATENCY = 50e-6
"""Seconds that a message takes however short it is."""
BANDWIDTH = 1.25e9
"""Bytes in a second between two ranks: 10 Gbit/s."""
LINK = Model(LATENCY, 1 / BANDWIDTH)

ABOUT = (
    "Ranks average their gradients in buckets: tensors that gather the gradients of neighbouring layers. Backward "
    "fills one bucket after the other. An all-reduce sums a full bucket over all ranks, over the network."
)
TICK = 0.05
"""Seconds between two marks of the axis."""
AFTER, DURING = "after backward", "as buckets fill"
"""The two moments at which a bucket's all-reduce may be launched."""
ROWS = ("backward", "all-reduce")


@dataclass(frozen=True)
class Example:
    """A backward on `ranks` ranks, with the buckets launched at its end and as soon as each is full."""

    ranks: int
    backward: tuple[float, ...]
    reduce: tuple[float, ...]
    at_the_end: Overlap
    when_full: Overlap


def example(ranks: int) -> Example:
    """Run the example."""
    backward = tuple(BACKWARD * size / sum(SIZES) for size in SIZES)
    ring = build("ring_all_reduce", ranks)
    reduce = tuple(LINK.seconds(ring, size) for size in SIZES)
    return Example(ranks, backward, reduce, overlap(backward, reduce, False), overlap(backward, reduce))


def assumption() -> str:
    """Describe the example's numbers."""
    return f"An example: a backward of {1000 * BACKWARD:g} ms, {network()}, which take no time from backward."


def network() -> str:
    """Describe the example's buckets and links."""
    sizes = ", ".join(f"{size // MIB}" for size in SIZES)
    link = f"{8 * BANDWIDTH / 1e9:g} Gbit/s and {1e6 * LATENCY:g} µs a message"
    return f"buckets of {sizes} MiB, a ring over links of {link}"


def outcome(of: Example) -> str:
    """Describe the gain by overlap."""
    late, early = of.at_the_end, of.when_full
    return (
        f"All-reduce {AFTER}: {ms(late.end[-1])} in total, {figure(late.exposed)} of it waiting. "
        f"{DURING.capitalize()}: {ms(early.end[-1])}, {figure(early.exposed)} waiting."
    )


def hint(of: Example) -> str:
    """Return the hint for the viewer of the timeline."""
    if of.ranks == 1:
        return "One rank has nothing to reduce."
    return (
        f"the all-reduce rows: {AFTER}, the network is idle until backward has ended; {DURING}, it works "
        f"beside backward, and a step waits only for what is left when backward ends."
    )


def scene(ranks: int) -> Scene:
    """Draw one frame for every moment at which a bucket is full or reduced."""
    of = example(ranks)
    panels = [_panel(of, AFTER, of.at_the_end), _panel(of, DURING, of.when_full)]
    plain = Scene(
        title=f"buckets and overlap, {counted(ranks, 'rank')}",
        summary=outcome(of),
        reading=f"{assumption()} A number at a bar is a bucket.",
        hint=hint(of),
        about=ABOUT,
        legend=LATER,
    )
    return charted(plain, panels, _events(of), Scale("time since backward began (ms)", (TICK,), 1000))


def _events(of: Example) -> dict[float, list[str]]:
    """Return the events by their moment: the start, and every bucket that is full or reduced, either way."""
    found = {0.0: ["backward begins"]}
    for bucket, full in enumerate(of.when_full.full):
        found.setdefault(full, []).append(f"bucket {bucket} is full")
    for name, way in ((DURING, of.when_full), (AFTER, of.at_the_end)):
        for bucket, end in enumerate(way.end):
            found.setdefault(end, []).append(f"bucket {bucket} is reduced ({name})")
    return found


def _panel(of: Example, name: str, way: Overlap) -> Panel:
    """Return one way of launching: its row of backward, and its row of all-reduces if there are several ranks."""
    bars = []
    rows = (zip((0.0, *way.full), way.full, strict=False), zip(way.begin, way.end, strict=True))
    for row, spans in enumerate(rows[: 1 if of.ranks == 1 else 2]):
        for bucket, (begin, end) in enumerate(spans):
            bars.append(Bar(row, begin, end, f"k{bucket}", str(bucket), is_always_labelled=True))
    results = (f"{ms(way.end[-1])} in total", f"{figure(way.exposed)} of it waiting")
    return Panel(f"all-reduce {name}", ROWS, tuple(bars), results)
