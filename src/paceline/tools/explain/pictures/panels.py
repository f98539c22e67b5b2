"""The scenes of the collectives: a panel each for before, during and after, with the ranks as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.comm.algorithms import Step
from paceline.core.output.wording import counted
from paceline.ddp.options.buckets import CAPACITY, MIB
from paceline.tools.explain.pictures.cells import SMALL_NUMBERED, Cells
from paceline.tools.explain.pictures.collectives import Collective, Part, State, collectives, outcome, states, words
from paceline.tools.explain.pictures.ring_exchange import chunk_name, free_lanes, message
from paceline.tools.explain.pictures.scene import Frame, Scene, box, text
from paceline.tools.explain.pictures.timeline import BANDWIDTH, LATENCY

LEFT, BETWEEN, BELOW = 50.0, 22.0, 6.0
"""Room for the names of rows, between two panels, and between two rows."""
NAMES, WAYS, LANE = 32.0, 20.0, 6.0
"""Baseline of the ranks' names, least height of the arrows below it, and space between two arrows."""
SIDE = 4.0
"""Distance of an arrow's ends from the middle of a rank: it leaves on the right and arrives on the left."""
SPELLED_OUT = 8
"""With more ranks a cell has room for one number or letter."""


def assumption() -> str:
    """Describe the example's numbers."""
    link = f"{8 * BANDWIDTH / 1e9:g} Gbit/s and {1e6 * LATENCY:g} µs a message"
    return f"All rows of a rank together are {CAPACITY // MIB} MiB; links have {link}."


def reading(size: int) -> str:
    """Say how to read the pictures."""
    sums = "the number of ranks in the sum" if size > SMALL_NUMBERED else "the ranks in the sum"
    return (
        "A column is a rank, a row a part of its tensor. Filled with one colour: a copy of one rank's part, with its "
        f"number. In slots, one colour for each rank: {sums}. Framed: has just come. Dashed: no data. {assumption()}"
    )


def scenes(size: int) -> list[Scene]:
    """Draw all six, for a large and a small window."""
    found: list[Scene] = []
    for collective in collectives(size):
        # Once for all of them, because it is the same.
        how = "" if found else reading(size)
        large, small = (replace(_drawn(collective, is_small), reading=how) for is_small in (False, True))
        found.append(replace(large, small=small, about=collective.about))
    return found


def _drawn(collective: Collective, is_small: bool) -> Scene:
    panels = Panels(collective, is_small)
    found, steps = states(collective), collective.schedule.steps
    frames = [Frame("before", "every rank holds what it gives", panels.draw(found, 0, False))]
    for number, step in enumerate(steps, start=1):
        title = f"step {number} of {len(steps)}"
        flights = "".join(panels.flights(step, found[number - 1]))
        frames.append(Frame(title, _messages(collective, step), panels.draw(found, number, False), flights))
    finished = panels.draw(found, collective.middle, True)
    frames.append(Frame("after", collective.after, finished))
    title = f"{collective.name}, {counted(collective.schedule.size, 'rank')}"
    size = (panels.width, panels.height)
    return Scene(
        title, outcome(collective), "", *size, tuple(frames), panels.shared, still=finished, hint=collective.hint
    )


def _messages(collective: Collective, step: Step) -> str:
    if collective.is_exchange:
        return ", ".join(f"{one.src}→{one.dst} {chunk_name(one.dst)}{one.src}" for one in step)
    return ", ".join(message(collective.schedule, one) for one in step)


