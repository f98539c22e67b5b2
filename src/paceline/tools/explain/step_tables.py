"""Training steps as tables for the terminal: their stages and meetings, who waits in them, and what moves."""

from __future__ import annotations

from rich.table import Table

from paceline.core.output.wording import counted
from paceline.core.state.buckets import MIB
from paceline.tools.explain.pictures import bubble, two_ways, workflow
from paceline.tools.explain.pictures.axis import number

WORD = len("SyncBatchNorm,")
"""Characters of the longest word in a column that wraps."""


def workflow_table(ranks: int) -> Table:
    """Show when the stages of one training step begin and end, and what ranks exchange where they meet."""
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
        table.add_row(str(stage), name, number(begin), number(end))
        for meeting in step.meetings if ranks > 1 else ():
            if meeting.stage == stage:
                exchange = (
                    f"{meeting.collective}, {meeting.nbytes:,} bytes"
                    if meeting.nbytes
                    else f"{meeting.collective}, not in this model"
                )
                table.add_row(meeting.letter, meeting.name, number(meeting.begin), number(meeting.end), exchange)
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
            times = (number(computes), number(waits), number(case.communication), number(case.length))
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
        table.add_column("receives", justify="right", no_wrap=True)
    rows = [(stage.title, stage.sent, stage.received) for stage in way.stages[1:]]
    for title, sent, received in rows:
        cells = [part for device in range(1 + several) for part in (sent[device], received[device])]
        table.add_row(title, *(f"{part / MIB:,.1f}" if part else "–" for part in cells))
    table.add_section()
    total_sent, total_received = way.moved()
    cells = [part for device in range(1 + several) for part in (total_sent[device], total_received[device])]
    table.add_row("in total", *(f"{part / MIB:,.1f}" for part in cells))
    return table


def _table(title: str, caption: str) -> Table:
    return Table(title=title, caption=caption, title_justify="left", caption_justify="left")
