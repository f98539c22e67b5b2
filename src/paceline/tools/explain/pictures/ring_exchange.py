"""The scene of an algorithm's schedule: the contents of every rank after each step, found by running it.

A rank is a column and a chunk is a row. A cell has a slot for every rank, filled where that rank's contribution is in
the sum. Where there are too many ranks for a number in each slot, the slots are a band below a number for all of them.
Pale cells are those that the result does not depend on.
"""

from __future__ import annotations

from dataclasses import replace
from string import ascii_uppercase

from paceline.comm.algorithms import Schedule, Step, Transfer, holdings
from paceline.comm.algorithms.schedule import Terms
from paceline.core.output.wording import counted
from paceline.tools.explain.pictures.cells import NARROWEST, Cells
from paceline.tools.explain.pictures.scene import Frame, Scene, text

LEFT, TOP = 22.0, 24.0
LANE = 5.0
"""Space between two arrows that run above a cell on their way to another one."""
ARROW, TIGHT_ARROW = (2.0, 5.0, 6.0), (1.0, 1.5, 4.0)
"""Space between an arrow and its cells, its stretch beside a cell, and its point; the latter for little space."""
TIGHT = 16.0
"""Space between two ranks below which arrows are tight."""


ABOUT = "After an all-reduce every rank holds the sum of all ranks' tensors. Training averages gradients with it."
"""Opening of pages."""


def scene(schedule: Schedule) -> Scene:
    """Draw `schedule`, for up to 16 ranks, and the same for a small window."""
    return replace(_drawn(schedule), small=_drawn(schedule, is_small=True), about=ABOUT)


def _drawn(schedule: Schedule, is_small: bool = False) -> Scene:
    board = Board(schedule, is_small)
    held, needed = holdings(schedule), used_later(schedule)
    frames = [Frame("start", "every rank holds its own tensor", board.draw(held[0], needed[0]))]
    for number, step in enumerate(schedule.steps, start=1):
        drawing = board.draw(held[number], needed[number], step)
        moving = "".join(board.flight(transfer, held[number - 1]) for transfer in step)
        title = f"step {number} of {len(schedule.steps)}: {verb(step)}"
        caption = ", ".join(message(schedule, transfer) for transfer in step)
        frames.append(Frame(title, caption, drawing, moving))
    return Scene(
        title_of(schedule),
        cost(schedule),
        reading(board.cells.numbered),
        board.width,
        board.height,
        tuple(frames),
        board.cells.shared,
        hint=hint(schedule),
    )


def reading(numbered: bool) -> str:
    """Say how to read the picture, in which slots are `numbered` or not."""
    number = "that rank's part is in the sum" if numbered else "how many ranks' parts are in the sum; coloured: whose"
    return f"A column is a rank, a row a chunk. A number in a cell: {number}. Framed: has just come. Pale: not needed."


def title_of(schedule: Schedule) -> str:
    """Return such as ``halving-doubling all-reduce, 4 ranks``."""
    algorithm = schedule.name.removesuffix("_" + schedule.result.replace("-", "_")).replace("_", "-")
    return f"{algorithm} {schedule.result}, {counted(schedule.size, 'rank')}"


def message(schedule: Schedule, transfer: Transfer) -> str:
    """Return such as ``0→1 A–C``, or ``0→1`` where there is one chunk only."""
    ranks = f"{transfer.src}→{transfer.dst}"
    if schedule.chunks == 1:
        return ranks
    first, last = chunk_name(transfer.chunks[0]), chunk_name(transfer.chunks[-1])
    return f"{ranks} {first}" + (f"–{last}" if last != first else "")


def lanes(step: Step) -> dict[tuple[Transfer, int], int]:
    """Return, for each transfer and chunk, the lane above its row that is free all the way, counted from 0."""
    taken: dict[int, list[tuple[Transfer, int]]] = {}
    # The shortest first, so that they get the lowest lanes, and longer ones go over them.
    for transfer in sorted(step, key=lambda one: abs(one.dst - one.src)):
        for chunk in transfer.chunks:
            row = taken.setdefault(chunk, [])
            busy = {lane for other, lane in row if _cross(transfer, other)}
            row.append((transfer, next(lane for lane in range(len(row) + 1) if lane not in busy)))
    return {(transfer, chunk): lane for chunk, row in taken.items() for transfer, lane in row}


