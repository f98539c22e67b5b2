"""A job's view as a table for the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.core.output.wording import counted, duration
from paceline.tools.top.rank_status import ENDED, RUNNING, JobView, RankStatus, describe, find_straggler

BAR = 20
"""Width of a step's bar, in characters."""
NOTHING = "–"


def heading(view: JobView) -> Text:
    """Return the line above the table."""
    note = view.note
    return Text(f"job {note.pid}: {note.title}, {counted(note.nproc, 'rank')}", style="bold")


def table_of(view: JobView) -> Table:
    """Return a table with a row for each rank on this host."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "step", "phase", "for", "step time", "waiting"):
        table.add_column(name, justify="left" if name in ("rank", "phase") else "right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)  # the waiting share as a number; the next column draws it
    table.add_column(Text.assemble("█ busy ", ("░ waiting", "yellow")), no_wrap=True)
    straggler = find_straggler(view.statuses)
    for status in view.statuses:
        slow = straggler is not None and straggler.rank == status.rank
        table.add_row(*_cells(status), style="bold red" if slow or status.state == ENDED else "")
    return table


def _cells(status: RankStatus) -> list[str | Text]:
    share = status.waiting_share
    return [
        str(status.rank),
        NOTHING if status.step is None else f"{status.step:,}",
        phase_of(status),
        _or_nothing(status.phase_seconds),
        _or_nothing(status.step_seconds),
        _or_nothing(status.waiting_seconds),
        "" if share is None else f"{100 * share:.0f} %",
        "" if share is None else bar(share),
    ]


def phase_of(status: RankStatus) -> str:
    """Return the rank's phase, or if the rank is not running, its state and last phase."""
    phase = status.phase if status.bucket is None else f"{status.phase} {status.bucket}"
    if status.state == RUNNING:
        return str(phase)
    return f"{status.state}, in {phase}" if phase else status.state


def bar(waiting_share: float) -> Text:
    """Return a bar of the step: busy time first, then waiting time."""
    waiting = round(BAR * waiting_share)
    return Text.assemble("█" * (BAR - waiting), ("░" * waiting, "yellow"))


def screen(view: JobView) -> RenderableType:
    """Return the whole view: heading, table, and a remark about stragglers or ended ranks."""
    remark = describe(view.statuses)
    return Group(heading(view), table_of(view), *([Text(remark, style="bold")] if remark else []))


def _or_nothing(seconds: float | None) -> str:
    return NOTHING if seconds is None else duration(seconds)
