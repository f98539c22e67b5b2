"""Buckets that fill up during backward, and their all-reduces: after backward, or as soon as each is full.

All other timelines use the sizes and speeds defined here. Everything else follows from them through
:func:`paceline.ddp.buckets.overlap` and the cost of the ring.
"""

from __future__ import annotations

from paceline.comm.schedules import Model, build
from paceline.core.messages import counted
from paceline.core.tables import new_table
from paceline.ddp.buckets import CAPACITY, FIRST_CAPACITY, MIB, Overlap, overlap
from paceline.tools.explain.drawing import LATER, Bar, Chart, Panel
from paceline.tools.explain.scene import Scene, figure, ms

SIZES = (FIRST_CAPACITY, CAPACITY, CAPACITY, CAPACITY, CAPACITY)
"""Bytes of the buckets, as in the wrapper."""
BACKWARD = 0.150
"""Seconds of backward without communication, divided among the buckets in proportion to their bytes."""
FORWARD = BACKWARD / 2
"""Seconds of forward. Backward takes twice as long, because it computes two gradients for each output."""
OPTIMIZER = 0.010
"""Seconds of the optimizer's step."""
SHARES = tuple(BACKWARD * size / sum(SIZES) for size in SIZES)
"""Seconds of backward that fill each bucket."""
LATENCY, BANDWIDTH = 50e-6, 1.25e9
"""Seconds of latency per message, and bytes per second between two ranks: 10 Gbit/s."""
LINK = Model(LATENCY, 1 / BANDWIDTH)
LINKS = f"links of {8 * BANDWIDTH / 1e9:g} Gbit/s and {1e6 * LATENCY:g} µs per message"
BUCKETS = f"buckets of {', '.join(str(size // MIB) for size in SIZES)} MiB, a ring over {LINKS}"
ABOUT = (
    "Gradients are averaged in buckets. Backward fills one after another, and an all-reduce sums each over all ranks."
)
ASSUMPTION = f"An example: a backward of {1000 * BACKWARD:g} ms, {BUCKETS}. Communication does not slow down backward."
HINT = "the all-reduce rows: all-reduces overlap with backward as buckets fill, so ranks wait only for the remainder."


def example(ranks: int) -> tuple[Overlap, Overlap]:
    """Return the timeline with all buckets launched after backward, and with each launched as soon as it is full."""
    ring = build("ring_all_reduce", ranks)
    seconds = [LINK.seconds(ring, size) for size in SIZES]
    return overlap(SHARES, seconds, False), overlap(SHARES, seconds)


def scenes(ranks: int) -> list[Scene]:
    """Draw a frame whenever a bucket is full or has been reduced."""
    serial, eager = example(ranks)
    ways = {"after backward": serial, "as buckets fill": eager}
    chart = Chart([_panel(name, way, ranks) for name, way in ways.items()], "time since backward began (ms)")
    events = [(0.0, "backward begins"), *((full, f"bucket {bucket} is full") for bucket, full in enumerate(eager.full))]
    for name, way in ways.items():
        events += [(end, f"bucket {bucket} is reduced ({name})") for bucket, end in enumerate(way.end)]
    summary = (
        f"All-reduce after backward: {ms(serial.end[-1])} in total, {figure(serial.exposed)} of it waiting. "
        f"As buckets fill: {ms(eager.end[-1])}, {figure(eager.exposed)} waiting."
    )
    reading = f"{ASSUMPTION} A number in a bar is a bucket; the narrow bars are bucket 0."
    title, hint = f"buckets and overlap, {counted(ranks, 'rank')}", HINT if ranks > 1 else "Nothing to reduce."
    table = new_table(["bucket", "MiB", "full at", *ways], title=title, caption=f"{summary} {ASSUMPTION}")
    for bucket, size in enumerate(SIZES):
        spans = [f"{ms(way.begin[bucket])} – {ms(way.end[bucket])}" for way in ways.values()]
        table.add_row(str(bucket), str(size // MIB), ms(eager.full[bucket]), *spans)
    table.add_section()
    table.add_row("waiting", "", "", ms(serial.exposed), ms(eager.exposed))
    frames = chart.frames(events)
    return [Scene(title, ABOUT, summary, reading, hint, frames, chart.still(), table, legend=[LATER])]


def _panel(name: str, way: Overlap, ranks: int) -> Panel:
    rows = [(0, zip((0.0, *way.full), way.full, strict=False)), (1, zip(way.begin, way.end, strict=True))]
    bars = [
        Bar(row, begin, end, f"k{bucket}", str(bucket))
        for row, spans in (rows if ranks > 1 else rows[:1])
        for bucket, (begin, end) in enumerate(spans)
    ]
    results = (f"{ms(way.end[-1])} in total", f"{figure(way.exposed)} of it waiting")
    return Panel(f"all-reduce {name}", ("backward", "all-reduce"), bars, results)
