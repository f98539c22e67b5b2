"""The same pictures as tables for the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from paceline.comm.algorithms import Schedule, Step, holdings
from paceline.comm.algorithms.schedule import Terms
from paceline.core.output.wording import counted
from paceline.tools.explain.pictures.axis import ms
from paceline.tools.explain.pictures.ring_exchange import chunk_name, cost, title_of, used_later, verb
from paceline.tools.explain.pictures.timeline import SIZES, assumption, example, outcome

SPELLED_OUT = 6
"""With more ranks a cell says how many contributions are in it, not whose."""


def schedule_table(schedule: Schedule) -> Table:
    """Show each rank's part of each chunk, at the start and after every step."""
    table = Table(title=title_of(schedule), caption=_reading(schedule), title_justify="left", caption_justify="left")
    table.add_column("after", no_wrap=True, min_width=len(f"step {len(schedule.steps)}"))
    table.add_column("rank", justify="right", no_wrap=True)
    for chunk in range(schedule.chunks):
        table.add_column(chunk_name(chunk) if schedule.chunks > 1 else "tensor", no_wrap=True)
    table.add_column("receives")
    held, needed = holdings(schedule), used_later(schedule)
    for number, state in enumerate(held):
        step = schedule.steps[number - 1] if number else ()
        for rank, row in enumerate(state):
            came = {chunk for move in step if move.dst == rank for chunk in move.chunks}
            cells = [
                _cell(schedule, terms, needed[number][rank][chunk], chunk in came) for chunk, terms in enumerate(row)
            ]
            label = f"step {number}" if number else "start"
            table.add_row(label if rank == 0 else "", str(rank), *cells, _received(schedule, step, rank))
        table.add_section()
    return table


def _reading(schedule: Schedule) -> str:
    if not schedule.steps:
        return cost(schedule)
    whose = "whose parts are in the sum" if schedule.size <= SPELLED_OUT else "how many parts are in the sum"
    if schedule.result == "broadcast":
        whose = "whose tensor it is"
    return f"{cost(schedule)} A cell: {whose}; bold: has just come; dim: not needed."


def _cell(schedule: Schedule, terms: Terms, needed: bool, came: bool) -> Text:
    if schedule.result == "broadcast":
        said = str(terms[0])
    elif schedule.size <= SPELLED_OUT:
        said = "".join(str(rank) if rank in terms else "·" for rank in range(schedule.size))
    else:
        said = str(len(terms))
    return Text(said, style="bold green" if came else "" if needed else "dim")


def _received(schedule: Schedule, step: Step, rank: int) -> str:
    said = []
    for transfer in step:
        if transfer.dst == rank:
            first, last = chunk_name(transfer.chunks[0]), chunk_name(transfer.chunks[-1])
            what = "" if schedule.chunks == 1 else f"{first} " if first == last else f"{first}–{last} "
            said.append(f"{what}from {transfer.src}, {verb((transfer,)).removeprefix('receivers ')}s")
    return "; ".join(said).replace("copys", "copies")


def overlap_table(ranks: int) -> Table:
    """When each bucket is full and reduced, by all-reduces after backward and as buckets fill."""
    of = example(ranks)
    title = f"buckets and overlap, {counted(ranks, 'rank')}"
    caption = f"{outcome(of)} {assumption()}"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name, width in (("bucket", 7), ("MiB", 3), ("full at", 8)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for name in ("after backward: all-reduce", "as buckets fill: all-reduce"):
        table.add_column(name, justify="right", min_width=10)
    for bucket, size in enumerate(SIZES):
        late, early = (f"{ms(way.begin[bucket])} – {ms(way.end[bucket])}" for way in (of.at_the_end, of.when_full))
        table.add_row(str(bucket), str(size // 2**20), ms(of.when_full.full[bucket]), late, early)
    table.add_section()
    table.add_row("waiting", "", "", ms(of.at_the_end.exposed), ms(of.when_full.exposed))
    return table
