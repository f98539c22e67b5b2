"""The plot of a benchmark: times relative to Gloo, with their quartiles."""

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
"""Maximum number of labels that fit below the axis."""
SPREAD = 2**0.5
"""Factor by which the points of one size are spread horizontally, so that error bars do not overlap."""


def plot(rows: Sequence[Row], cores: int) -> Figure:
    """Draw a panel for each collective."""
    ops = list(dict.fromkeys(row.op for row in rows))
    figure = new_figure(6.5, 5 * len(ops))
    for number, op in enumerate(ops, 1):
        _panel(figure.add_subplot(len(ops), 1, number), [row for row in rows if row.op == op], cores)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], cores: int) -> None:
    """Draw the relative times of one collective over the sizes, on logarithmic axes."""
    names = list(dict.fromkeys(row.variant for row in rows))
    reference = REFERENCE if REFERENCE in names else names[0]
    seconds = {row.nbytes: row.seconds for row in rows if row.variant == reference}
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for number, name in enumerate(names):
        points = [row for row in rows if row.variant == name]
        medians = [row.seconds / seconds[row.nbytes] for row in points]
        quartiles = [[quartile / seconds[row.nbytes] for quartile in row.quartiles] for row in points]
        bars = [
            [median - lower for median, (lower, _) in zip(medians, quartiles, strict=True)],
            [upper - median for median, (_, upper) in zip(medians, quartiles, strict=True)],
        ]
        sizes = [row.nbytes * SPREAD ** ((number + 0.5) / len(names) - 0.5) for row in points]
        axes.errorbar(sizes, medians, bars, fmt="o-", color=f"C{number}", markersize=4, capsize=2.5, label=name)
    axes.set_title(
        f"{rows[0].op.replace('_', '-')}: time relative to {reference}'s median, {counted(rows[0].ranks, 'rank')} on "
        f"{counted(cores, 'core')}\nlower is faster; points and bars: median and quartiles of "
        f"{counted(len(rows[0].times), 'round')}",
        fontsize="medium",
    )
    marked = sorted(seconds)[:: -(-len(seconds) // MOST_MARKS)]
    axes.set_xticks(marked, [f"{short(size)}\n{duration(seconds[size])}" for size in marked])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"size of the whole tensor (bytes), and {reference}'s median time")
    axes.set_ylabel(f"time ÷ {reference}'s median time")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)


def short(nbytes: int) -> str:
    """Return a size as ``64K``."""
    for unit, size in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g}{unit}"
    return str(nbytes)
