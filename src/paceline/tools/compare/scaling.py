"""A comparison over numbers of ranks: speed-up, efficiency, and the share of communication, as tables and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.core.output.charts import new_figure
from paceline.core.output.tables import new_table, print_table
from paceline.core.output.wording import counted, digits
from paceline.tools.compare.comparison import Row
from paceline.tools.compare.measured_run import SAMPLED, WARM_UP
from paceline.tools.compare.report import statistic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EQUAL = 1e-6
"""Weights that differ by at most this share of the largest one are equal but for the order of sums in float32."""


@dataclass(frozen=True)
class Point:
    """The figures of one number of ranks."""

    row: Row
    """One process, or ranks with an optimizer step for every batch."""
    accumulated: Row | None
    """The same ranks with a step for every second batch; None for one process, and for scripts."""
    weights_difference: float | None
    """Largest difference of a weight from that of one process, by the largest weight; None for one process itself, and
    for another model."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.row.ranks


def show(points: Sequence[Point], target: str, threads: int, steps: int) -> None:
    """Print two tables, each of which fits a terminal of 80 characters, and the notes."""
    print_table(speed_table(points, target))
    print()
    print_table(communication_table(points))
    Console().print("", *notes(points, threads, steps), sep="\n", highlight=False)


def speed_table(points: Sequence[Point], target: str) -> Table:
    """Lay out how fast the ranks are together."""
    columns = ["ranks", "ms per\nbatch", "samples/s", "speed-up", "efficiency"]
    accumulates = _accumulates(points)
    columns += ["accumulated:\nms per batch", "speed-up"] if accumulates else []
    table = new_table(columns, title=_title(points, target))
    for point in points:
        row, other = point.row, point.accumulated
        cells = [
            str(point.ranks),
            digits(1e3 * row.seconds_per_batch),
            digits(row.samples_per_second),
            _number(row.speedup),
            _number(row.efficiency),
        ]
        if accumulates:
            cells += ["", ""] if other is None else [digits(1e3 * other.seconds_per_batch), _number(other.speedup)]
        table.add_row(*cells)
    return table


def communication_table(points: Sequence[Point]) -> Table:
    """Lay out which share of a step is communication, with and without accumulation, and how far the weights are."""
    accumulates, occupancies = _accumulates(points), [point.row.sm_occupancy for point in points]
    more = ["accu-\nmulated"] if accumulates else []
    columns = ["ranks", "all-reduce", *more, "exposed", *more, "bubble"]
    columns += ["SM occu-\npancy"] if any(occupancies) else []
    table = new_table([*columns, "weights"], words=("weights",), wraps=("weights",))
    for point, occupancy in zip(points, occupancies, strict=True):
        rows = [point.row, point.accumulated] if accumulates else [point.row]
        cells = [_share(None if row is None else row.all_reduce_share) for row in rows]
        cells += [_share(_of_step(row, "exposed_seconds")) for row in rows]
        cells.append(_share(_of_step(point.row, "bubble_seconds")))
        cells += [_share(occupancy)] if any(occupancies) else []
        differ = "" if point.row.replicas_identical else "; RANKS DIFFER"
        table.add_row(str(point.ranks), *cells, point.row.weights + differ)
    return table


def notes(points: Sequence[Point], threads: int, steps: int) -> list[str]:
    """Explain the columns, and say what is compared of the weights and whether it is equal."""
    listed = [
        statistic([point.row for point in points]),
        f"A rank has a GPU, or {counted(threads, 'CPU thread')} with any number of ranks. speed-up: samples/s by that "
        "of one process; efficiency: that by the ranks.",
        "Shares of a step: all-reduce, of its gradients while nothing else runs; exposed, what it waits for "
        "communication; bubble, what ranks wait for the one that comes last.",
    ]
    if _accumulates(points):
        listed.append("Accumulated: an optimizer step, and an all-reduce, for every second batch.")
    if any(point.row.sm_occupancy for point in points):
        listed.append("SM occupancy: warps that were active by those that could be, mean of the ranks' GPUs, by NVML.")
    # Not "greater than", which NaN never is.
    far = [each.ranks for each in points[1:] if each.weights_difference is None or not each.weights_difference <= EQUAL]
    verdict = f"equal to {EQUAL:.0e}" if not far else f"further than {EQUAL:.0e} for {', '.join(map(str, far))} ranks"
    listed.append(
        f"Weights: after {WARM_UP + steps} steps of the same global batches with a step for every batch, up to "
        f"{SAMPLED:,} elements of each parameter beside those of one process, by the largest weight: {verdict}."
    )
    return listed


def document(points: Sequence[Point], target: str, threads: int) -> dict[str, object]:
    """Return the figures as values for JSON, in seconds and bytes."""
    return {
        "target": target,
        "threads": threads,
        "times": statistic([point.row for point in points]),
        "ranks": [{"ranks": point.ranks, **asdict(point)} for point in points],
    }


def draw(points: Sequence[Point], target: str) -> Figure:
    """Draw the speed-up over the ranks beside the ideal one, and the share of communication."""
    figure = new_figure(8, 3.8)
    figure.suptitle(_title(points, target), fontsize="medium")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    counts = [point.ranks for point in points]
    left.plot(counts, counts, "--", color="0.6", label="ideal")
    ways = {"a step for every batch": [point.row for point in points]}
    if _accumulates(points):
        ways["for every second"] = [point.accumulated for point in points if point.accumulated is not None]
    for number, (label, rows) in enumerate(ways.items()):
        left.plot([row.ranks for row in rows], [row.speedup for row in rows], "o-", color=f"C{number}", label=label)
    left.set(xlabel="ranks, and efficiency", ylabel="speed-up", xticks=counts, ylim=(0, None))
    left.set_xticklabels([f"{point.ranks}\n{_number(point.row.efficiency)}" for point in points])
    left.legend(frameon=False, fontsize="small", loc="upper left")
    _draw_communication(right, [point for point in points if point.ranks > 1])
    return figure


def _draw_communication(axes: Axes, points: Sequence[Point]) -> None:
    """Draw a bar of the all-reduce's share for each number of ranks, and one beside it with accumulation."""
    ways = [[point.row for point in points]]
    if _accumulates(points):
        ways.append([point.accumulated for point in points if point.accumulated is not None])
    width = 0.8 / len(ways)
    for number, rows in enumerate(ways):
        places = [place + (number + 0.5) * width - 0.4 for place in range(len(rows))]
        bars = axes.bar(places, [100 * (row.all_reduce_share or 0) for row in rows], width, color=f"C{number}")
        axes.bar_label(bars, fmt="%.1f %%", fontsize="small", padding=2)
    axes.set(xlabel="ranks", ylabel="all-reduce of a step (%)", xticks=range(len(points)))
    axes.set_xticklabels([str(point.ranks) for point in points])
    axes.margins(y=0.15)


def _title(points: Sequence[Point], target: str) -> str:
    rows = points[0].row.largest_batch
    return f"{target}: the same global batches" + (f" of {rows:,} samples" if rows else "") + " on more ranks"


def _accumulates(points: Sequence[Point]) -> bool:
    return any(point.accumulated is not None for point in points)


def _of_step(row: Row | None, name: str) -> float | None:
    """Return a time of a row's step as a share of the step."""
    seconds: float | None = None if row is None else getattr(row, name)
    return None if row is None or seconds is None else seconds / row.seconds_per_step


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
