"""The plot of a comparison: the time per batch of each mode, and how much of it waits for communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.output.charts import new_figure
from paceline.tools.compare.comparison import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: Sequence[Row], target: str) -> Figure:
    """Draw a bar for each mode; shorter is faster."""
    figure = new_figure(8, 1.2 + 0.55 * len(rows))
    axes = figure.add_subplot(title=f"{target}: time per global batch", xlabel="ms; shorter is faster")
    names = [row.mode for row in rows]
    times = [1e3 * row.seconds_per_batch for row in rows]
    waiting = [time * (row.waiting_share or 0.0) for row, time in zip(rows, times, strict=True)]
    computed = [time - wait for time, wait in zip(times, waiting, strict=True)]
    axes.barh(names, computed, label="computing")
    bars = axes.barh(names, waiting, left=computed, label="waiting for communication")
    axes.bar_label(bars, [_figures(row) for row in rows], padding=4, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.4)
    if any(waiting):
        axes.legend(frameon=False)
    return figure


def _figures(row: Row) -> str:
    shown = f"{1e3 * row.seconds_per_batch:,.1f} ms"
    if row.speedup is None or row.efficiency is None:
        return shown
    return f"{shown}\n{row.speedup:.2f} × one device, efficiency {row.efficiency:.2f}"
