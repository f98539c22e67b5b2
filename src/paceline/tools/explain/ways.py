"""One step in two ways: DataParallel through device 0, and DistributedDataParallel between all ranks.

Each column is a device, and each row a tensor. Buckets are averaged at the times of the example in
:mod:`paceline.tools.explain.buckets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from rich.table import Table

from paceline.comm.schedules import build
from paceline.core.messages import counted
from paceline.core.tables import new_table
from paceline.ddp.buckets import MIB
from paceline.tools.explain.buckets import SIZES, example
from paceline.tools.explain.collectives import traffic
from paceline.tools.explain.drawing import Bar, Cell, Chart, Grid, Panel
from paceline.tools.explain.scene import Drawing, Frame, Scene, ms, text

IMAGES, IMAGE, CLASSES = 16, (3, 224, 224), 1000
"""Images per device, the shape of an image, and the outputs per image, all in float32."""
SLICE, OUTPUT, MODEL = 4 * IMAGES * prod(IMAGE), 4 * IMAGES * CLASSES, sum(SIZES)
"""Bytes of a device's slice of the batch, of its outputs, and of the weights."""
BATCH, WEIGHTS, OUTPUTS, LOSS, GRADIENTS = "batch", "weights", "outputs", "output grads", "gradients"
BUCKETS = tuple(f"gradients {bucket}" for bucket in range(len(SIZES)))
ABOUT = {
    "device": "torch.nn.DataParallel: one process, in which device 0 sends and collects everything in every step.",
    "rank": "DistributedDataParallel: a process for each device, with its own weights. Only gradients are exchanged.",
}
HINTS = {
    "device": "device 0: in every step, it sends all weights and receives all gradients while the others wait.",
    "rank": "the gradients: a bucket is averaged while backward fills the next, and all ranks send the same amount.",
}
READING = "Color: whose part of the batch; w: weights; framed: just arrived; below: MiB moved so far in the step."
SHAPE = " × ".join(map(str, IMAGE))
ASSUMPTION = f"An example: {MODEL / MIB:.1f} MiB of weights, {IMAGES} images of {SHAPE} for each device, in float32."
W = Cell(label="w")
Held = dict[tuple[str, int], Cell]
"""Contents of each (row, device)."""


class Move(NamedTuple):
    """A tensor that is sent from one device to another."""

    row: str
    src: int
    dst: int
    cell: Cell
    nbytes: float


class Stage(NamedTuple):
    """A part of the step: the new contents of devices, and the tensors that are sent."""

    title: str
    caption: str
    new: Held
    moves: Sequence[Move] = ()


class Way(NamedTuple):
    """A training step with one of the two wrappers. The first stage is the state before the step."""

    name: str
    device: str
    """The word for a device: ``device`` or ``rank``."""
    size: int
    rows: tuple[str, ...]
    stages: list[Stage]

    def moved(self, stages: Sequence[Stage]) -> tuple[list[float], list[float]]:
        """Return the bytes that each device sends and receives in `stages`."""
        sent, received = [0.0] * self.size, [0.0] * self.size
        for move in (move for stage in stages for move in stage.moves):
            sent[move.src] += move.nbytes
            received[move.dst] += move.nbytes
        return sent, received

    def held(self, number: int) -> Held:
        """Return what all devices hold after the stage `number`."""
        return {place: cell for stage in self.stages[: number + 1] for place, cell in stage.new.items()}


