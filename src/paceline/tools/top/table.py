"""A job's view as a table in the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.core.output.wording import duration
from paceline.tools.top.standing import ENDED, RUNNING, JobView, Standing, describe, find_straggler

BAR = 20
"""Characters of a step in the bar."""
NOTHING = "–"


def heading(view: JobView) -> Text:
    """Return the line above the table."""
    note = view.note
    ranks = "1 rank" if note.nproc == 1 else f"{note.nproc} ranks"
    return Text(f"job {note.pid}: {note.title}, {ranks}", style="bold")


def table_of(view: JobView) -> Table:
    """Return a row for each rank of this host."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "step", "phase", "for", "step time", "waiting", "", ""):
        left = name in ("rank", "phase", "")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    table.columns[6].justify = "right"
    table.columns[7].header = Text.assemble("█ busy ", ("░ waiting", "yellow"))
    straggler = find_straggler(view.standings)
    for standing in view.standings:
        slow = straggler is not None and straggler.rank == standing.rank
        table.add_row(*_cells(standing), style="bold red" if slow or standing.state == ENDED else "")
    return table


def _cells(standing: Standing) -> list[str | Text]:
    share = standing.waiting_share
    return [
        str(standing.rank),
        NOTHING if standing.step is None else f"{standing.step:,}",
        phase_of(standing),
        _or_nothing(standing.phase_seconds),
        _or_nothing(standing.step_seconds),
        _or_nothing(standing.waiting_seconds),
        "" if share is None else f"{100 * share:.0f} %",
        "" if share is None else bar(share),
    ]


def phase_of(standing: Standing) -> str:
    """Return the rank's phase, or what it is instead."""
    phase = standing.phase if standing.bucket is None else f"{standing.phase} {standing.bucket}"
    if standing.state == RUNNING:
        return str(phase)
    return f"{standing.state}, in {phase}" if phase else standing.state


def bar(waiting_share: float) -> Text:
    """Return the step as a bar: what the rank did, and then what it waited."""
    waiting = round(BAR * waiting_share)
    return Text.assemble("█" * (BAR - waiting), ("░" * waiting, "yellow"))


def screen(view: JobView) -> RenderableType:
    """Return the whole view: heading, table, and what stands out."""
    remark = describe(view.standings)
    return Group(heading(view), table_of(view), *([Text(remark, style="bold")] if remark else []))


def _or_nothing(seconds: float | None) -> str:
    return NOTHING if seconds is None else duration(seconds)
