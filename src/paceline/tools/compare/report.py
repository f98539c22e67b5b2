"""Presentation of a comparison: a table with notes, values for JSON, and a chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.core.output.charts import new_figure
from paceline.core.output.tables import new_table, print_table
from paceline.core.output.wording import counted, digits
from paceline.tools.compare.comparison import Row
from paceline.tools.compare.measured_run import SAMPLED, WARM_UP
from paceline.tools.compare.turn_taking import TURN

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _weights(row: Row) -> str:
    text = "other model" if row.weights_difference is None else f"{row.weights_difference:.0e}"
    return ("0" if row.weights_difference == 0 else text) + ("" if row.replicas_identical else "; RANKS DIFFER")


COLUMNS: dict[str, Callable[[Row], str]] = {
    "mode": lambda row: row.mode,
    "de-\nvices": lambda row: str(row.devices),
    "ms per\nstep": lambda row: digits(1e3 * row.seconds_per_step),
    "samples\nper s": lambda row: digits(row.samples_per_second),
    "speed-\nup": lambda row: f"{row.speedup:.2f}",
    "effi-\nciency": lambda row: f"{row.efficiency:.2f}",
    "MB per\nrank": lambda row: f"{row.memory_bytes / 1e6:,.0f}",
    "weights\ndiffer": _weights,
}
"""Columns of the table, which fits a terminal of 80 characters."""
EQUAL = 1e-6
"""Maximum relative difference of weights that a different order of float32 sums can explain."""


def show(rows: Sequence[Row], target: str, threads: int, steps: int) -> None:
    """Print the table and the notes."""
    print_table(table(rows, target), keys=2)
    Console().print("", *notes(rows, threads, steps), sep="\n", highlight=False)


def table(rows: Sequence[Row], target: str) -> Table:
    """Return a table with a row for each variant."""
    samples = f" of {rows[0].samples_per_step:,.0f} samples" if rows[0].samples_per_step else ""
    title = f"{target}: steps{samples} in {counted(len(rows), 'way')}"
    result = new_table(tuple(COLUMNS), title=title, words=("mode",), wraps=("weights\ndiffer",), space=0)
    for row in rows:
        result.add_row(*(cell(row) for cell in COLUMNS.values()))
    return result


def statistic(rows: Sequence[Row]) -> str:
    """Describe how the times are computed."""
    source = f"the median of {counted(len(rows[0].turns), 'turn')} of {counted(TURN, 'step')}"
    return f"Times: for {_base(rows)}, {source}; for others, that time multiplied by the median of their turn ratios."


def _base(rows: Sequence[Row]) -> str:
    return "single" if any(row.mode == "single" for row in rows) else rows[0].mode


def notes(rows: Sequence[Row], threads: int, steps: int) -> list[str]:
    """Return notes on the columns, and on whether all variants did the same work and learned the same weights."""
    listed = [
        statistic(rows),
        f"A device is a GPU, or {counted(threads, 'CPU thread')}. Speed-up: samples/s relative to {_base(rows)}; "
        "efficiency: speed-up divided by devices. paceline profile shows where the time goes.",
    ]
    # `not <=` instead of `>`, so that NaN counts as a difference.
    far = [row for row in rows if row.weights_difference is None or not row.weights_difference <= EQUAL]
    names = ", ".join(f"{row.mode} on {row.devices}" for row in far)
    listed.append(
        f"Weights after {WARM_UP + steps} steps, up to {SAMPLED:,} elements of each parameter: the largest difference "
        f"from {_base(rows)}, relative to the largest weight; "
        + (f"above {EQUAL:.0e} for {names}." if far else f"all equal to {EQUAL:.0e}.")
    )
    samples = [row.samples_per_step for row in rows if row.samples_per_step]
    if samples and max(samples) > 1.01 * min(samples):
        listed.append(
            "The modes used batches of different sizes, so they did different work; load data with "
            "paceline.data.DataLoader, whose batch_size is the total of all ranks."
        )
    return listed


def document(rows: Sequence[Row], target: str, threads: int) -> dict[str, object]:
    """Return the values for JSON, in seconds and bytes."""
    return {"target": target, "threads": threads, "times": statistic(rows), "rows": [asdict(row) for row in rows]}


def draw(rows: Sequence[Row], target: str) -> Figure:
    """Draw a bar for each variant; shorter is faster."""
    figure = new_figure(6.5, 1.8 + 0.55 * len(rows))
    title = f"{target}: time per step, median of {counted(len(rows[0].turns), 'turn')}"
    axes = figure.add_subplot(title=title, xlabel="ms; shorter is faster")
    names = [f"{row.mode}, {counted(row.devices, 'device')}" for row in rows]
    times = [1e3 * row.seconds_per_step for row in rows]
    bars = axes.barh(names, times)
    labels = [
        f"{digits(time)} ms\n{row.speedup:.2f} × {_base(rows)}, efficiency {row.efficiency:.2f}"
        for time, row in zip(times, rows, strict=True)
    ]
    axes.bar_label(bars, labels, padding=4, fontsize="small")
    # barh() draws the first bar at the bottom.
    axes.invert_yaxis()
    # Leave room for the label of the longest bar.
    axes.set_xlim(0, 1.8 * max(times))
    return figure