def _cross(one: Transfer, other: Transfer) -> bool:
    if 1 in (abs(one.dst - one.src), abs(other.dst - other.src)):  # neighbours need no lane
        return False
    return max(min(one.src, one.dst), min(other.src, other.dst)) <= min(
        max(one.src, one.dst), max(other.src, other.dst)
    )


def free_lanes(step: Step) -> list[tuple[Transfer, int]]:
    """Return the messages of `step`, each with the lowest lane that is free all the way from rank to rank."""
    taken: list[tuple[float, float, int]] = []
    found = []
    # The shortest first, as in lanes().
    for one in sorted(step, key=lambda one: abs(one.dst - one.src)):
        # A message leaves on the right of its rank and arrives on the left, so those that meet at a rank do not touch.
        low, high = sorted((one.src + 0.1, one.dst - 0.1))
        busy = {lane for first, last, lane in taken if first < high and low < last}
        lane = next(lane for lane in range(len(step)) if lane not in busy)
        taken.append((low, high, lane))
        found.append((one, lane))
    return found


def chunk_name(chunk: int) -> str:
    """Return a chunk's letter."""
    return ascii_uppercase[chunk]


def verb(step: Step) -> str:
    """Return a verb for the receivers' part in `step`."""
    kinds = {transfer.reduce for transfer in step}
    return "receivers add or copy" if len(kinds) > 1 else "receivers add" if kinds == {True} else "receivers copy"


def cost(schedule: Schedule) -> str:
    """Return the steps, and the most that a rank sends and receives, in tensors, as a sentence."""
    if not schedule.steps:
        return "One rank has nothing to send."
    sent, received = traffic(schedule)
    steps = counted(len(schedule.steps), "step")
    # Sums of parts of a tensor, in different orders: equal ones may differ in their last bits.
    if max(sent) - min(sent) < 1e-9 and max(received) - min(received) < 1e-9:
        return f"{steps}; every rank sends and receives {sent[0]:.4g} times the tensor."
    return f"{steps}; a rank sends up to {max(sent):.4g} and receives up to {max(received):.4g} times the tensor."


def traffic(schedule: Schedule) -> tuple[list[float], list[float]]:
    """Return how much each rank sends, and how much it receives, in tensors."""
    sent, received = [0.0] * schedule.size, [0.0] * schedule.size
    for transfer in (transfer for step in schedule.steps for transfer in step):
        sent[transfer.src] += len(transfer.chunks) / schedule.chunks
        received[transfer.dst] += len(transfer.chunks) / schedule.chunks
    return sent, received


def used_later(schedule: Schedule) -> list[list[list[bool]]]:
    """Return whether the result depends on a rank's part of a chunk after k steps: ``[k][rank][chunk]``."""
    now = [[_in_result(schedule, rank, chunk) for chunk in range(schedule.chunks)] for rank in range(schedule.size)]
    history = [now]
    # In two passes, because the messages of a step travel at once: what one overwrites, another may still have sent.
    for step in reversed(schedule.steps):
        before = [list(row) for row in now]
        for transfer in step:
            if not transfer.reduce:  # the copy overwrites the receiver's part
                for chunk in transfer.chunks:
                    before[transfer.dst][chunk] = False
        for transfer in step:
            for chunk in transfer.chunks:
                before[transfer.src][chunk] |= now[transfer.dst][chunk]
        now = before
        history.append(now)
    return history[::-1]


def _in_result(schedule: Schedule, rank: int, chunk: int) -> bool:
    if schedule.result == "reduce":
        return rank == schedule.root
    if schedule.result == "all-to-all":  # chunk s·p + d is what rank s has for rank d
        return chunk % schedule.size == rank
    return chunk == rank if schedule.result == "reduce-scatter" else True


