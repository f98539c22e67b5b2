"""The pictures as tables for the terminal: who holds what after each step, when stages end, and how many bytes move."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from paceline.comm.algorithms import Schedule, Step, holdings
from paceline.comm.algorithms.schedule import Terms
from paceline.core.output.wording import counted
from paceline.ddp.options.buckets import MIB
from paceline.tools.explain.pictures import bubble, collectives, slice_tree, two_ways, workflow
from paceline.tools.explain.pictures.ring_exchange import chunk_name, cost, title_of, used_later, verb
from paceline.tools.explain.pictures.scene import figure, ms
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
        step = schedule.steps[number - 1] if number else ()  # number 0 is the state before the first step
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
    return f"{cost(schedule)} A cell: {whose}; bold: has just come; dim: not needed."


def _cell(schedule: Schedule, terms: Terms, needed: bool, came: bool) -> Text:
    if schedule.size <= SPELLED_OUT:
        shown = "".join(str(rank) if rank in terms else "·" for rank in range(schedule.size))
    else:
        shown = str(len(terms))
    return Text(shown, style="bold green" if came else "" if needed else "dim")


def _received(schedule: Schedule, step: Step, rank: int) -> str:
    messages = []
    for transfer in step:
        if transfer.dst == rank:
            first, last = chunk_name(transfer.chunks[0]), chunk_name(transfer.chunks[-1])
            chunks = "" if schedule.chunks == 1 else f"{first} " if first == last else f"{first}–{last} "
            messages.append(f"{chunks}from {transfer.src}, {verb((transfer,)).removeprefix('receivers ')}s")
    return "; ".join(messages).replace("copys", "copies")


def collective_tables(ranks: int) -> list[Table]:
    """Show the data of every rank before, during and after each collective."""
    return [_collective_table(collective) for collective in collectives.collectives(ranks)]


def _collective_table(collective: collectives.Collective) -> Table:
    size, found, middle = collective.schedule.size, collectives.states(collective), collective.middle
    spelled_out = size <= SPELLED_OUT or collective.schedule.result in ("broadcast", "all-gather", "all-to-all")
    table = _table(
        f"{collective.name}, {counted(size, 'rank')}",
        f"{collectives.outcome(collective)} {collective.after.capitalize()}.",
    )
    table.add_column("rank", justify="right", no_wrap=True)
    shown = [("before", 0), (f"step {middle} of {len(collective.schedule.steps)}", middle), ("after", -1)]
    for title, _ in shown if middle else (shown[0], shown[-1]):
        table.add_column(title, min_width=len("before"))
    for rank in range(size):
        cells = [
            " ".join(collectives.words(collective, part, spelled_out) for part in found[at][rank]) for _, at in shown
        ]
        table.add_row(str(rank), *(cells if middle else (cells[0], cells[-1])))
    return table


def overlap_table(ranks: int) -> Table:
    """Show when each bucket is full and reduced: by all-reduces after backward, and while buckets fill."""
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


WORD = len("SyncBatchNorm,")
"""Characters of the longest word in a column that wraps."""


def workflow_table(ranks: int) -> Table:
    """Show when the stages of one training step begin and end, and the messages wherever ranks meet."""
    step = workflow.training_step(ranks)
    table = _table(
        f"one training step, {counted(ranks, 'rank')}",
        f"{workflow.outcome(step)} {workflow.assumption()} Times are in ms, those of stages for the last rank.",
    )
    table.add_column("", no_wrap=True)
    table.add_column("what", min_width=WORD)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("to", justify="right", no_wrap=True)
    table.add_column("exchange", min_width=WORD)
    for stage, (name, begin, end) in enumerate(workflow.stage_times(step), start=1):
        table.add_row(str(stage), name, figure(begin), figure(end))
        for meeting in step.meetings if ranks > 1 else ():
            if meeting.stage == stage:
                exchange = (
                    f"{meeting.collective}, {meeting.nbytes:,} bytes"
                    if meeting.nbytes
                    else f"{meeting.collective}, not in this model"
                )
                table.add_row(meeting.letter, meeting.name, figure(meeting.begin), figure(meeting.end), exchange)
    return table


def bubble_tables(ranks: int) -> list[Table]:
    """Show how long each rank computes and waits, with a late rank and with accumulation."""
    first = _bubble_table(f"a late rank, {counted(ranks, 'rank')}", bubble.late_rank(ranks), bubble.late_outcome(ranks))
    second = _bubble_table(
        f"bubbles and accumulation, {counted(ranks, 'rank')}",
        bubble.accumulation(ranks),
        bubble.accumulation_outcome(ranks),
    )
    return [first, second]


def _bubble_table(title: str, cases: list[bubble.Case], outcome: str) -> Table:
    table = _table(title, f"{outcome} {bubble.assumption()} Times are in ms.")
    table.add_column("case", min_width=WORD)
    for name in ("rank", "computes", "bubble", "network", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in cases:
        for rank, waits in enumerate(case.bubbles):
            computes = case.length - waits - case.communication
            times = (figure(computes), figure(waits), figure(case.communication), figure(case.length))
            table.add_row("" if rank else case.title, str(rank), *times)
        table.add_section()
    return table


def way_tables(ranks: int) -> list[Table]:
    """Show the traffic of devices in each stage of a step, with DataParallel and DistributedDataParallel."""
    return [_way_table(way) for way in two_ways.both(ranks)]


def _way_table(way: two_ways.Way) -> Table:
    table = _table(way.title, f"{two_ways.outcome(way)} {two_ways.assumption()} All in MiB.")
    table.add_column("stage", no_wrap=True)
    several = way.size > 1
    for device in (f"{way.device} 0", f"{way.device} 1" if way.size == 2 else f"each other {way.device}")[
        : 1 + several
    ]:
        table.add_column(f"{device} sends", justify="right", min_width=len("100,000.0"))
        table.add_column(f"{device} receives", justify="right", min_width=len("100,000.0"))
    rows = [(stage.title, stage.sent, stage.received) for stage in way.stages[1:]]
    for title, sent, received in rows:
        cells = [part for device in range(1 + several) for part in (sent[device], received[device])]
        table.add_row(title, *(f"{part / MIB:,.1f}" if part else "–" for part in cells))
    table.add_section()
    total_sent, total_received = way.moved()
    cells = [part for device in range(1 + several) for part in (total_sent[device], total_received[device])]
    table.add_row("in total", *(f"{part / MIB:,.1f}" for part in cells))
    return table


def slice_table(most: int) -> Table:
    """Show what each rank computes and adds with virtual ranks, for 1, 2, 4, … ranks up to `most`."""
    slices = max(slice_tree.SLICES, slice_tree.numbers(most)[-1])
    tree = slice_tree.expression(0, slices)[1:-1]
    table = _table(f"one tree of sums, virtual_ranks={slices}", f"On every number of ranks: {tree}.")
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    for name in ("computes", "adds by itself", "added between ranks"):
        table.add_column(name, min_width=WORD)
    for ranks in slice_tree.numbers(most):
        made = [each for step in slice_tree.steps(slices, ranks) for each in step.made]
        shared = ", ".join(each.name for each in made if each.rank is None)
        for rank in range(ranks):
            own = [each for each in made if each.rank == rank]
            computed = ", ".join(each.name for each in own if each.size == 1)
            added = ", ".join(each.name for each in own if each.size > 1)
            table.add_row("" if rank else str(ranks), str(rank), computed, added or "–", "" if rank else shared or "–")
        table.add_section()
    return table


def _table(title: str, caption: str) -> Table:
    return Table(title=title, caption=caption, title_justify="left", caption_justify="left")
