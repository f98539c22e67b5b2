"""Drawings of timelines, and of which rank holds which data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.comm.schedules import Terms
from paceline.tools.explain.scene import Drawing, Frame, box, ms, text

LEFT, WIDE, RESULTS, ROW = 84.0, 720.0, 170.0, 19.0
"""Widths of the row names, the axis and the results beside it; height of a row."""
BUBBLE, COMMUNICATION, NETWORK = "bubble", "wait", "cell"
"""Kinds of bars, apart from ``k0``, ``k1``, … for stages."""
LATER = ("ghost", "after the red line")
WAITING = (
    (BUBBLE, "bubble: waiting for the last rank"),
    (COMMUNICATION, "waiting for the network"),
    (NETWORK, "transfer on the network"),
    LATER,
)
"""Legend entries."""
TIP = (
    '<marker id="tip" viewBox="0 0 7 6" refX="6" refY="3" markerWidth="7" markerHeight="6" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L7,3 L0,6 Z" class="tip"/></marker>'
)
HEAD = 22.0
"""Height of the rank names."""
SLOT = 13.0
"""Width of a slot with a number in it."""


@dataclass(frozen=True)
class Bar:
    """A bar, which covers an interval in one row."""

    row: int
    begin: float
    end: float
    kind: str
    label: str = ""


@dataclass(frozen=True)
class Panel:
    """A group of rows that shows one case."""

    title: str
    rows: Sequence[str]
    bars: Sequence[Bar]
    results: Sequence[str] = ()
    """Text next to the panel, shown once the last bar has ended."""


class Chart:
    """Panels stacked, from top to bottom, above an axis of milliseconds with the name `axis`."""

    def __init__(self, panels: Sequence[Panel], axis: str) -> None:
        self.panels, self.axis = panels, axis
        self.end = max(bar.end for panel in panels for bar in panel.bars)
        self.tops: list[float] = []
        """Vertical position of each panel's first row."""
        self.bottom = 12.0
        for panel in panels:
            self.tops.append(self.bottom + 24)
            self.bottom = self.tops[-1] + len(panel.rows) * ROW + 8

    def x(self, value: float) -> float:
        """Return the horizontal position of a time."""
        return LEFT + WIDE * value / self.end

    def frames(self, events: Iterable[tuple[float, str]]) -> list[Frame]:
        """Draw one frame for each distinct time of `events`, in seconds."""
        moments: dict[float, list[str]] = {}
        for moment, event in sorted(events, key=lambda event: event[0]):
            moments.setdefault(moment, []).append(event)
        return [Frame(f"after {ms(at)}", "; ".join(texts), self.draw(at)) for at, texts in moments.items()]

    def still(self) -> list[Frame]:
        """Draw the complete chart as one frame."""
        return [Frame("", "", self.draw())]

    def draw(self, moment: float = math.inf) -> Drawing:
        """Draw the chart as of `moment`, which is marked by a line. Everything later is dashed."""
        parts = list(self._axis())
        for panel, top in zip(self.panels, self.tops, strict=True):
            parts += self._panel(panel, top, moment)
        if moment < math.inf:
            parts.append(text(self.x(moment), 10, ms(moment), "heading", "middle"))
        return Drawing("".join(parts), LEFT + WIDE + RESULTS, self.bottom + 38)

    def _axis(self) -> Iterator[str]:
        yield f'<path d="M{LEFT:g},{self.bottom:g} h{WIDE:g}" class="axis"/>'
        end = 1000 * self.end
        tick = max(step for power in range(6) for step in (10**power, 2 * 10**power, 5 * 10**power) if end >= 4 * step)
        for number in range(0, int(end + 1e-9) + 1, tick):
            x = self.x(number / 1000)
            yield f'<path d="M{x:g},{self.bottom:g} v5" class="axis"/>'
            yield text(x, self.bottom + 18, str(number), anchor="middle")
        yield text(LEFT + WIDE / 2, self.bottom + 34, self.axis, anchor="middle")

    def _panel(self, panel: Panel, top: float, moment: float) -> Iterator[str]:
        yield text(4, top - 6, panel.title, "heading")
        for number, name in enumerate(panel.rows):
            yield text(4, top + number * ROW + 13, name)
        for bar in panel.bars:
            yield self._bar(bar, top + bar.row * ROW, moment)
        if moment < math.inf:
            yield f'<path d="M{self.x(moment):g},{top:g} v{len(panel.rows) * ROW:g}" class="now"/>'
        for bar in panel.bars:  # after the lines, which would otherwise cross them
            yield self._label(bar, top + bar.row * ROW, moment)
        if moment >= max(bar.end for bar in panel.bars):
            for number, line in enumerate(panel.results):
                yield text(LEFT + WIDE + 12, top + 13 + 17 * number, line, "label" if number else "heading")

    def _bar(self, bar: Bar, y: float, moment: float) -> str:
        x, end = self.x(bar.begin), self.x(bar.end)
        drawn = min(end, max(x, self.x(moment)))
        later = box(x, y, end - x, ROW - 3, "ghost") if drawn < end else ""
        return later + (box(x, y, drawn - x, ROW - 3, bar.kind) if drawn > x else "")

    def _label(self, bar: Bar, y: float, moment: float) -> str:
        x, end = self.x(bar.begin), self.x(bar.end)
        if not bar.label or end - x < 14:
            return ""
        is_filled = moment > (bar.begin + bar.end) / 2 and bar.kind != NETWORK
        return text((x + end) / 2, y + 12, bar.label, "digit" if is_filled else "number", "middle")


