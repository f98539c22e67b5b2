"""Draws which rank holds which data: a column for each rank, a row for each part, and arrows for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.comm.algorithms.schedule import Terms
from paceline.tools.explain.scene import Drawing, box, text

TIP = (
    '<marker id="tip" viewBox="0 0 7 6" refX="6" refY="3" markerWidth="7" markerHeight="6" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L7,3 L0,6 Z" class="tip"/></marker>'
)
HEAD = 22.0
"""Height of the rank names."""
SLOT = 13.0
"""Width of a slot with a number in it."""


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
        rank: the word for a rank.
    """

    def __init__(self, size: int, rows: Sequence[str], is_bowed: bool = False, rank: str = "rank") -> None:
        self.size, self.rows, self.is_bowed, self.rank = size, rows, is_bowed, rank
        self.symbols = {"tip": TIP}
        self.is_numbered = size <= 8
        self.wide = max(44.0, SLOT * size) if self.is_numbered else 44.0
        self.slot = self.wide / size
        self.pitch = self.wide + 24
        self.high = 18.0 if self.is_numbered else 24.0
        self.room = 24.0 if is_bowed else 15.0
        """Height for arrows above a row."""
        self.left = 12 + 7.5 * max(map(len, (rank, *rows)))
        self.width = self.at(size, 0)[0] - 20
        self.height = self.at(0, len(rows))[1]

    def at(self, column: int, row: int) -> tuple[float, float]:
        """Return the upper left corner of a cell."""
        between = 6.0 if self.is_bowed else self.room
        return self.left + column * self.pitch, HEAD + self.room + row * (self.high + between)

    def draw(self, cells: Sequence[Sequence[Cell]], moves: Iterable[tuple[int, int, int]] = ()) -> Drawing:
        """Draw ``cells[rank][row]``, and an arrow for each (source, destination, row) in `moves`."""
        parts = [text(4, 14, self.rank, "heading")]
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
        top = 1.5 if self.is_numbered else 15.0
        for rank in sorted(set(cell.terms)):
            drawn += box(rank * self.slot, top, self.slot, self.high - top - 1.5, f"k{rank}")
            if self.is_numbered:
                drawn += text((rank + 0.5) * self.slot, baseline, str(rank), "digit", "middle")
        if not self.is_numbered:
            drawn += text(middle, 12, str(len(cell.terms)), "number", "middle")
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
