"""The scene of a backward: buckets that fill up, and their all-reduces, at its end or during it.

The numbers are an example, stated below; the rest follows by
:func:`paceline.core.state.buckets.overlap` and the cost of the ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.comm.algorithms import build
from paceline.comm.algorithms.cost import Model
from paceline.core.output.wording import counted
from paceline.core.state.buckets import CAPACITY, FIRST_CAPACITY, MIB, Overlap, overlap
from paceline.tools.explain.pictures.axis import BELOW, Axis, ms, number
from paceline.tools.explain.pictures.scene import Frame, Scene, box, text

SIZES = (FIRST_CAPACITY, CAPACITY, CAPACITY, CAPACITY, CAPACITY)
"""Bytes of the buckets, with the wrapper's own capacities."""
BACKWARD = 0.150
"""Seconds of backward without communication, spread over the buckets by their bytes."""
LATENCY = 50e-6
"""Seconds that a message takes however short it is."""
BANDWIDTH = 1.25e9
"""Bytes in a second between two ranks: 10 Gbit/s."""
LINK = Model(LATENCY, 1 / BANDWIDTH)

LEFT, WIDE = 200.0, 600.0
"""Where time 0 is, beyond all headings, and the length of the time axis."""
RESULTS = 150.0
"""Room for what each way takes, beyond the end of the axis."""
BAR, ABOVE = 22.0, 13.0
"""Height of a bar, and of the space above it for the number of a bucket whose bar is too narrow for it."""
ROW = BAR + ABOVE + 3
WAY = 2 * ROW + 18
"""Height of one way of launching: its row of backward, its row of all-reduces, and space below."""
TOP = 22.0
BOTTOM = TOP + 2 * WAY - 12
"""Where the time axis is."""
TICK = 0.05
"""Seconds between two marks of the axis."""
NARROW = 14.0
"""A bar narrower than that has its bucket's number above it."""
AFTER, DURING = "after backward", "as buckets fill"
"""The two ways: when a bucket's all-reduce is launched."""
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
    """With the numbers above."""
    backward = tuple(BACKWARD * size / sum(SIZES) for size in SIZES)
    ring = build("ring_all_reduce", ranks)
    reduce = tuple(LINK.seconds(ring, size) for size in SIZES)
    return Example(ranks, backward, reduce, overlap(backward, reduce, False), overlap(backward, reduce))


def assumption() -> str:
    """Describe the example's numbers."""
    sizes = ", ".join(f"{size // MIB}" for size in SIZES)
    return (
        f"An example: buckets of {sizes} MiB, a backward of {1000 * BACKWARD:g} ms, a ring over links of "
        f"{8 * BANDWIDTH / 1e9:g} Gbit/s and {1e6 * LATENCY:g} µs a message, which take no time from backward."
    )


def outcome(of: Example) -> str:
    """Say in words what overlap gains."""
    late, early = of.at_the_end, of.when_full
    return (
        f"All-reduce {AFTER}: {ms(late.end[-1])} in total, {number(late.exposed)} of it waiting. "
        f"{DURING.capitalize()}: {ms(early.end[-1])}, {number(early.exposed)} waiting."
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
    chart = Chart(of)
    frames = tuple(_frame(chart, moment) for moment in moments(of))
    title = f"buckets and overlap, {counted(ranks, 'rank')}"
    width, height = LEFT + WIDE + RESULTS, BOTTOM + BELOW
    reading = f"{assumption()} A number at a bar is a bucket."
    still = chart.draw(math.inf)
    return Scene(title, outcome(of), reading, width, height, frames, still=still, hint=hint(of))


def moments(of: Example) -> list[float]:
    """Return the start, and every time at which a bucket is full or reduced, either way."""
    return sorted({0.0, *of.when_full.full, *of.when_full.end, *of.at_the_end.end})


def _frame(chart: Chart, moment: float) -> Frame:
    happened = "; ".join(_events(chart.of, moment)) or "backward begins"
    return Frame(f"after {ms(moment)}", happened, chart.draw(moment) + chart.cursor(moment))


def _events(of: Example, moment: float) -> Iterator[str]:
    for bucket, full in enumerate(of.when_full.full):
        if full == moment:
            yield f"bucket {bucket} is full"
    for name, way in ((DURING, of.when_full), (AFTER, of.at_the_end)):
        for bucket, end in enumerate(way.end):
            if end == moment:
                yield f"bucket {bucket} is reduced ({name})"


@dataclass(frozen=True)
class Bar:
    """A bucket in one row: the time that its part of backward, or its all-reduce, takes."""

    bucket: int
    x: float
    y: float
    width: float
    """All in the units of the drawing."""

    @property
    def middle(self) -> tuple[float, float]:
        """The baseline of its bucket's number: in the bar, or above one that is too narrow."""
        return self.x + self.width / 2, self.y + (15 if self.width >= NARROW else -3)

    def draw(self, until: float) -> str:
        """Dashed, and full up to `until`."""
        done = min(self.width, until - self.x)
        filled = box(self.x, self.y, done, BAR, f"k{self.bucket}") if done > 0 else ""
        kind = "digit" if self.width >= NARROW and done >= self.width else "number"
        label = text(*self.middle, str(self.bucket), kind, "middle")
        return box(self.x, self.y, self.width, BAR, "ghost") + filled + label


class Chart:
    """The time axis, both ways of launching beside it, and the cursor."""

    def __init__(self, of: Example) -> None:
        self.of = of
        self.axis = Axis(LEFT, WIDE, BOTTOM, of.at_the_end.end[-1], TICK, "time since backward began (ms)")
        self.bars = [bar for top, _, way in self._ways() for bar in self._bars(way, top)]

    def draw(self, moment: float) -> str:
        """Draw all but the cursor, as far as things are at `moment`."""
        parts = [*self.axis.draw(), *(bar.draw(self.axis.x(moment)) for bar in self.bars)]
        for top, name, way in self._ways():
            parts.append(text(4, top + 4, f"all-reduce {name}", "heading"))
            parts += [text(4, top + row * ROW + ABOVE + 15 + 4, label) for row, label in enumerate(ROWS)]
            if moment >= way.end[-1]:
                right = LEFT + WIDE + 12
                parts.append(text(right, top + ROW + ABOVE + 6, f"{ms(way.end[-1])} in total", "heading"))
                parts.append(text(right, top + ROW + ABOVE + 22, f"{number(way.exposed)} of it waiting"))
        return "".join(parts)

    def cursor(self, moment: float) -> str:
        """Draw a line at `moment`, with its time above; it leaves room for the numbers of buckets that it meets."""
        return self.axis.cursor(moment, [(TOP - 6, BOTTOM)], [bar.middle for bar in self.bars])

    def _ways(self) -> tuple[tuple[float, str, Overlap], ...]:
        return (TOP, AFTER, self.of.at_the_end), (TOP + WAY, DURING, self.of.when_full)

    def _bars(self, way: Overlap, top: float) -> Iterator[Bar]:
        rows = (zip((0.0, *way.full), way.full, strict=False), zip(way.begin, way.end, strict=True))
        for row, spans in enumerate(rows[: 1 if self.of.ranks == 1 else 2]):
            for bucket, (begin, end) in enumerate(spans):
                left = self.axis.x(begin)
                yield Bar(bucket, left, top + row * ROW + ABOVE + 4, self.axis.x(end) - left)
