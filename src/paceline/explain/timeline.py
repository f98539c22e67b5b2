"""The scene of a backward: buckets that fill up, and their all-reduces, at its end or during it.

The numbers are an example, stated below; the rest follows by :func:`paceline.buckets.overlap` and the cost of the ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.buckets import CAPACITY, FIRST_CAPACITY, MIB, Overlap, overlap
from paceline.comm.algorithms import build
from paceline.comm.algorithms.cost import Model
from paceline.explain.scene import Frame, Scene, box, counted, text

SIZES = (FIRST_CAPACITY, CAPACITY, CAPACITY, CAPACITY, CAPACITY)
"""Bytes of the buckets, with the wrapper's own capacities."""
BACKWARD = 0.150
"""Seconds of backward without communication, spread over the buckets by their bytes."""
LATENCY = 50e-6
"""Seconds that a message takes however short it is."""
BANDWIDTH = 1.25e9
"""Bytes in a second between two ranks: 10 Gbit/s."""

LEFT, WIDE = 90.0, 680.0
"""Where time 0 is, and the length of the time axis."""
BAR, BETWEEN = 22.0, 74.0
"""Height of a bar, and of one way of launching with its two rows of bars."""
TOP = 26.0


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
    reduce = tuple(Model(LATENCY, 1 / BANDWIDTH).seconds(ring, size) for size in SIZES)
    return Example(ranks, backward, reduce, overlap(backward, reduce, False), overlap(backward, reduce))


def assumption() -> str:
    """The example's numbers, in words."""
    sizes = ", ".join(f"{size // MIB}" for size in SIZES)
    return (
        f"An example: buckets of {sizes} MiB, a backward of {1000 * BACKWARD:g} ms, a ring over links of "
        f"{8 * BANDWIDTH / 1e9:g} Gbit/s and {1e6 * LATENCY:g} µs a message, which take no time from backward."
    )


def outcome(of: Example) -> str:
    """What overlap gains, in words."""
    late, early = of.at_the_end, of.when_full
    return (
        f"Launched at the end, backward takes {ms(late.end[-1])} and {ms(late.exposed)} of communication are exposed; "
        f"launched when full, {ms(early.end[-1])} and {ms(early.exposed)}."
    )


def ms(seconds: float) -> str:
    """``31.8 ms``."""
    return f"{1000 * seconds:.1f} ms"


def scene(ranks: int) -> Scene:
    """The picture: one frame for every moment at which a bucket is full or reduced."""
    of = example(ranks)
    scale = WIDE / of.at_the_end.end[-1]
    frames = [_frame(of, moment, scale) for moment in moments(of)]
    title = f"buckets and overlap, {counted(ranks, 'rank')}"
    height = TOP + 2 * BETWEEN + 24
    still = "".join(_bars(of, math.inf, scale))
    return Scene(title, outcome(of), assumption(), LEFT + WIDE + 170, height, tuple(frames), still=still)


def moments(of: Example) -> list[float]:
    """The start, and every time at which a bucket is full or reduced, either way."""
    return sorted({0.0, *of.when_full.full, *of.when_full.end, *of.at_the_end.end})


def _frame(of: Example, moment: float, scale: float) -> Frame:
    x, bottom = LEFT + scale * moment, TOP + 2 * BETWEEN
    line = f'<path d="M{x:g},14 V{bottom:g}" class="now"/>' + text(x, 10, ms(moment), "heading", "middle")
    happened = "; ".join(_events(of, moment)) or "backward begins"
    return Frame(f"after {ms(moment)}", happened, "".join(_bars(of, moment, scale)) + line)


def _bars(of: Example, moment: float, scale: float) -> Iterator[str]:
    """Both ways of launching, as far as they are at `moment`."""
    for top, name, way in ((TOP, "at the end", of.at_the_end), (TOP + BETWEEN, "when full", of.when_full)):
        yield from _way(name, way, top, moment, scale)
    yield text(4, TOP + 2 * BETWEEN + 14, "A number in a bar is a bucket.")


def _events(of: Example, moment: float) -> Iterator[str]:
    for bucket, full in enumerate(of.when_full.full):
        if full == moment:
            yield f"bucket {bucket} is full"
    for name, way in (("launched when full", of.when_full), ("launched at the end", of.at_the_end)):
        for bucket, end in enumerate(way.end):
            if end == moment:
                yield f"bucket {bucket} is reduced ({name})"


def _way(name: str, way: Overlap, top: float, moment: float, scale: float) -> Iterator[str]:
    """Two rows of bars, for backward and for communication, as far as they are at `moment`."""
    yield text(4, top + 2, f"launched {name}", "heading")
    rows = (
        ("backward", top + 8, zip((0.0, *way.full), way.full, strict=False)),
        ("all-reduce", top + 8 + BAR + 4, zip(way.begin, way.end, strict=True)),
    )
    for label, y, spans in rows:
        yield text(4, y + 15, label)
        for bucket, (begin, end) in enumerate(spans):
            left, width = LEFT + scale * begin, scale * (end - begin)
            done = scale * (min(end, moment) - begin)
            yield box(left, y, width, BAR, "ghost")
            if done > 0:
                yield box(left, y, done, BAR, f"k{bucket}")
            if width > 12 and done >= width:
                yield text(left + width / 2, y + 15, str(bucket), "digit", "middle")
    if moment >= way.end[-1]:
        said = f"{ms(way.end[-1])}, {ms(way.exposed)} exposed"
        yield text(LEFT + scale * way.end[-1] + 6, top + 8 + BAR + 19, said, "heading")
