"""Cells: boxes for tensors, with a slot for every rank, which is filled where that rank's contribution is in them."""

from __future__ import annotations

from paceline.comm.algorithms.schedule import Terms
from paceline.tools.explain.pictures.scene import box, text

CELL, TALL_CELL = 18.0, 24.0
"""Heights of a cell: with a number in each slot, and with a band of slots below one number."""
BAND = 8.0
"""Height of the band in a tall cell."""
NUMBERED = 8
"""Ranks that may be in a picture whose slots have a number each."""
GAP, NARROW_GAP = 34.0, 24.0
"""Space between two ranks; the narrow one where they are many, so that 16 of them fit a window of 1200 pixels."""
NARROWEST = 44.0
"""Least width of a rank's column, which has the rank's name above it."""
SMALL_NUMBERED = 4
"""The same as NUMBERED in a picture for a small window."""
SMALL_GAP = 24.0
"""Space between two ranks there."""
SMALL_BANDS = {8: (22.0, 16.0), 16: (14.0, 8.0)}
"""Width of a cell, and space between two, where there are up to so many ranks in a small window."""


class Cells:
    """The look of cells, and where columns of them are."""

    def __init__(self, size: int, is_small: bool = False) -> None:
        """Prepare cells for `size` ranks."""
        self.size, self.is_small = size, is_small
        self.shared: dict[str, str] = {}
        """Looks of cells, by the name that drawings refer to."""
        self.numbered = size <= (SMALL_NUMBERED if is_small else NUMBERED)
        self.slot, self.height, self.gap = (13.0, CELL, GAP) if self.numbered else (2.75, TALL_CELL, NARROW_GAP)
        self.column = max(NARROWEST, size * self.slot)
        if is_small and self.numbered:
            self.gap = SMALL_GAP
        elif is_small:
            self.column, self.gap = next(shape for most, shape in SMALL_BANDS.items() if size <= most)
            self.slot = self.column / size
        self.width = size * self.slot
        self.across = size * (self.column + self.gap) - self.gap
        """Width of all columns."""

    def x(self, rank: int) -> float:
        """Return the left edge of a rank's cells, from that of the first column on."""
        return rank * (self.column + self.gap) + (self.column - self.width) / 2

    def middle(self, rank: int) -> float:
        """Return the middle of a rank's column."""
        return rank * (self.column + self.gap) + self.column / 2

    def draw(self, x: float, y: float, terms: Terms, needed: bool = True, came: bool = False) -> str:
        """Draw a cell with its upper left corner at `x`, `y`: pale if it is not `needed`, framed if it just `came`."""
        # The large and the small picture are on one page, where a name stands for one drawing.
        name = f"{'s' if self.is_small else 'c'}{self.size}-{'.'.join(map(str, terms))}"
        if name not in self.shared:
            # Drawn once and referred to: a page of many frames repeats the same cells, and would be megabytes.
            self.shared[name] = f'<g id="{name}">{self._sum(terms)}</g>'
        frame = box(x - 1, y - 1, self.width + 2, self.height + 2, "came") if came else ""
        return f'<use href="#{name}" x="{x:g}" y="{y:g}" class="{"held" if needed else "idle"}"/>{frame}'

    def _sum(self, terms: Terms) -> str:
        parts = [box(-1, -1, self.width + 2, self.height + 2, "cell")]
        top, high = (0.5, self.height - 1) if self.numbered else (self.height - BAND, BAND - 0.5)
        for other in sorted(set(terms)):
            left = other * self.slot
            inset = 0.5 if self.numbered else 0.0  # a band is not striped
            parts.append(box(left + inset, top, self.slot - 2 * inset, high, f"k{other}"))
            if self.numbered:
                parts.append(text(left + self.slot / 2, 12.5, str(other), "digit", "middle"))
        if not self.numbered:
            parts.append(text(self.width / 2, 12, str(len(terms)), "number" if self.is_small else "label", "middle"))
        return "".join(parts)
