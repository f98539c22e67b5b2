"""Timelines: a row for each rank and for the network, bars for their work, and lines where all ranks synchronize."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    marks: Sequence[tuple[float, str, str]] = ()
    """Synchronizations of all ranks: time, letter and class of the line, ``way`` or ``elsewhere`` (dashed)."""


class Chart:
    """Panels stacked above one axis.

    Args:
        panels: the cases, from top to bottom.
        axis: name of the axis.
        end: last value on the axis; by default the end of the last bar.
        unit: the value that the axis labels 1.
    """

    def __init__(self, panels: Sequence[Panel], axis: str, end: float = 0.0, unit: float = 1e-3) -> None:
        self.panels, self.axis, self.unit = panels, axis, unit
        self.end = end or max(bar.end for panel in panels for bar in panel.bars)
        self.tops: list[float] = []
        """Vertical position of each panel's first row."""
        self.bottom = 12.0
        for panel in panels:
            self.tops.append(self.bottom + (38 if panel.marks else 24))
            self.bottom = self.tops[-1] + len(panel.rows) * ROW + 8

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
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
        end = self.end / self.unit
        tick = max(step for power in range(6) for step in (10**power, 2 * 10**power, 5 * 10**power) if end >= 4 * step)
        for number in range(0, int(end + 1e-9) + 1, tick):
            x = self.x(number * self.unit)
            yield f'<path d="M{x:g},{self.bottom:g} v5" class="axis"/>'
            yield text(x, self.bottom + 18, str(number), anchor="middle")
        yield text(LEFT + WIDE / 2, self.bottom + 34, self.axis, anchor="middle")

    def _panel(self, panel: Panel, top: float, moment: float) -> Iterator[str]:
        yield text(4, top - (20 if panel.marks else 6), panel.title, "heading")
        for number, name in enumerate(panel.rows):
            yield text(4, top + number * ROW + 13, name)
        for bar in panel.bars:
            yield self._bar(bar, top + bar.row * ROW, moment)
        for at, letter, kind in panel.marks:
            # The line skips the last row, which is the network's.
            yield f'<path d="M{self.x(at):g},{top - 3:g} v{(len(panel.rows) - 1) * ROW + 3:g}" class="{kind}"/>'
            yield text(self.x(at), top - 6, letter, "heading", "middle")
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
