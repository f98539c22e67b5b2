"""Presentation of a benchmark: a table, a plot, and values for JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from paceline.core.messages import counted, duration
from paceline.core.output_files import new_figure, write_chart, write_file
from paceline.core.tables import new_table, print_table
from paceline.tools.bench.bench_command import BenchConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE = "gloo"
MOST_MARKS = 10
"""Maximum number of labels that fit below the axis."""
SPREAD = 2**0.5
"""Factor by which the points of one size are spread horizontally, so that error bars do not overlap."""
COLUMNS = ("bytes", "variant", "time µs", "±", "algbw", "busbw", "#wrong")
"""Columns as in nccl-tests. The title contains what all rows have in common."""


@dataclass(frozen=True)
class Row:
    """Times and bandwidths of a variant on one size.

    Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md). Algorithm bandwidth is the size of the whole tensor
    divided by the time. Bus bandwidth multiplies it by the minimum traffic of the collective relative to this size:
    2 (p−1)/p for an all-reduce, 1 for broadcast and reduce. It can be compared with the speed of the links for any
    number of ranks.
    """

    op: str
    variant: str
    ranks: int
    nbytes: int
    """Bytes of the whole tensor."""
    times: tuple[float, ...]
    """Seconds per call on the slowest rank, in each round."""
    wrong: int
    """Number of wrong elements on all ranks."""

    @property
    def seconds(self) -> float:
        """Median of :attr:`times`."""
        return statistics.median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of :attr:`times`."""
        if len(self.times) == 1:
            return self.times[0], self.times[0]
        # With few rounds, the exclusive method extrapolates beyond the measured times.
        lower, _, upper = statistics.quantiles(self.times, n=4, method="inclusive")
        return lower, upper

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to :attr:`seconds`."""
        lower, upper = self.quartiles
        return (upper - lower) / 2 / self.seconds

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth in GB/s."""
        return self.nbytes / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        """Bus bandwidth in GB/s."""
        return self.algbw * (2 * (self.ranks - 1) / self.ranks if self.op == "all_reduce" else 1.0)


def report(rows: Sequence[Row], cores: int, config: BenchConfig) -> None:
    """Print the tables and write the requested files."""
    for op in config.ops:
        print_table(table(op, [row for row in rows if row.op == op], cores), keys=2)
        print()
    write_file("--json", config.json, json.dumps(document(rows, cores), indent=2) + "\n")
    if config.plot is not None:
        write_chart("--plot", config.plot, plot(rows, cores))


def table(op: str, rows: Sequence[Row], cores: int) -> Table:
    """Return a table in the style of nccl-tests, with a line for each variant and size."""
    kind = "float32, sum" if "reduce" in op else "float32"
    title = f"{op} ({kind}), {counted(rows[0].ranks, 'rank')} on {counted(cores, 'core')}; bandwidths in GB/s"
    caption = f"time: median of {counted(len(rows[0].times), 'round')}; ±: half the distance between its quartiles"
    result = new_table(COLUMNS, title=title, caption=caption, words=("variant",), space=0)
    fastest = {size: min(row.seconds for row in rows if row.nbytes == size) for size in {row.nbytes for row in rows}}
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        result.add_row(
            str(row.nbytes),
            row.variant,
            f"{1e6 * row.seconds:.1f}",
            f"{row.spread:.0%}",
            f"{row.algbw:.3f}",
            f"{row.busbw:.3f}",
            str(row.wrong),
            style="bold" if row.seconds == fastest[row.nbytes] else "",
            end_section=following is not None and following.nbytes != row.nbytes,
        )
    return result


def document(rows: Sequence[Row], cores: int) -> dict[str, object]:
    """Return the values for JSON, in seconds and GB/s."""
    return {
        "version": 1,
        "ranks": rows[0].ranks,
        "cores": cores,
        "torch": torch.__version__,
        "rows": [
            asdict(row) | {name: getattr(row, name) for name in ("seconds", "quartiles", "algbw", "busbw")}
            for row in rows
        ],
    }


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
