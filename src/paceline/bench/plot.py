"""The plot of a benchmark: bus bandwidth over size, measured and modelled, as SVG or a page with that in it.

Drawn here and not by a plotting library: a few lines over two logarithmic axes are no reason for a dependency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from paceline.bench.rows import Row, bus_factor
from paceline.explain.scene import Scene, counted, text
from paceline.explain.sheet import sheet

LEFT, WIDE, HIGH, TOP = 60.0, 620.0, 300.0, 20.0
"""Where the axes are, and how long."""
NAMES = 170.0
"""Room for the variants' names at the ends of their lines."""
APART = 15.0
"""Between two names."""
READING = "Higher is faster. Points are measured medians; a dashed line is the model fitted to our algorithms."


def plot(rows: Sequence[Row], cores: int, suffix: str) -> str:
    """The document: SVG, or HTML for the suffix ``".html"``."""
    ops = list(dict.fromkeys(row.op for row in rows))
    drawn = sheet([scene(op, [row for row in rows if row.op == op], cores) for op in ops])
    if suffix != ".html":
        return drawn
    title = f"{', '.join(ops)} on {counted(rows[0].ranks, 'rank')}"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        "<style>body { margin: 0 auto; max-width: 70rem; } svg { height: auto; width: 100%; }\n"
        "@media (prefers-color-scheme: dark) { body { background: #16191d; } }</style>\n"
        f"</head>\n<body>\n{drawn}</body>\n</html>\n"
    )


def scene(op: str, rows: Sequence[Row], cores: int) -> Scene:
    """One collective's panel."""
    title = f"{op.replace('_', '-')}, {counted(rows[0].ranks, 'rank')} on {counted(cores, 'core')}"
    summary = "Bus bandwidth in GB/s over bytes of the whole tensor, float32."
    drawing = "".join(Panel(rows).draw())
    return Scene(title, summary, READING, LEFT + WIDE + NAMES, TOP + HIGH + 34, (), still=drawing)


class Panel:
    """Two logarithmic axes and the lines between them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [row for row in rows if row.busbw > 0]
        self.ranks = rows[0].ranks
        speeds = [row.busbw for row in self.rows] + [speed for row in self.rows if (speed := _modelled(row))]
        self.sizes = sorted({row.nbytes for row in rows})
        self.low, self.high = _decades(speeds)

    def draw(self) -> Iterator[str]:
        """All elements."""
        yield from self._axes()
        ends = {}
        for number, variant in enumerate(dict.fromkeys(row.variant for row in self.rows)):
            points = [row for row in self.rows if row.variant == variant]
            measured = [(self.x(row.nbytes), self.y(row.busbw)) for row in points]
            yield f'<polyline points="{_path(measured)}" class="s{number} line"/>'
            modelled = [(self.x(row.nbytes), self.y(speed)) for row in points if (speed := _modelled(row))]
            if modelled:
                yield f'<polyline points="{_path(modelled)}" class="s{number} model"/>'
            for row, (x, y) in zip(points, measured, strict=True):
                hint = f"{variant}: {row.nbytes:,} bytes, {1e6 * row.seconds:,.1f} µs, {row.busbw:.3f} GB/s"
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="s{number} dot"><title>{hint}</title></circle>'
            ends[variant] = (number, measured[-1][1])
        yield from self._names(ends)

    def x(self, nbytes: float) -> float:
        """Where a size is."""
        first, last = math.log2(self.sizes[0]), math.log2(self.sizes[-1])
        return LEFT + (WIDE * (math.log2(nbytes) - first) / (last - first) if last > first else WIDE / 2)

    def y(self, speed: float) -> float:
        """Where a bandwidth is."""
        return TOP + HIGH * (self.high - math.log10(speed)) / (self.high - self.low)

    def _axes(self) -> Iterator[str]:
        for decade in range(self.low, self.high + 1):
            y = self.y(10.0**decade)
            yield f'<path d="M{LEFT:g},{y:g} H{LEFT + WIDE:g}" class="axis"/>'
            yield text(LEFT - 6, y + 4, f"{10.0**decade:g}", anchor="end")
        shown = -math.inf
        for size in self.sizes:
            if self.x(size) - shown >= 44:
                shown = self.x(size)
                yield f'<path d="M{shown:g},{TOP + HIGH:g} v5" class="axis"/>'
                yield text(shown, TOP + HIGH + 20, short(size), anchor="middle")

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


def _modelled(row: Row) -> float | None:
    if not row.model_seconds:
        return None
    return row.nbytes / row.model_seconds / 1e9 * bus_factor(row.op, row.ranks)


def _decades(speeds: Sequence[float]) -> tuple[int, int]:
    if not speeds:  # one rank: nothing crosses a bus
        return 0, 1
    low, high = math.floor(math.log10(min(speeds))), math.ceil(math.log10(max(speeds)))
    return low, max(high, low + 1)


def _lowest(ends: Sequence[float]) -> float:
    free = -math.inf
    for y in ends:
        free = max(y, free + APART)
    return free


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
