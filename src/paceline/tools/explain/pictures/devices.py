"""The scene of a step with DataParallel or DistributedDataParallel: a column for each device, a row for each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.comm.algorithms.schedule import Terms
from paceline.ddp.options.buckets import MIB
from paceline.tools.explain.pictures.cells import NARROWEST, Cells
from paceline.tools.explain.pictures.gantt import Bar, Gantt, Panel, Scale
from paceline.tools.explain.pictures.scene import Frame, Scene, box, text
from paceline.tools.explain.pictures.two_ways import MODEL, Stage, Way, assumption, both, hint, outcome

LEFT, TOP = 104.0, 24.0
"""Place of the first cell, which leaves room for the names of rows and of devices."""
ABOVE = 14.0
"""Space between two rows of cells, for the line that connects senders and receivers."""
BUS = 7.0
"""Height of that line above the cells."""
LINE, UPRIGHT = 16.0, 54.0
"""Height of a line of text with the bytes, below the cells; the latter where figures stand upright."""
BYTES_TICKS = (10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""MiB that may lie between two marks of the still's axis."""
READING = (
    "A column is a {}; in colour: whose part of the batch it is, or came from; w: weights; framed: has just come; "
    "below: MiB moved since the step began."
)
ABOUT = {
    "device": "torch.nn.DataParallel is one process with a thread for each device. In every step device 0 hands out "
    "the batch and the weights, and collects outputs and gradients.",
    "rank": "DistributedDataParallel has a process for each device, a rank, which keeps its own copy of the weights. "
    "In every step only gradients travel: the ranks average them.",
}
"""Openings of pages, by the word for a device."""


def scenes(ranks: int) -> list[Scene]:
    """Draw both ways to train."""
    ways = both(ranks)
    # One end for both axes, so that the two ways can be compared.
    most = max(max(*sent, *received) for way in ways for sent, received in [way.moved()])
    return [scene(way, most) for way in ways]


def scene(way: Way, most: float) -> Scene:
    """Draw a frame for each stage; the still has the bytes on an axis that ends at `most`."""
    cells = READING.format(way.device)
    if way.size == 1:  # the sheet shows cells, too
        reading = f"{cells} {assumption()}"
        return replace(_drawn(way, reading), small=_drawn(way, reading, is_small=True), about=ABOUT[way.device])
    reading = assumption()
    plain = replace(_drawn(way, reading), small=_drawn(way, reading, is_small=True))
    still = Gantt([_moved(way)], Scale("MiB in one step", BYTES_TICKS, 1, most / MIB))
    about = f"{ABOUT[way.device]} {cells}"
    return replace(plain, about=about, still=still.draw(), still_size=(still.width, still.height))


def _drawn(way: Way, reading: str, is_small: bool = False) -> Scene:
    board = Devices(way, is_small)
    frames = tuple(
        Frame(stage.title, stage.caption, board.draw(number), "".join(board.flights(stage)))
        for number, stage in enumerate(way.stages)
    )
    size = (board.width, board.height)
    return Scene(way.title, outcome(way), reading, *size, frames, board.cells.shared, hint=hint(way))


def _moved(way: Way) -> Panel:
    """Return a panel with the bytes that every device sends and receives in the step, stage after stage."""
    rows: list[str] = []
    bars: list[Bar] = []
    for device in range(way.size):
        for verb, moved in (
            ("sends", [one.sent for one in way.stages]),
            ("gets", [one.received for one in way.stages]),
        ):
            begin = 0.0
            for stage, nbytes in zip(way.stages, moved, strict=True):
                if nbytes[device]:
                    bars.append(_bar(len(rows), begin, begin + nbytes[device] / MIB, stage))
                    begin = bars[-1].end
            rows.append(f"{device} {verb}")
    return Panel(f"what each {way.device} sends and gets", tuple(rows), tuple(bars), _legend(way))


def _bar(row: int, begin: float, end: float, stage: Stage) -> Bar:
    # The number that a title begins with, which the stages of all buckets have in common.
    number = int(stage.title.split()[0])
    return Bar(row, begin, end, f"k{number - 1}", str(number))


def _legend(way: Way) -> tuple[str, ...]:
    titles = (stage.title.partition(":")[0] for stage in way.stages if stage.moves)
    return "in stage", *dict.fromkeys(titles)


