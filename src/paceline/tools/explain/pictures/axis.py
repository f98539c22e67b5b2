"""The axis below a timeline or below bars of bytes, and the cursor that stands at a moment of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.tools.explain.pictures.scene import text

BELOW = 38.0
"""Height of the axis' numbers and of its name."""


def number(seconds: float) -> str:
    """``31.8``, in milliseconds."""
    return f"{1000 * seconds:.1f}"


def ms(seconds: float) -> str:
    """``31.8 ms``."""
    return f"{1000 * seconds:.1f} ms"


@dataclass(frozen=True)
class Axis:
    """Values from 0 to `end`, from left to right: seconds, if nothing else is said."""

    left: float
    """Where 0 is."""
    wide: float
    bottom: float
    """Where the axis is; its numbers are below."""
    end: float
    tick: float
    """Between two marks."""
    name: str
    factor: float = 1000
    """The number at a mark is so many times its value."""

    def x(self, value: float) -> float:
        """Return the place of a value."""
        return self.left + self.wide * value / self.end

    def draw(self) -> Iterator[str]:
        """Draw the line, its marks and numbers, and the name."""
        yield f'<path d="M{self.left:g},{self.bottom:g} H{self.left + self.wide:g}" class="axis"/>'
        for mark in range(int(self.end / self.tick + 1e-9) + 1):
            x = self.x(mark * self.tick)
            yield f'<path d="M{x:g},{self.bottom:g} v5" class="axis"/>'
            yield text(x, self.bottom + 18, f"{self.factor * mark * self.tick:g}", anchor="middle")
        yield text(self.left + self.wide / 2, self.bottom + 34, self.name, anchor="middle")

    def cursor(
        self, moment: float, stretches: Sequence[tuple[float, float]], numbers: Iterable[tuple[float, float]]
    ) -> str:
        """Draw a line at `moment`, with its time above.

        Args:
            moment: where it is.
            stretches: the parts of the height, from top to bottom, that it goes through.
            numbers: places of the numbers that it leaves room for where it would meet them.
        """
        x = self.x(moment)
        met = sorted({y for middle, y in numbers if abs(middle - x) < 7})
        pieces = []
        for top, bottom in stretches:
            inside = [edge for y in met if top < y < bottom + 3 for edge in (y - 11, y + 3)]
            edges = [top, *inside, bottom]
            pieces += [piece for piece in zip(edges[::2], edges[1::2], strict=True) if piece[1] > piece[0]]
        path = " ".join(f"M{x:g},{above:g} V{below:g}" for above, below in pieces)
        return f'<path d="{path}" class="now"/>' + text(x, 10, ms(moment), "heading", "middle")