def data_parallel(size: int) -> Way:
    """Describe one step of DataParallel: one process with a thread for each device."""
    everything, rows = Cell(tuple(range(size))), (BATCH, WEIGHTS, OUTPUTS, LOSS, GRADIENTS)
    out = [Move(BATCH, 0, dst, Cell((dst,)), SLICE) for dst in range(1, size)]
    copies = [move._replace(row=WEIGHTS, cell=W, nbytes=MODEL) for move in out]
    outputs = [move._replace(row=OUTPUTS, src=move.dst, dst=0, nbytes=OUTPUT) for move in out]
    losses = [move._replace(row=LOSS, nbytes=OUTPUT) for move in out]
    sums = [move._replace(row=GRADIENTS, nbytes=MODEL) for move in outputs]
    back, gradients = mib(OUTPUT), f"{mib(MODEL)} from each"
    thrown_away: Held = {(row, device): Cell() for row in rows for device in range(size)}
    end = {**thrown_away, (WEIGHTS, 0): W, (GRADIENTS, 0): everything}
    stages = [
        Stage("start", "device 0 has the batch and the weights", {(BATCH, 0): everything, (WEIGHTS, 0): W}),
        Stage("1 scatter", f"each other device gets its slice, {mib(SLICE)}", _each(BATCH, size), out),
        Stage("2 replicate", f"each other device gets all weights, {mib(MODEL)}", _each(WEIGHTS, size, W), copies),
        Stage("3 forward", "a thread for each device", _each(OUTPUTS, size)),
        Stage("4 gather", f"device 0 gets all outputs, {back} from each", {(OUTPUTS, 0): everything}, outputs),
        Stage("5 loss", f"device 0 computes the loss, and sends {back} back to each", _each(LOSS, size), losses),
        Stage("6 backward", "a replica on each device", _each(GRADIENTS, size)),
        Stage("7 reduce", f"device 0 adds up all gradients, {gradients}", {(GRADIENTS, 0): everything}, sums),
        Stage("8 optimizer", "device 0 steps alone; the replicas are discarded", end),
    ]
    return Way("DataParallel", "device", size, rows, stages)


def distributed(size: int) -> Way:
    """Describe one step of DistributedDataParallel: a process for each device."""
    times, per_tensor = example(size)[1], traffic(build("ring_all_reduce", size))[0][0]
    everything = Cell(tuple(range(size)))
    stages = [
        Stage("start", "every rank has had the weights since wrapping the model", _each(WEIGHTS, size, W)),
        Stage("1 data", "every rank reads its own slice", _each(BATCH, size)),
        Stage("2 forward", "every rank keeps its outputs, and computes its own loss", _each(OUTPUTS, size)),
    ]
    for bucket, (row, nbytes, end) in enumerate(zip(BUCKETS, SIZES, times.end, strict=True)):
        new = _each(row, size, everything)
        # Buckets that have filled up in the meantime still hold each rank's own gradients.
        for later, full in list(enumerate(times.full))[bucket + 1 :]:
            new |= _each(BUCKETS[later], size) if full <= end else {}
        sent = nbytes * per_tensor
        moves = [Move(row, rank, (rank + 1) % size, Cell((rank,)), sent) for rank in range(size) if size > 1]
        going = "backward continues" if end < times.full[-1] else "backward has ended"
        told = f"averaged after {ms(end)}: {mib(nbytes)}, for which each rank sends {mib(sent)}; {going}"
        stages.append(Stage(f"3 backward: bucket {bucket}", told, new, moves))
    stages.append(Stage("4 optimizer", "every rank steps with the same gradients", {}))
    return Way("DistributedDataParallel", "rank", size, (BATCH, WEIGHTS, OUTPUTS, *BUCKETS), stages)


def _each(row: str, size: int, cell: Cell | None = None) -> Held:
    """Return a row with `cell` on every device, by default the device's own part."""
    return {(row, device): cell or Cell((device,)) for device in range(size)}


def mib(nbytes: float) -> str:
    """Return a size as ``25.0 MiB``."""
    return f"{nbytes / MIB:,.1f} MiB"


def outcome(way: Way) -> str:
    """Describe the traffic of a step."""
    if way.size == 1:
        return f"One {way.device} has nothing to send."
    sent, received = way.moved(way.stages)
    if way.device == "rank":
        return f"Each rank sends and receives {mib(sent[0])}: less than twice the gradients, on any number of ranks."
    others = f"each other device sends {mib(sent[1])} and receives {mib(received[1])}"
    return f"Device 0 sends {mib(sent[0])} and receives {mib(received[0])}, and more with every added device; {others}."