class Cell(NamedTuple):
    """What one rank holds in one row; nothing by default."""

    terms: Terms = ()
    """Ranks whose contributions the cell contains. Each is drawn as a slot in the color of its rank."""
    label: str = ""
    """Text drawn instead of slots, in the color of the only rank in `terms`, or in gray if there is none."""
    came: bool = False
    """Whether the contents have just arrived."""


class Grid:
    """Cells for `size` ranks.

    Args:
        size: number of ranks.
        rows: names of the rows.
        is_bowed: draw all arrows above the first row, from rank to rank, instead of from cell to cell.
    """

    def __init__(self, size: int, rows: Sequence[str], is_bowed: bool = False) -> None:
        self.size, self.rows, self.is_bowed = size, rows, is_bowed
        self.symbols = {"tip": TIP}
        self.wide = max(44.0, SLOT * size)
        self.slot = self.wide / size
        self.pitch = self.wide + 24
        self.high = 18.0
        self.room = 24.0 if is_bowed else 15.0
        """Height for arrows above a row."""
        self.left = 12 + 7.5 * max(map(len, ("rank", *rows)))
        self.width = self.at(size, 0)[0] - 20
        self.height = self.at(0, len(rows))[1]

    def at(self, column: int, row: int) -> tuple[float, float]:
        """Return the upper left corner of a cell."""
        between = 6.0 if self.is_bowed else self.room
        return self.left + column * self.pitch, HEAD + self.room + row * (self.high + between)

    def draw(self, cells: Sequence[Sequence[Cell]], moves: Iterable[tuple[int, int, int]] = ()) -> Drawing:
        """Draw ``cells[rank][row]``, and an arrow for each (source, destination, row) in `moves`."""
        parts = [text(4, 14, "rank", "heading")]
        parts += [text(self.middle(column), 14, str(column), "heading", "middle") for column in range(self.size)]
        parts += [
            text(4, self.at(0, row)[1] + self.high / 2 + 4, name, "heading") for row, name in enumerate(self.rows)
        ]
        parts += [
            self.cell(cell, *self.at(column, row)) for column, held in enumerate(cells) for row, cell in enumerate(held)
        ]
        parts += [self._arrow(*move) for move in moves]
        return Drawing("".join(parts), self.width, self.height)

    def middle(self, column: int) -> float:
        """Return the middle of a column."""
        return self.at(column, 0)[0] + self.wide / 2

    def flight(self, cell: Cell, source: tuple[int, int], destination: tuple[int, int]) -> str:
        """Draw a message at its source, given as (rank, row), with the offset by which the animation moves it."""
        (x, y), (end, below) = self.at(*source), self.at(*destination)
        style = f"--dx: {end - x:g}px; --dy: {below - y:g}px"
        return f'<g class="flight" style="{style}">{self.cell(cell._replace(came=True), x, y)}</g>'

    def cell(self, cell: Cell, x: float, y: float) -> str:
        """Draw a cell with its upper left corner at `x`, `y`."""
        if not cell.terms and not cell.label:
            return box(x, y, self.wide, self.high, "ghost")
        # Define each distinct look once and refer to it, because a page with many ranks has 100,000 cells.
        name = f"c{self.size}{'b' if self.is_bowed else ''}-{'.'.join(map(str, cell.terms))}-{cell.label}"
        if name not in self.symbols:
            self.symbols[name] = f'<g id="{name}">{self._look(cell)}</g>'
        frame = box(x, y, self.wide, self.high, "came") if cell.came else ""
        return f'<use href="#{name}" x="{x:g}" y="{y:g}"/>{frame}'

    def _look(self, cell: Cell) -> str:
        middle, baseline = self.wide / 2, self.high / 2 + 3.5
        if cell.label:
            kind = f"k{cell.terms[0]}" if cell.terms else "cell"
            words = text(middle, baseline, cell.label, "digit" if cell.terms else "number", "middle")
            return box(0, 0, self.wide, self.high, kind) + words
        drawn = box(0, 0, self.wide, self.high, "cell")
        for rank in sorted(set(cell.terms)):
            drawn += box(rank * self.slot, 1.5, self.slot, self.high - 3, f"k{rank}")
            drawn += text((rank + 0.5) * self.slot, baseline, str(rank), "digit", "middle")
        return drawn

    def _arrow(self, source: int, destination: int, row: int) -> str:
        distance = abs(destination - source)
        if distance == 1 and not self.is_bowed:
            ends = (self.wide + 2, -2.0) if source < destination else (-2.0, self.wide + 2)
            (start, y), (end, _) = self.at(source, row), self.at(destination, row)
            path = f"M{start + ends[0]:g},{y + self.high / 2:g} H{end + ends[1]:g}"
        else:
            # An arrow starts right of the middle of a column and ends left of the middle, so that arrows do not touch.
            # Curved arrows have different heights, so that they do not overlap.
            start, end, y = self.middle(source) + 4, self.middle(destination) - 4, self.at(source, row)[1] - 2
            top = y - self.room * (0.5 + 0.4 * (distance + source) / self.size)
            path = f"M{start:g},{y:g} C{start:g},{top:g} {end:g},{top:g} {end:g},{y:g}"
        return f'<path d="{path}" class="way" marker-end="url(#tip)"/>'
