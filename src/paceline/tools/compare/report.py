"""Presents a comparison: tables and notes for people, values for JSON, and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.core.output.charts import new_figure
from paceline.core.output.tables import new_table, print_table
from paceline.core.output.wording import counted, digits
from paceline.tools.compare.comparison import Row
from paceline.tools.compare.turn_taking import TURN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPEED = ("mode", "devices", "samples\nper batch", "ms per\nbatch", "samples/s", "speed-up", "efficiency")
"""Columns of the first table; from the fifth on each is computed from those before it."""
RANKS = (
    "mode",
    "ms per\nstep",
    "all-reduce\nalone, ms",
    "of a\nstep",
    "exposed\nms",
    "bubble\nms",
    "MB per\nrank",
    "weights",
)
"""Columns of the second table; the fourth is the third by the second."""


def show(rows: Sequence[Row], target: str, threads: int) -> None:
    """Print two tables, each of which fits a terminal of 80 characters, and the notes."""
    print_table(speed_table(rows, target))
    print()
    print_table(ranks_table(rows))
    Console().print("", *notes(rows, threads), sep="\n", highlight=False)


def statistic(rows: Sequence[Row]) -> str:
    """Return how every time of the comparison is computed."""
    base = "single" if any(row.mode == "single" for row in rows) else rows[0].mode
    taken = f"the median of {counted(len(rows[0].turns), 'turn')} of {counted(TURN, 'step')}"
    if len(rows) == 1:
        return f"Times are {taken}."
    return f"Times: {base}'s is {taken}; the others' are that times the median of their ratios to it, turn by turn."


def speed_table(rows: Sequence[Row], target: str) -> Table:
    """Lay out how fast the modes are."""
    title = f"{target}: the same work in {counted(len(rows), 'way')}"
    table = new_table(SPEED, title=title, words=("mode",))
    for row in rows:
        table.add_row(
            row.mode,
            str(row.devices),
            digits(row.rows_per_batch),
            digits(1e3 * row.seconds_per_batch),
            digits(row.samples_per_second),
            _shown(row.speedup, ".2f"),
            _shown(row.efficiency, ".2f"),
        )
    return table


def ranks_table(rows: Sequence[Row]) -> Table:
    """Lay out what the ranks of the modes communicate, wait for, hold and end with."""
    table = new_table(RANKS, words=("mode", "weights"), wraps=("weights",))
    for row in rows:
        differ = "" if row.replicas_identical else "; RANKS DIFFER"
        table.add_row(
            row.mode,
            digits(1e3 * row.seconds_per_step),
            digits(_milli(row.all_reduce_seconds)),
            _shown(row.all_reduce_share, ".1%"),
            digits(_milli(row.exposed_seconds)),
            digits(_milli(row.bubble_seconds)),
            f"{row.memory_bytes / 1e6:,.0f}",
            row.weights + differ,
        )
    return table


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def notes(rows: Sequence[Row], threads: int) -> list[str]:
    """Explain the columns, and whether the modes can be compared."""
    listed = [
        statistic(rows),
        f"A device is a GPU, or {counted(threads, 'CPU thread')}. samples/s: samples per batch by time per batch"
        + ("; speed-up: that by single's; efficiency: that by the devices." if rows[0].speedup is not None else "."),
    ]
    if any(row.ranks > 1 for row in rows):
        listed.append(
            "All-reduce alone: of a step's gradients, while nothing else runs; of a step: that by the time of a step."
        )
    if any(row.exposed_seconds is not None for row in rows):
        listed.append(
            "A step's waiting has two parts. Exposed: for the all-reduce, which can take longer beside other work "
            "than alone. Bubble: for the rank that comes last, mean of the ranks."
        )
    listed.append(f"Weights are compared with those of {rows[0].mode}.")
    if rows[0].wrappers > 1:
        listed.append(
            f"The program wraps {rows[0].wrappers} models: a batch is a step of all their optimizers; all-reduce, "
            "waiting and weights are those of all models together."
        )
    if _rows_differ([row.largest_batch for row in rows]):
        listed.append(
            "Batches differ in size, so the modes did different work: take them from paceline.data.DataLoader, whose "
            "batch_size is that of all ranks together."
        )
    return listed


def _rows_differ(rows: Sequence[float | None]) -> bool:
    """Return whether modes were given batches of different size, such as by a script whose batch size is a rank's."""
    known = [row for row in rows if row]
    return bool(known) and max(known) > 1.01 * min(known)


def document(rows: Sequence[Row], target: str, threads: int) -> dict[str, object]:
    """Return the figures as values for JSON, in seconds and bytes."""
    return {
        "target": target,
        "threads": threads,
        "times": statistic(rows),
        "modes": [asdict(row) for row in rows],
    }


def draw(rows: Sequence[Row], target: str) -> Figure:
    """Draw a bar for each mode; shorter is faster."""
    figure = new_figure(6.5, 1.8 + 0.55 * len(rows))
    title = f"{target}: time per global batch, median of {counted(len(rows[0].turns), 'turn')}"
    axes = figure.add_subplot(title=title, xlabel="ms; shorter is faster")
    names = [row.mode for row in rows]
    times = [1e3 * row.seconds_per_batch for row in rows]
    # Waiting is that of a step, and the bars are batches.
    scales = [1e3 * row.seconds_per_batch / row.seconds_per_step for row in rows]
    exposed = [(row.exposed_seconds or 0.0) * scale for row, scale in zip(rows, scales, strict=True)]
    bubbles = [(row.bubble_seconds or 0.0) * scale for row, scale in zip(rows, scales, strict=True)]
    parts = {"waiting for communication (exposed)": exposed, "waiting for the last rank (bubble)": bubbles}
    lefts = [time - one - other for time, one, other in zip(times, exposed, bubbles, strict=True)]
    bars = axes.barh(names, lefts, label="computing, and waiting that is not counted")
    if any(exposed):
        for label, widths in parts.items():
            bars = axes.barh(names, widths, left=lefts, label=label)
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    axes.bar_label(bars, [_bar_label(row) for row in rows], padding=4, fontsize="small")
    # barh() begins at the bottom, and the table at the top.
    axes.invert_yaxis()
    # The longest bar ends where its label has room, which no margin would give it.
    axes.set_xlim(0, 1.8 * max(times))
    return figure


def _bar_label(row: Row) -> str:
    time = f"{digits(1e3 * row.seconds_per_batch)} ms"
    if row.speedup is None or row.efficiency is None:
        return time
    return f"{time}\n{row.speedup:.2f} × one device, efficiency {row.efficiency:.2f}"