class Devices:
    """Draws the devices of one way to train: their rows, cells and figures."""

    def __init__(self, way: Way, is_small: bool = False) -> None:
        self.way = way
        self.cells = Cells(way.size, is_small=is_small)
        self.row = self.cells.height + ABOVE
        self.is_tight = self.cells.column < NARROWEST
        """Whether columns are too narrow for a figure, which then stands upright."""
        self.line = UPRIGHT if self.is_tight else LINE
        self.below = TOP + len(way.rows) * self.row + self.line
        """Baseline of the first line of bytes."""
        self.width = LEFT + self.cells.across + 10
        self.height = self.below + self.line + 4

    def at(self, row: str, device: int) -> tuple[float, float]:
        """Return the upper left corner of a cell."""
        return LEFT + self.cells.x(device), TOP + self.way.rows.index(row) * self.row + ABOVE - 4

    def draw(self, number: int) -> str:
        """Draw the tensors that are held after stage `number`, how they came, and the bytes moved until then."""
        stage = self.way.stages[number]
        return "".join([*self._names(), *self._cells(stage), self._bus(stage), *self._bytes(number)])

    def flights(self, stage: Stage) -> Iterator[str]:
        """Draw the tensors that travel in `stage` where they start, with the distance that they have to go."""
        for source, destination, terms in stage.moves:
            distance = self.at(stage.row, destination)[0] - self.at(stage.row, source)[0]
            load = self._cell(stage.row, source, terms, came=True)
            yield f'<g class="flight" style="--dx: {distance:g}px">{load}</g>'

    def _names(self) -> Iterator[str]:
        if not self.cells.numbered:
            yield text(4, 14, self.way.device, "heading")
        for device in range(self.way.size):
            name = f"{self.way.device} {device}" if self.cells.numbered else str(device)  # many names would touch
            yield text(LEFT + self.cells.middle(device), 14, name, "heading", "middle")
        for row in self.way.rows:
            yield text(4, self.at(row, 0)[1] + self.cells.height / 2 + 4, row, "heading")

    def _cells(self, stage: Stage) -> Iterator[str]:
        arrived = {destination for _, destination, _ in stage.moves}
        for row in self.way.rows:
            for device in range(self.way.size):
                terms = stage.held.get((row, device))
                if terms is None:
                    x, y = self.at(row, device)
                    yield box(x - 1, y - 1, self.cells.width + 2, self.cells.height + 2, "ghost")
                else:
                    yield self._cell(row, device, terms, came=row == stage.row and device in arrived)

    def _cell(self, row: str, device: int, terms: Terms, came: bool) -> str:
        x, y = self.at(row, device)
        if row != MODEL:
            return self.cells.draw(x, y, terms, came=came)
        wide, high = self.cells.width + 2, self.cells.height + 2
        drawn = box(x - 1, y - 1, wide, high, "cell") + text(x + wide / 2 - 1, y + high / 2 + 3, "w", "label", "middle")
        return drawn + (box(x - 1, y - 1, wide, high, "came") if came else "")

    def _bus(self, stage: Stage) -> str:
        """Draw one line for all moves of a stage, with a tip at each receiver."""
        if not stage.moves:
            return ""
        y = self.at(stage.row, 0)[1] - 3
        ends = sorted({end for source, destination, _ in stage.moves for end in (source, destination)})
        places = {device: LEFT + self.cells.middle(device) for device in ends}
        path = f"M{places[ends[0]]:g},{y - BUS:g} H{places[ends[-1]]:g}"
        path += "".join(f" M{x:g},{y - BUS:g} V{y:g}" for x in places.values())
        arrived = sorted({destination for _, destination, _ in stage.moves})
        tips = (
            f"{places[one]:g},{y + 1:g} {places[one] - 3.5:g},{y - 5:g} {places[one] + 3.5:g},{y - 5:g}"
            for one in arrived
        )
        return f'<path d="{path}" class="way"/>' + "".join(f'<polygon points="{tip}" class="tip"/>' for tip in tips)

    def _bytes(self, number: int) -> Iterator[str]:
        for line, (name, moved) in enumerate(zip(("MiB sent", "MiB received"), self.way.moved(number), strict=True)):
            y = self.below + self.line * line
            yield text(4, y, name)
            for device, nbytes in enumerate(moved):
                x, figure = LEFT + self.cells.middle(device), f"{nbytes / MIB:,.1f}"
                if self.is_tight:
                    yield f'<g transform="translate({x + 4:g},{y:g}) rotate(-90)">{text(0, 0, figure)}</g>'
                else:
                    yield text(x, y, figure, anchor="middle")
