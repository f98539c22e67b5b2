"""The six collectives, and the schedule of any algorithm: every rank's data after each step.

Works for any schedule of :mod:`paceline.comm.schedules`. Each column is a rank, each row a chunk. A cell is empty if
the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from string import ascii_uppercase
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from paceline.comm.schedules import (
    Schedule,
    Step,
    Terms,
    Transfer,
    holdings,
    pairwise_all_to_all,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
    tree_reduce,
)
from paceline.core.messages import counted
from paceline.core.tables import new_table
from paceline.ddp.buckets import CAPACITY, MIB
from paceline.tools.explain.buckets import LINK, LINKS
from paceline.tools.explain.drawing import Cell, Grid
from paceline.tools.explain.scene import Frame, Scene, ms

ABOUT = {
    "broadcast": "Rank 0's tensor goes to every rank. Training uses it to start all replicas with the same weights.",
    "reduce": "The sum of all ranks' tensors goes to rank 0 only, for example to log a loss.",
    "all-reduce": "Every rank gets the sum of all ranks' tensors. Data-parallel training averages gradients with it.",
    "reduce-scatter": "Every rank gets one part of the sum. A sharded optimizer needs only its part.",
    "all-gather": "Every rank gets all ranks' parts in order. A sharded optimizer shares updated weights this way.",
    "all-to-all": "Every rank sends a different part to each rank. Mixture-of-experts layers send tokens this way.",
}
"""The purpose of each collective."""
HINTS = {
    "linear_broadcast": "rank 0: it sends the tensor to one rank after another, and all other links are idle.",
    "scatter_all_gather_broadcast": "how small messages are: each rank gets one part, then the parts go around a ring.",
    "linear_reduce": "rank 0: it receives one tensor after another, and all other links are idle.",
    "tree_broadcast": "how many ranks have the tensor: up to twice as many after each step, because each passes it on.",
    "tree_reduce": "rank 0: this is a broadcast in reverse, with sums.",
    "tree_all_reduce": "rank 0: all sums end up there. Then the result takes the same way back.",
    "ring_all_reduce": "row A: its sum grows by one part per step until it is complete. Then copies of it go around.",
    "ring_reduce_scatter": "row A: its sum grows by one rank's part per step and ends up on rank 0.",
    "ring_all_gather": "row A: copies of rank 0's part go from rank to rank, while all other parts do the same.",
    "pairwise_all_to_all": "the letters: A is for rank 0, B for rank 1, and so on. In the end, a rank has its letter.",
    "halving_doubling_all_reduce": "the size of messages: it shrinks until each row is complete on one rank. Then it "
    "grows again while the sums are copied back the same way.",
}
"""What to watch while a schedule is animated."""
READING = (
    "Columns are ranks, rows parts of their tensors. A cell shows the ranks whose parts are in the sum, or whose copy "
    "it is. Framed: just arrived. Dashed: not needed."
)
State = list[list[Cell]]
"""Contents of all ranks, ``[rank][row]``."""
SUMS = ("reduce", "all-reduce", "reduce-scatter")
"""Collectives whose cells are sums; the cells of the others are copies, and show whose."""
SPELLED_OUT = 6
"""With more ranks, a table's cell shows how many contributions a sum contains, not whose."""
BEFORE_2_13 = {"reduce_scatter_single": "reduce_scatter_tensor", "all_gather_single": "all_gather_into_tensor"}
"""Names of these torch.distributed functions up to torch 2.12."""


def scene(schedule: Schedule) -> Scene:
    """Draw `schedule`."""
    grid = grid_of(schedule)
    algorithm = schedule.name.removesuffix("_" + schedule.result.replace("-", "_")).replace("_", "-")
    title = f"{algorithm} {schedule.result}, {counted(schedule.size, 'rank')}"
    cost = "One rank has nothing to send."
    if schedule.steps:
        seconds = ms(LINK.seconds(schedule, CAPACITY))
        cost = f"{traffic_of(schedule, 1)} times the tensor. {CAPACITY // MIB} MiB take {seconds} over {LINKS}."
    return Scene(
        title,
        ABOUT[schedule.result],
        cost,
        READING,
        hint(schedule),
        step_frames(schedule, grid),
        table=table(schedule, title, cost, range(len(schedule.steps) + 1)),
        symbols=grid.symbols,
    )


def grid_of(schedule: Schedule) -> Grid:
    """Return the grid for `schedule`."""
    if schedule.result == "all-to-all":
        return Grid(schedule.size, [f"with {rank}" for rank in range(schedule.size)], is_bowed=True)
    return Grid(schedule.size, [chunk_name(schedule, chunk) for chunk in range(schedule.chunks)])


def hint(schedule: Schedule) -> str:
    """Return what to watch while `schedule` is animated."""
    return HINTS[schedule.name] if schedule.steps else ""