class Panels:
    """Draws the three panels of a collective: beside each other, or one below the other in a small window."""

    def __init__(self, collective: Collective, is_small: bool) -> None:
        self.collective, self.size = collective, collective.schedule.size
        self.cells = Cells(self.size, is_small=True)
        self.drawings: dict[str, str] = {}
        """Cells of copies and whole states, which are the same in many frames, by the name that drawings refer to."""
        deepest = max((lane for step in collective.schedule.steps for _, lane in free_lanes(step)), default=0)
        self.top = NAMES + WAYS + LANE * deepest
        """Place of the first row in a panel."""
        self.row = self.cells.height + BELOW
        wide, high = LEFT + self.cells.across + 4, self.top + collective.rows * self.row
        self.places = [
            (0.0, (high + BETWEEN) * panel) if is_small else ((wide + BETWEEN) * panel, 0.0) for panel in range(3)
        ]
        self.width, self.height = self.places[-1][0] + wide, self.places[-1][1] + high

    @property
    def shared(self) -> dict[str, str]:
        """Return everything that drawings refer to."""
        return {**self.cells.shared, **self.drawings}

    def draw(self, found: Sequence[State], number: int, is_finished: bool) -> str:
        """Draw the start, the state after step `number`, and if it is finished the end."""
        steps = self.collective.schedule.steps
        during = f"during: step {number} of {len(steps)}" if number else "during"
        empty: State = [[None] * self.collective.rows for _ in range(self.size)]
        drawn = [self._panel(0, "before", found[0], "for", "start")]
        drawn += [self._panel(1, during, found[number], "with", str(number)), *self._ways(number)]
        # Without frames: all of it came, in one step or another.
        end = [[part and part._replace(came=False) for part in parts] for parts in found[-1]]
        drawn.append(self._panel(2, "after", end if is_finished else empty, "from", "end" if is_finished else "none"))
        return "".join(drawn)

    def flights(self, step: Step, before: State) -> Iterator[str]:
        """Draw the loads of `step` where they start, with the distance that they have to go."""
        for one in step:
            for chunk in one.chunks:
                source, destination = (one.dst, one.src) if self.collective.is_exchange else (chunk, chunk)
                (x, y), (end, below) = self.at(1, one.src, source), self.at(1, one.dst, destination)
                part = before[one.src][source]
                assert part is not None  # what travels is needed
                way = f"--dx: {end - x:g}px; --dy: {below - y:g}px"
                yield f'<g class="flight" style="{way}">{self._cell(x, y, part._replace(came=True))}</g>'

    def at(self, panel: int, rank: int, row: int) -> tuple[float, float]:
        """Return the upper left corner of a cell."""
        left, top = self.places[panel]
        return left + LEFT + self.cells.x(rank), top + self.top + row * self.row

    def _panel(self, panel: int, heading: str, state: State, preposition: str, name: str) -> str:
        left, top = self.places[panel]
        name = f"{self.collective.name}-{name}"
        if name not in self.drawings:
            cells = (
                self._cell(LEFT + self.cells.x(rank), self.top + row * self.row, part)
                for rank, parts in enumerate(state)
                for row, part in enumerate(parts)
            )
            self.drawings[name] = f'<g id="{name}">{"".join(cells)}</g>'
        drawn = [text(left + LEFT, top + 12, heading, "heading"), f'<use href="#{name}" x="{left:g}" y="{top:g}"/>']
        drawn.append(text(left + 3, top + NAMES, "rank"))
        for rank in range(self.size):
            drawn.append(text(left + LEFT + self.cells.middle(rank), top + NAMES, str(rank), "label", "middle"))
        for row in range(self.collective.rows if self.collective.rows > 1 else 0):
            y = top + self.top + row * self.row + self.cells.height / 2 + 4
            drawn.append(text(left + 3, y, f"{preposition} {row}" if self.collective.is_exchange else chunk_name(row)))
        return "".join(drawn)

    def _cell(self, x: float, y: float, part: Part | None) -> str:
        wide, high = self.cells.width, self.cells.height
        if part is None:
            return box(x - 1, y - 1, wide + 2, high + 2, "ghost")
        if self.collective.schedule.result in ("reduce", "all-reduce", "reduce-scatter"):
            return self.cells.draw(x, y, part.terms, came=part.came)
        [rank] = part.terms
        label = words(self.collective, part)
        if self.size > SPELLED_OUT:
            label = chunk_name(part.chunk) if self.collective.is_exchange else str(rank)
        name = f"copy-{rank}-{label}"
        if name not in self.drawings:
            middle = text(wide / 2, high / 2 + 3.5, label, "digit", "middle")
            self.drawings[name] = f'<g id="{name}">{box(-1, -1, wide + 2, high + 2, f"k{rank}")}{middle}</g>'
        frame = box(x - 1, y - 1, wide + 2, high + 2, "came") if part.came else ""
        return f'<use href="#{name}" x="{x:g}" y="{y:g}"/>{frame}'

    def _ways(self, number: int) -> Iterator[str]:
        """Draw an arrow for each message of a step, from rank to rank, above the rows."""
        left, top = self.places[1]
        base = top + self.top - 4
        for one, lane in free_lanes(self.collective.schedule.steps[number - 1]) if number else ():
            start, end = (left + LEFT + self.cells.middle(rank) for rank in (one.src, one.dst))
            start, end, y = start + SIDE, end - SIDE, base - 7 - LANE * lane
            point = f"{end:g},{base + 1:g} {end - 3:g},{base - 4:g} {end + 3:g},{base - 4:g}"
            yield f'<path d="M{start:g},{base:g} V{y:g} H{end:g} V{base - 3:g}" class="way"/>'
            yield f'<polygon points="{point}" class="tip"/>'
