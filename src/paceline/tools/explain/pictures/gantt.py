"""Gantt charts of ranks: a row for each and one for the network, bars for their work, lines where all meet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.tools.explain.pictures.scene import Frame, Scene, box, ms, text

AXIS_HEIGHT = 38.0
"""Height of the axis' numbers and of its name, which are below it."""


@dataclass(frozen=True)
class Axis:
    """Values from 0 to `end`, from left to right: seconds, if nothing else is said."""

    left: float
    """Horizontal place of 0."""
    wide: float
    bottom: float
    """Vertical place of the axis."""
    end: float
    tick: float
    """Distance between two marks, in the axis' values."""
    name: str
    factor: float = 1000
    """Number that is written at a mark, divided by the mark's value."""

    def x(self, value: float) -> float:
        """Return the place of a value."""
        return self.left + self.wide * value / self.end

    def draw(self) -> Iterator[str]:
        """Draw the line, its marks and numbers, and the name."""
        yield f'<path d="M{self.left:g},{self.bottom:g} H{self.left + self.wide:g}" class="axis"/>'
        # A little more, or rounding could leave out the last mark, at the end itself.
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
            moment: place of the line.
            stretches: the parts of the height, from top to bottom, that the line goes through.
            numbers: places of numbers; the line leaves room for those that it would meet.
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


LEFT, WIDE, RESULTS = 80.0, 720.0, 170.0
"""Place of 0, beyond the names of rows; the length of the axis; and room for the results beyond its end."""
SMALL_LEFT, SMALL_WIDE, SMALL_RIGHT = 76.0, 244.0, 40.0
"""The same where results stand above the rows, and room for half of the cursor's time beyond the axis' end."""
RESULT_LINE = 16.0
"""Height of the results above the rows."""
TOP = 18.0
"""Height above the first panel, for the cursor's time."""
HEAD = 20.0
"""Height of a panel's heading."""
MARKS = 16.0
"""Height of the letters of a panel's meetings, above its rows."""
ROW, LOW_ROW = 20.0, 15.0
"""Height of a row; the low one where there are many."""
BETWEEN = 12.0
"""Space between two panels."""
MANY = 8
"""Most rows of full height; more of them are low."""
NARROW = 14.0
"""Least width of a bar with a label in it; for a narrower one, the row's other bars or the summary tell."""
BESIDE = 5.0
"""Space between a narrow bar and the middle of its label."""
FEWEST_TICKS = 4
"""Fewest marks of an axis, if its scale has ticks that are fine enough."""

BUBBLE, COMMUNICATION, NETWORK = "bubble", "wait", "cell"
"""Kinds of bars beside a stage's colour: waiting for a rank, waiting for the network, and the network's own work."""
LATER = (("ghost", "later than the red line"),)
WAITING = (
    (BUBBLE, "bubble: waiting for the last rank"),
    (COMMUNICATION, "waiting for the network"),
    (NETWORK, "the network sums buckets"),
)
"""Parts of legends."""


@dataclass(frozen=True)
class Scale:
    """The axis of a chart."""

    name: str
    ticks: tuple[float, ...]
    """Distances that may be between two marks, the finest first."""
    factor: float
    """Number that is written at a mark, divided by the mark's value."""
    end: float | None = None
    """Last value; None for that of the bars."""


STEP_TIME = Scale("time since the step began (ms)", (0.02, 0.05, 0.1, 0.2, 0.5), 1000)


@dataclass(frozen=True)
class Bar:
    """A stretch of one row."""

    row: int
    begin: float
    end: float
    kind: str
    """Class of its style: ``k0``, ``k1``, … for a stage, or one of the kinds above."""
    label: str = ""
    is_always_labelled: bool = False
    """Whether a bar that is too narrow for its label has it at its left."""


@dataclass(frozen=True)
class Mark:
    """A moment at which all ranks meet, drawn through all of them."""

    at: float
    letter: str
    elsewhere: bool = False
    """Whether it is not part of this step, and dashed."""


@dataclass(frozen=True)
class Panel:
    """The timeline of one case."""

    title: str
    rows: tuple[str, ...]
    bars: tuple[Bar, ...]
    results: tuple[str, ...] = ()
    """Lines of text beside the panel, once its last bar has ended."""
    marks: tuple[Mark, ...] = ()

    @property
    def end(self) -> float:
        """Return when the last bar ends."""
        return max((bar.end for bar in self.bars), default=0.0)


