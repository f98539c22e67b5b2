"""The plot of a benchmark: time relative to Gloo's over size, measured and modelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.output.charts import new_figure
from paceline.core.output.wording import counted, duration
from paceline.tools.bench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE = "gloo"
MOST_MARKS = 10
"""Most sizes that are named below the axis."""


def plot(rows: Sequence[Row], cores: int) -> Figure:
    """Draw a panel for each collective."""
    ops = list(dict.fromkeys(row.op for row in rows))
    figure = new_figure(9, 4.5 * len(ops))
    for number, op in enumerate(ops, 1):
        _panel(figure.add_subplot(len(ops), 1, number), [row for row in rows if row.op == op], cores)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], cores: int) -> None:
    """Draw one collective: sizes on a logarithmic axis, and times relative to the reference's on a linear one."""
    names = [row.variant for row in rows]
    reference = REFERENCE if REFERENCE in names else names[0]
    whose = f"{reference.capitalize() if reference == REFERENCE else reference}'s"
    seconds = {row.nbytes: row.seconds for row in rows if row.variant == reference}
    for variant in dict.fromkeys(names):
        points = [row for row in rows if row.variant == variant]
        sizes = [row.nbytes for row in points]
        [line] = axes.plot(sizes, [row.seconds / seconds[row.nbytes] for row in points], "o-", label=variant)
        modelled = [(row.nbytes, row.model_seconds / seconds[row.nbytes]) for row in points if row.model_seconds]
        if modelled:
            axes.plot(*zip(*modelled, strict=True), "--", color=line.get_color())
    name = rows[0].op.replace("_", "-")
    axes.set_title(
        f"{name}: time relative to {whose}, {counted(rows[0].ranks, 'rank')} on {counted(cores, 'core')}\n"
        "lower is faster; dashed: the model fitted to our algorithms",
        fontsize="medium",
    )
    axes.set_xscale("log", base=2)
    every = -(-len(seconds) // MOST_MARKS)
    marked = sorted(seconds)[::every]
    axes.set_xticks(marked, [f"{short(size)}\n{duration(seconds[size])}" for size in marked])
    axes.minorticks_off()
    axes.set_xlabel(f"size of the whole tensor (bytes), and {whose} time")
    axes.set_ylabel(f"time ÷ {whose} time")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def short(nbytes: int) -> str:
    """``64K``."""
    for unit, size in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g}{unit}"
    return str(nbytes)