class Board:
    """Draws the cells of all ranks, one for each chunk."""

    def __init__(self, schedule: Schedule, is_small: bool = False) -> None:
        self.size, self.chunks = schedule.size, schedule.chunks
        self.cells = Cells(self.size, is_small)
        self.width = LEFT + self.cells.across + 6
        deepest = max((lane for step in schedule.steps for lane in lanes(step).values()), default=0)
        self.row = self.cells.height + 12 + deepest * LANE
        self.height = TOP + self.chunks * self.row

    def at(self, rank: int, chunk: int) -> tuple[float, float]:
        """Return the upper left corner of a cell."""
        return LEFT + self.cells.x(rank), TOP + (chunk + 1) * self.row - self.cells.height - 2

    def draw(self, held: list[list[Terms]], needed: list[list[bool]], step: Step = ()) -> str:
        """Draw all cells, and the arrows of `step`, which led to this state."""
        came = {(transfer.dst, chunk) for transfer in step for chunk in transfer.chunks}
        name = "{}" if self.cells.column < NARROWEST else "rank {}"
        names = [
            text(LEFT + self.cells.middle(rank), 14, name.format(rank), "heading", "middle")
            for rank in range(self.size)
        ]
        letters = [
            text(4, self.at(0, chunk)[1] + self.cells.height / 2 + 4, chunk_name(chunk), "heading")
            for chunk in range(self.chunks if self.chunks > 1 else 0)
        ]
        cells = [
            self._cell(rank, chunk, held[rank][chunk], needed[rank][chunk], (rank, chunk) in came)
            for rank in range(self.size)
            for chunk in range(self.chunks)
        ]
        ways = [self._way(transfer, chunk, lane) for (transfer, chunk), lane in lanes(step).items()]
        return "".join([*names, *letters, *cells, *ways])

    def flight(self, transfer: Transfer, held: list[list[Terms]]) -> str:
        """Draw the load of `transfer` where it starts, with the distance that it has to go."""
        distance = self.at(transfer.dst, 0)[0] - self.at(transfer.src, 0)[0]
        cells = [self._cell(transfer.src, one, held[transfer.src][one], True, True) for one in transfer.chunks]
        return f'<g class="flight" style="--dx: {distance:g}px">{"".join(cells)}</g>'

    def _cell(self, rank: int, chunk: int, terms: Terms, needed: bool, came: bool) -> str:
        return self.cells.draw(*self.at(rank, chunk), terms, needed, came)

    def _way(self, transfer: Transfer, chunk: int, lane: int) -> str:
        """Draw an arrow from cell to cell; over the cells between, where there are any."""
        src, dst = transfer.src, transfer.dst
        wide = self.cells.width
        (start, y), (end, _) = self.at(src, chunk), self.at(dst, chunk)
        sign = 1 if dst > src else -1
        edge, stub, point = TIGHT_ARROW if self.cells.gap < TIGHT else ARROW
        x0, x1 = (start + wide + edge, end - edge - 1) if dst > src else (start - edge, end + wide + edge + 1)
        middle, above = y + self.cells.height / 2, y - 5 - lane * LANE
        back = x1 - sign * point
        tip = f"{x1:g},{middle:g} {back:g},{middle - 3.5:g} {back:g},{middle + 3.5:g}"
        path = (
            f"M{x0:g},{middle:g} H{back + sign:g}"
            if abs(dst - src) == 1
            else f"M{x0:g},{middle:g} h{sign * stub:g} V{above:g} H{back - sign * stub:g} V{middle:g} "
            f"h{sign * (stub + 1):g}"
        )
        return f'<path d="{path}" class="way"/><polygon points="{tip}" class="tip"/>'


def hint(schedule: Schedule) -> str:
    """Return a hint for someone who sees `schedule` for the first time; empty where there is nothing to see."""
    if not schedule.steps:
        return ""
    match schedule.name:
        case "ring_all_reduce":
            step, rank = completed(schedule, 0)
            return (
                "row A: its sum travels from rank to rank and grows by one part a step, until it is complete on rank "
                f"{rank} after step {step}. Then copies of it travel on. Meanwhile every rank sends in every step."
            )
        case "tree_all_reduce":
            step, rank = completed(schedule, 0)
            return (
                f"rank {rank}: the sums come together there by step {step}, while fewer and fewer ranks send. "
                "Then the result spreads the same way back."
            )
        case "halving_doubling_all_reduce":
            step = max(completed(schedule, chunk)[0] for chunk in range(schedule.chunks))
            return (
                "how much travels: partners add ever smaller parts, until each row is complete on one rank after step "
                f"{step}. Then the parts grow again, while the sums are copied back the same way."
            )
    return ""


def completed(schedule: Schedule, chunk: int) -> tuple[int, int]:
    """Return the first step after which a rank holds the whole sum of `chunk`, and that rank."""
    everyone = tuple(range(schedule.size))
    for number, ranks in enumerate(holdings(schedule)):
        for rank, chunks in enumerate(ranks):
            if chunks[chunk] == everyone:
                return number, rank
    raise AssertionError(f"{schedule.name} never sums up chunk {chunk}")