class Gantt:
    """Panels one below the other, above one axis."""

    def __init__(self, panels: Sequence[Panel], scale: Scale = STEP_TIME, is_small: bool = False) -> None:
        self.panels, self.is_small = tuple(panels), is_small
        # All panels have rows of one height, so that they can be compared.
        self.row = ROW if max(len(panel.rows) for panel in panels) <= MANY else LOW_ROW
        self.tops: list[float] = []
        """Place of each panel's first row."""
        y = TOP
        for panel in panels:
            self.tops.append(y + HEAD + self._above(panel))
            y = self.tops[-1] + len(panel.rows) * self.row + BETWEEN
        end = scale.end or max(panel.end for panel in panels)
        tick = max(one for one in scale.ticks if one == scale.ticks[0] or end / one >= FEWEST_TICKS)
        left, wide, right = (SMALL_LEFT, SMALL_WIDE, SMALL_RIGHT) if is_small else (LEFT, WIDE, RESULTS)
        self.axis = Axis(left, wide, y - 6, end, tick, scale.name, scale.factor)
        self.width, self.height = left + wide + right, y - 6 + AXIS_HEIGHT

    def draw(self, moment: float = math.inf) -> str:
        """Draw everything up to `moment`; later parts are dashed."""
        parts = list(self.axis.draw())
        for panel, top in zip(self.panels, self.tops, strict=True):
            parts += self._panel(panel, top, moment)
        return "".join(parts)

    def frames(self, events: Mapping[float, Sequence[str]]) -> tuple[Frame, ...]:
        """Draw a frame for each moment, in seconds, at which something happens."""
        return tuple(
            Frame(f"after {ms(moment)}", "; ".join(happening), self.draw(moment) + self.cursor(moment))
            for moment, happening in sorted(events.items())
        )

    def cursor(self, moment: float) -> str:
        """Draw a line at `moment` through the rows, which leaves room for the labels of bars."""
        stretches = [(top, top + len(panel.rows) * self.row) for panel, top in zip(self.panels, self.tops, strict=True)]
        return self.axis.cursor(moment, stretches, [place for place, _ in self._labels()])

    def _above(self, panel: Panel) -> float:
        """Return the height between a panel's heading and its first row."""
        return (MARKS if panel.marks else 0.0) + (RESULT_LINE if self.is_small and panel.results else 0.0)

    def _panel(self, panel: Panel, top: float, moment: float) -> Iterator[str]:
        heading = top - 6 - self._above(panel)
        yield text(4, heading, panel.title, "heading")
        for number, name in enumerate(panel.rows):
            yield text(4, top + number * self.row + self.row / 2 + 4, name)
        for bar in panel.bars:
            yield self._bar(bar, top, moment)
        for mark in panel.marks:
            yield self._mark(mark, panel, top)
        if moment >= panel.end and self.is_small:
            yield text(4, heading + RESULT_LINE, ", ".join(panel.results))
        elif moment >= panel.end:
            for number, line in enumerate(panel.results):
                kind = "label" if number else "heading"
                yield text(LEFT + WIDE + 12, top + 14 + 17 * number, line, kind)

    def _bar(self, bar: Bar, top: float, moment: float) -> str:
        x, y, high = self.axis.x(bar.begin), top + bar.row * self.row + 1, self.row - 3
        width = self.axis.x(bar.end) - x
        done = max(0.0, min(width, self.axis.x(moment) - x))
        drawn = box(x, y, width, high, "ghost") if done < width else ""
        drawn += box(x, y, done, high, bar.kind) if done else ""
        if self._is_labelled(bar):
            is_dark = done > width / 2 and width >= NARROW and bar.kind != NETWORK  # on a filled bar
            drawn += text(*self._middle(bar, top), bar.label, "digit" if is_dark else "number", "middle")
        return drawn

    def _mark(self, mark: Mark, panel: Panel, top: float) -> str:
        x = self.axis.x(mark.at)
        kind = "elsewhere" if mark.elsewhere else "way"
        bottom = top + (len(panel.rows) - 1) * self.row  # the network has its own bars
        line = f'<path d="M{x:g},{top - 3:g} V{bottom:g}" class="{kind}"/>'
        return line + text(x, top - 6, mark.letter, "heading", "middle")

    def _is_labelled(self, bar: Bar) -> bool:
        return bool(bar.label) and (bar.is_always_labelled or not self._is_narrow(bar))

    def _is_narrow(self, bar: Bar) -> bool:
        return self.axis.x(bar.end) - self.axis.x(bar.begin) < NARROW

    def _middle(self, bar: Bar, top: float) -> tuple[float, float]:
        x = self.axis.x(bar.begin) - BESIDE if self._is_narrow(bar) else self.axis.x((bar.begin + bar.end) / 2)
        return x, top + bar.row * self.row + self.row / 2 + 3

    def _labels(self) -> Iterator[tuple[tuple[float, float], str]]:
        """Yield the place and the words of every label in a bar."""
        for panel, top in zip(self.panels, self.tops, strict=True):
            for bar in panel.bars:
                if self._is_labelled(bar):
                    yield self._middle(bar, top), bar.label


def charted(
    plain: Scene, panels: Sequence[Panel], events: Mapping[float, Sequence[str]], scale: Scale = STEP_TIME
) -> Scene:
    """Return `plain` with a chart of `panels`, a frame for each moment of `events`, and the same for a small window."""

    def drawn(is_small: bool) -> Scene:
        chart = Gantt(panels, scale, is_small)
        frames, still = chart.frames(events), chart.draw()
        return replace(plain, width=chart.width, height=chart.height, frames=frames, still=still)

    return replace(drawn(False), small=drawn(True))
