"""The plot of a benchmark: time relative to Gloo's over size, measured and modelled, as SVG or a page with that in it.

Drawn here and not by a plotting library: a few lines between two axes are no reason for a dependency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from paceline.core.output.wording import counted, duration
from paceline.tools.bench.rows import Row
from paceline.tools.explain.pictures.scene import Scene, text
from paceline.tools.explain.pictures.sheet import sheet

LEFT, WIDE, HIGH, TOP = 76.0, 620.0, 320.0, 14.0
"""Where the axes are, and how long."""
BELOW = 74.0
"""Room below the axis of sizes for its marks, the reference's times and its title."""
NAMES = 170.0
"""Room for the variants' names at the ends of their lines."""
APART = 15.0
"""Between two names."""
MARK = 56.0
"""Between two marks of the axis of sizes, at least."""
REFERENCE = "gloo"
STEPS = (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
MOST_MARKS = 8
"""Most marks on the axis of times."""


def plot(rows: Sequence[Row], cores: int, suffix: str) -> str:
    """Draw the document: SVG, or HTML for the suffix ``".html"``."""
    ops = list(dict.fromkeys(row.op for row in rows))
    drawn = sheet([scene(op, [row for row in rows if row.op == op], cores) for op in ops])
    if suffix != ".html":
        return drawn
    title = f"{', '.join(ops)} on {counted(rows[0].ranks, 'rank')}"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        "<style>body { margin: 0 auto; max-width: 70rem; } svg { height: auto; min-width: 44rem; width: 100%; }\n"
        "@media (prefers-color-scheme: dark) { body { background: #16191d; } }</style>\n"
        f"</head>\n<body>\n{drawn}</body>\n</html>\n"
    )


def scene(op: str, rows: Sequence[Row], cores: int) -> Scene:
    """Draw one collective's panel."""
    panel = Panel(rows)
    name = op.replace("_", "-")
    title = f"{name}: time relative to {panel.whose}, {counted(rows[0].ranks, 'rank')} on {counted(cores, 'core')}"
    summary = f"Lower is faster: 0.5 is half of {panel.whose} time. Points are measured medians, float32."
    reading = "A dashed line is the model fitted to our algorithms." if any(row.model_seconds for row in rows) else ""
    width, height = LEFT + WIDE + NAMES, TOP + HIGH + BELOW
    return Scene(title, summary, reading, width, height, (), still="".join(panel.draw()))


class Panel:
    """A logarithmic axis of sizes, a linear one of times relative to the reference, and the lines between them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        names = [row.variant for row in rows]
        self.reference = REFERENCE if REFERENCE in names else names[0]
        """The variant whose time is 1: Gloo, or the first one where Gloo was left out."""
        self.seconds = {row.nbytes: row.seconds for row in rows if row.variant == self.reference}
        self.sizes = sorted({row.nbytes for row in rows})
        times = [self.relative(row, row.seconds) for row in rows]
        times += [self.relative(row, row.model_seconds) for row in rows if row.model_seconds is not None]
        self.step = next((step for step in STEPS if max(times) <= MOST_MARKS * step), _whole_step(max(times)))
        self.marks = max(1, math.ceil(max(times) / self.step - 1e-9))

    @property
    def whose(self) -> str:
        """``Gloo's``."""
        return f"{self.reference.capitalize() if self.reference == REFERENCE else self.reference}'s"

    def relative(self, row: Row, seconds: float) -> float:
        """`seconds` by the reference's time for the size of `row`."""
        return seconds / self.seconds[row.nbytes]

    def draw(self) -> Iterator[str]:
        """Draw all elements."""
        yield from self._times()
        yield from self._sizes()
        ends = {}
        for number, variant in enumerate(dict.fromkeys(row.variant for row in self.rows)):
            points = [row for row in self.rows if row.variant == variant]
            measured = [(self.x(row.nbytes), self.y(self.relative(row, row.seconds))) for row in points]
            modelled = [
                (self.x(row.nbytes), self.y(self.relative(row, row.model_seconds)))
                for row in points
                if row.model_seconds is not None
            ]
            yield f'<polyline points="{_path(measured)}" class="s{number} line"/>'
            if modelled:
                yield f'<polyline points="{_path(modelled)}" class="s{number} model"/>'
            for row, (x, y) in zip(points, measured, strict=True):
                share = f"{self.relative(row, row.seconds):.3f} of {self.whose}"
                hint = f"{variant}: {row.nbytes:,} bytes, {1e6 * row.seconds:,.1f} µs, {share}"
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="s{number} dot"><title>{hint}</title></circle>'
            ends[variant] = (number, measured[-1][1])
        yield from self._names(ends)

    def x(self, nbytes: float) -> float:
        """Return the horizontal place of a size."""
        first, last = math.log2(self.sizes[0]), math.log2(self.sizes[-1])
        return LEFT + (WIDE * (math.log2(nbytes) - first) / (last - first) if last > first else WIDE / 2)

    def y(self, relative: float) -> float:
        """Return the vertical place of a time relative to the reference."""
        return TOP + HIGH * (1 - relative / (self.marks * self.step))

    def _times(self) -> Iterator[str]:
        for mark in range(self.marks + 1):
            y = self.y(mark * self.step)
            yield f'<path d="M{LEFT:g},{y:g} H{LEFT + WIDE:g}" class="axis"/>'
            yield text(LEFT - 6, y + 4, f"{mark * self.step:g}", anchor="end")
        middle = TOP + HIGH / 2
        turned = text(0, 0, f"time ÷ {self.whose} time", "heading", "middle")
        yield f'<g transform="translate(20,{middle:g}) rotate(-90)">{turned}</g>'

    def _sizes(self) -> Iterator[str]:
        """Draw the axis of sizes, with the reference's time for each, which the ratios leave out."""
        shown, bottom = -math.inf, TOP + HIGH
        for size in self.sizes:
            if self.x(size) - shown >= MARK:
                shown = self.x(size)
                yield f'<path d="M{shown:g},{bottom:g} v5" class="axis"/>'
                yield text(shown, bottom + 19, short(size), anchor="middle")
                yield text(shown, bottom + 36, duration(self.seconds[size]), anchor="middle")
        yield text(LEFT + WIDE + 40, bottom + 19, "bytes")
        yield text(LEFT + WIDE + 40, bottom + 36, f"{self.whose} time")
        yield text(LEFT + WIDE / 2, bottom + 60, "size of the whole tensor (bytes)", "heading", "middle")

    def _names(self, ends: dict[str, tuple[int, float]]) -> Iterator[str]:
        """Beside the lines' ends, moved down where they would lie on each other."""
        free = -math.inf
        overflow = max(0.0, _lowest(sorted(y for _, y in ends.values())) - (TOP + HIGH))
        for variant, (number, y) in sorted(ends.items(), key=lambda one: one[1][1]):
            at = free = max(y - overflow, free + APART)
            end = LEFT + WIDE
            yield f'<path d="M{end + 6:g},{y:.1f} L{end + 20:g},{at:.1f}" class="s{number} lead"/>'
            yield text(end + 24, at + 4, variant)


def short(nbytes: int) -> str:
    """``64K``."""
    for unit, size in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g}{unit}"
    return str(nbytes)


def _whole_step(longest: float) -> float:
    """Return a power of ten for an axis that is longer than any of the usual ones."""
    return float(10 ** math.ceil(math.log10(longest / MOST_MARKS)))


def _lowest(ends: Sequence[float]) -> float:
    free = -math.inf
    for y in ends:
        free = max(y, free + APART)
    return free


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