def states(schedule: Schedule) -> list[State]:
    """Return the contents of all ranks at the start and after every step."""
    history = zip(holdings(schedule), used_later(schedule), ((), *schedule.steps), strict=True)
    return [
        [list(_cells(schedule, rank, held[rank], needed[rank], step)) for rank in range(schedule.size)]
        for held, needed, step in history
    ]


def _cells(schedule: Schedule, rank: int, held: Sequence[Terms], needed: Sequence[bool], step: Step) -> Iterator[Cell]:
    """Yield the contents of a rank's rows after `step`."""
    size, arrived = schedule.size, {chunk for transfer in step if transfer.dst == rank for chunk in transfer.chunks}
    chunks: Iterable[int] = range(schedule.chunks)
    if schedule.result == "all-to-all":
        # Row j holds chunk rank·p + j, the part for rank j. Once exchanged, it holds the part from rank j.
        pairs = ((row * size + rank, rank * size + row) for row in range(size))
        chunks = (swapped if held[swapped] == (swapped // size,) else source for swapped, source in pairs)
    for chunk in chunks:
        label = "" if schedule.result in SUMS else f"{chunk_name(schedule, chunk % size)}{held[chunk][0]}"
        yield Cell(held[chunk], label, chunk in arrived) if needed[chunk] else Cell()


def step_frames(schedule: Schedule, grid: Grid) -> list[Frame]:
    """Draw the start, and the state after every step with its messages."""
    history = states(schedule)
    drawn = [Frame("start", "every rank holds its input", grid.draw(history[0]))]
    for number, step in enumerate(schedule.steps, start=1):
        arrows, moving = [], []
        for message, chunk in ((transfer, chunk) for transfer in step for chunk in transfer.chunks):
            source, destination = (message.dst, message.src) if grid.is_bowed else (chunk, chunk)
            arrows.append((message.src, message.dst, 0 if grid.is_bowed else chunk))
            cell = history[number - 1][message.src][source]
            moving.append(grid.flight(cell, (message.src, source), (message.dst, destination)))
        verbs = sorted({"add" if message.reduce else "copy" for message in step})
        title = f"step {number} of {len(schedule.steps)}: receivers {' or '.join(verbs)}"
        caption = ", ".join(f"{message.src}→{message.dst} {_chunks(schedule, message)}".strip() for message in step)
        drawn.append(Frame(title, caption, grid.draw(history[number], arrows), "".join(moving)))
    return drawn


def table(schedule: Schedule, title: str, caption: str, shown: Iterable[int]) -> Table:
    """Show each rank's rows after the steps `shown`; step 0 is the start."""
    numbers = "whose" if schedule.size <= SPELLED_OUT or schedule.result not in SUMS else "how many"
    caption += f" A cell shows {numbers} parts it contains; bold: just arrived; –: not needed for the result."
    texts = ["after", *(name or "tensor" for name in grid_of(schedule).rows), "receives"]
    columns = ["after", "rank", *texts[1:]]
    result = new_table(columns, title=title, caption=caption, words=texts, wraps=["receives"])
    history = states(schedule)
    for number in shown:
        for rank in range(schedule.size):
            arrived = [sent for sent in schedule.steps[number - 1] if sent.dst == rank] if number else []
            verbs = {True: "adds", False: "copies"}
            received = [f"{_chunks(schedule, sent)} from {sent.src}, {verbs[sent.reduce]}".strip() for sent in arrived]
            label = "" if rank else f"step {number}" if number else "start"
            cells = [_text(cell, schedule.size) for cell in history[number][rank]]
            result.add_row(label, str(rank), *cells, "; ".join(received))
        result.add_section()
    return result


def _text(cell: Cell, size: int) -> Text:
    words = cell.label
    if not cell.label:
        spelled = "".join(str(rank) if rank in cell.terms else "·" for rank in range(size))
        words = "–" if not cell.terms else spelled if size <= SPELLED_OUT else str(len(cell.terms))
    return Text(words, "bold green" if cell.came else "")


def chunk_name(schedule: Schedule, chunk: int) -> str:
    """Return the letter of a chunk; empty if the tensor is not divided."""
    return ascii_uppercase[chunk] if schedule.chunks > 1 else ""


def _chunks(schedule: Schedule, transfer: Transfer) -> str:
    if schedule.result == "all-to-all":
        return f"{chunk_name(schedule, transfer.dst)}{transfer.src}"
    first, last = (chunk_name(schedule, transfer.chunks[end]) for end in (0, -1))
    return first if first == last else f"{first}–{last}"


def traffic(schedule: Schedule) -> tuple[list[float], list[float]]:
    """Return how much each rank sends and how much it receives, in units of the tensor's size."""
    sent, received = [0.0] * schedule.size, [0.0] * schedule.size
    for transfer in (transfer for step in schedule.steps for transfer in step):
        sent[transfer.src] += len(transfer.chunks) / schedule.chunks
        received[transfer.dst] += len(transfer.chunks) / schedule.chunks
    return sent, received


def traffic_of(schedule: Schedule, tensor: float) -> str:
    """Describe the number of steps and the most that a rank sends and receives, given the size of the tensor."""
    sent, received = (f"{tensor * max(moved):.4g}" for moved in traffic(schedule))
    same = f"sends and receives up to {sent}"
    moved = same if sent == received else f"sends up to {sent} and receives up to {received}"
    return f"{counted(len(schedule.steps), 'step')}; a rank {moved}"


def used_later(schedule: Schedule) -> list[list[list[bool]]]:
    """Return, as ``[k][rank][chunk]``, whether the result depends on what a rank holds of a chunk after k steps."""
    needed = [[_in_result(schedule, rank, chunk) for chunk in range(schedule.chunks)] for rank in range(schedule.size)]
    history = [needed]
    for step in reversed(schedule.steps):
        earlier = [list(row) for row in needed]
        for transfer in step:
            for chunk in transfer.chunks:
                earlier[transfer.src][chunk] |= needed[transfer.dst][chunk]
                # A copy overwrites what the receiver had, which it does not send in the same step.
                earlier[transfer.dst][chunk] &= transfer.reduce
        needed = earlier
        history.append(needed)
    return history[::-1]


def _in_result(schedule: Schedule, rank: int, chunk: int) -> bool:
    if schedule.result == "reduce":
        return rank == schedule.root
    if schedule.result == "all-to-all":  # chunk s·p + d goes from rank s to rank d
        return chunk % schedule.size == rank
    return chunk == rank if schedule.result == "reduce-scatter" else True


class Collective(NamedTuple):
    """A collective, with the schedule that is drawn."""

    schedule: Schedule
    call: str
    """The torch.distributed function, with its arguments."""
    after: str
    """The data that ranks hold at the end."""


def collectives(size: int) -> list[Collective]:
    """Return the six collectives among `size` ranks."""
    return [
        Collective(tree_broadcast(size, 0), "broadcast(tensor, src=0)", "every rank holds rank 0's tensor"),
        Collective(tree_reduce(size, 0), "reduce(tensor, dst=0)", "rank 0 holds the sum; the others have no result"),
        Collective(ring_all_reduce(size), "all_reduce(tensor)", "every rank holds the sum of every row"),
        Collective(
            ring_reduce_scatter(size), "reduce_scatter_single(part, tensor)", "every rank holds the sum of one row"
        ),
        Collective(ring_all_gather(size), "all_gather_single(tensor, part)", "every rank holds all ranks' parts"),
        Collective(
            pairwise_all_to_all(size), "all_to_all_single(output, input)", "every rank holds the parts addressed to it"
        ),
    ]


def scenes(size: int) -> list[Scene]:
    """Draw all six; only the first scene explains how to read them."""
    first, *others = [_scene(collective) for collective in collectives(size)]
    return [first, *(replace(scene, reading="") for scene in others)]


def _scene(collective: Collective) -> Scene:
    schedule = collective.schedule
    grid = grid_of(schedule)
    end = [[cell._replace(came=False) for cell in held] for held in states(schedule)[-1]]
    frames = [*step_frames(schedule, grid), Frame("after", collective.after, grid.draw(end))]
    title, result = f"{schedule.result}, {counted(schedule.size, 'rank')}", outcome(collective)
    middle, last = (len(schedule.steps) + 1) // 2, len(schedule.steps)
    caption = f"{result} {collective.after.capitalize()}."
    return Scene(
        title,
        ABOUT[schedule.result],
        result,
        f"{READING} A rank's tensor has {CAPACITY // MIB} MiB; {LINKS}.",
        hint(schedule),
        frames,
        shown=[frames[step] for step in sorted({0, middle})] + frames[-1:],
        table=table(schedule, title, caption, sorted({0, middle, last})),
        symbols=grid.symbols,
    )


def outcome(collective: Collective) -> str:
    """Return the call, the steps, the bytes and the time as a sentence."""
    call, schedule = f"torch.distributed.{collective.call}", collective.schedule
    if (name := collective.call.partition("(")[0]) in BEFORE_2_13:
        call += f" ({BEFORE_2_13[name]} before torch 2.13)"
    if schedule.size == 1:
        return f"{call}. One rank has nothing to send."
    # In an all-to-all, the chunks of all ranks' tensors together count as one tensor.
    tensor = CAPACITY * (schedule.size if schedule.result == "all-to-all" else 1)
    seconds, moved = ms(LINK.seconds(schedule, tensor)), traffic_of(schedule, tensor / MIB)
    algorithm = schedule.name.split("_")[0].replace("pairwise", "pairwise exchange")
    return f"{call}. As a {algorithm}: {seconds} in {moved} MiB."