def scenes(ranks: int) -> list[Scene]:
    """Draw a step of DataParallel and a step of DistributedDataParallel."""
    ways = (data_parallel(ranks), distributed(ranks))
    # Both axes end at the same value, so that the two ways can be compared.
    largest = max(max(*sent, *received) for sent, received in (way.moved(way.stages) for way in ways))
    return [_scene(way, largest / MIB) for way in ways]


def _scene(way: Way, largest: float) -> Scene:
    grid, result = Grid(way.size, way.rows, rank=way.device), outcome(way)
    title = f"{way.name}, {counted(way.size, way.device)}"
    frames = [_frame(grid, way, number) for number in range(len(way.stages))]
    about = f"{ABOUT[way.device]} {READING}"
    hint, still = result, list[Frame]()
    if way.size > 1:
        hint, still = HINTS[way.device], Chart([_panel(way)], "MiB in one step", largest, unit=1).still()
    return Scene(title, about, result, ASSUMPTION, hint, frames, still, _table(way, title), grid.symbols)


def _frame(grid: Grid, way: Way, number: int) -> Frame:
    """Draw the contents after a stage, its messages, and the bytes moved so far in the step."""
    stage, held = way.stages[number], way.held(number)
    arrived = {(move.row, move.dst) for move in stage.moves}
    places = [[(row, device) for row in way.rows] for device in range(way.size)]
    cells = [[held.get(place, Cell())._replace(came=place in arrived) for place in column] for column in places]
    moves = [(move.src, move.dst, way.rows.index(move.row)) for move in stage.moves]
    notes = ""
    for line, moved in enumerate(way.moved(way.stages[: number + 1])):
        y = grid.height + 4 + 16 * line
        notes += text(4, y, ("MiB sent", "MiB received")[line])
        for device, nbytes in enumerate(moved):
            notes += text(grid.middle(device), y, f"{nbytes / MIB:,.1f}", anchor="middle")
    drawing = Drawing(grid.draw(cells, moves).svg + notes, grid.width, grid.height + 30)
    flights = [
        grid.flight(move.cell, (move.src, row), (move.dst, row))
        for move, (_, _, row) in zip(stage.moves, moves, strict=True)
    ]
    return Frame(stage.title, stage.caption, drawing, "".join(flights))


def _panel(way: Way) -> Panel:
    """Return a panel with the bytes that every device sends and receives in each stage."""
    stages = [stage for stage in way.stages if stage.moves]
    bars: list[Bar] = []
    rows = [(device, direction) for device in range(way.size) for direction in (0, 1)]
    for row, (device, direction) in enumerate(rows):
        begin = 0.0
        for stage in stages:
            end = begin + way.moved([stage])[direction][device] / MIB
            # The title begins with the number of the stage, which is the same for all buckets.
            bars.append(Bar(row, begin, end, f"k{int(stage.title[0]) - 1}", stage.title[0]))
            begin = end
    names = [f"{device} {('sends', 'gets')[direction]}" for device, direction in rows]
    titles = dict.fromkeys(stage.title.partition(":")[0] for stage in stages)
    return Panel(f"what each {way.device} sends and gets", names, bars, ("in stage", *titles))


def _table(way: Way, title: str) -> Table:
    """Show the bytes of device 0 and of any other device in each stage."""
    devices = [f"{way.device} 0", f"each other {way.device}"][: way.size]
    columns = [f"{device} {verb}" for device in devices for verb in ("sends", "receives")]
    caption = f"{outcome(way)} {ASSUMPTION} All in MiB."
    table = new_table(["stage", *columns], title=title, caption=caption, words=["stage"], wraps=columns)
    for name, stages in (*((stage.title, [stage]) for stage in way.stages[1:]), ("in total", way.stages)):
        sent, received = way.moved(stages)
        cells = [part for device in range(len(devices)) for part in (sent[device], received[device])]
        table.add_row(name, *(f"{nbytes / MIB:,.1f}" if nbytes else "–" for nbytes in cells))
    return table
