"""Figures of a comparison: computed from the modes' records by pure functions, and shown as a table and a chart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table
from torch import Tensor

from paceline.core.output.charts import new_figure
from paceline.core.output.wording import counted
from paceline.tools.compare.modes import MODES, devices_of
from paceline.tools.compare.turn_taking import TURN

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """The figures of one mode."""

    mode: str
    devices: int
    """Devices that it trains on."""
    ranks: int
    """Processes."""
    seconds: float
    """Time of all timed steps together."""
    seconds_per_batch: float
    """Median; a batch is the loader's global batch, and a whole step where a program has several wrapped models."""
    turns: tuple[float, ...]
    """Seconds per batch in each turn."""
    samples_per_second: float | None
    """Over all devices; None where the model's inputs hold no tensor."""
    rows_per_batch: float | None
    """Samples of a batch, over all devices; the mean, because the last one of an epoch may be short."""
    largest_batch: int | None
    """Samples of the largest batch, over all devices: equal where modes do the same work."""
    speedup: float | None
    """Throughput relative to the mode ``single``, median over the turns; None where that did not run."""
    efficiency: float | None
    """Throughput divided by that of ``single`` and by the devices."""
    all_reduce_share: float | None
    """Time of all-reducing a step's gradients while nothing else runs, divided by the time of a step; median over the
    turns."""
    waiting_share: float | None
    """Time that the rank which waits least waits for communication, divided by the time of a step; None where the
    wrapper does not count it."""
    memory_bytes: int
    """Peak memory of the rank that needs most."""
    replicas_identical: bool
    """Whether all ranks ended with the same bits."""
    weights: str
    """Comparison of the weights with those of the first mode, in words."""
    wrappers: int
    """Number of models that the program wraps."""


def figures(name: str, record: Mapping[str, Any], nproc: int, single: Row | None, weights: str) -> Row:
    """Return the row of the mode called `name`, whose ranks wrote `record`.

    Args:
        name: one of the modes.
        record: the record of :class:`~paceline.tools.compare.measured_run.Meter`.
        nproc: number of devices of the comparison.
        single: the row of the mode ``single``, if that ran before.
        weights: see :attr:`Row.weights`.
    """
    ranks, mode = record["ranks"], MODES[name]
    steps = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    batches = [max(counts) for counts in zip(*(rank["batches"] for rank in ranks), strict=True)]
    # Medians, because an evaluation or a checkpoint may lie between two steps.
    # Modes are compared turn by turn, because times of one turn were measured side by side.
    in_turns = median_of_turns(time / count for time, count in zip(steps, batches, strict=True))
    per_batch = median(time / count for time, count in zip(steps, batches, strict=True))
    rows = sum(sum(rank["rows"]) for rank in ranks) / sum(batches) or None
    devices = devices_of(name, nproc)
    waits = mode.wrapper == "paceline" and len(ranks) > 1
    gain = None
    if single is not None:
        # Where rows are not known, the batches of all modes are taken for equal.
        more = rows / single.rows_per_batch if rows and single.rows_per_batch else 1.0
        gain = more * median(one / this for one, this in zip(single.turns, in_turns, strict=True))
    reductions = zip(record["all_reduce_seconds"], median_of_turns(steps), strict=True)
    return Row(
        name,
        devices,
        len(ranks),
        seconds=sum(steps),
        seconds_per_batch=per_batch,
        turns=tuple(in_turns),
        samples_per_second=rows / per_batch if rows else None,
        rows_per_batch=rows,
        largest_batch=sum(rank["largest"] for rank in ranks) or None,
        speedup=1.0 if name == "single" else gain,
        efficiency=1.0 if name == "single" else None if gain is None else gain / devices,
        all_reduce_share=median(alone / step for alone, step in reductions) if len(ranks) > 1 else None,
        waiting_share=min(rank["waited"] for rank in ranks) / sum(steps) if waits else None,
        memory_bytes=max(rank["memory"] for rank in ranks),
        replicas_identical=len({rank["sha256"] for rank in ranks}) == 1,
        weights=weights,
        wrappers=record["wrappers"],
    )


def median_of_turns(values: Iterable[float]) -> list[float]:
    """Return the median of each turn's steps, given a value for every step."""
    listed = list(values)
    return [median(listed[start : start + TURN]) for start in range(0, len(listed), TURN)]


def compare_weights(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Return how far `weights` are from those of the first mode: equal, or by which share of the largest they differ.

    Both hold the same sample of each parameter.
    """
    if reference.keys() != weights.keys():
        return "another model"
    if all(reference[name].equal(tensor) for name, tensor in weights.items()):
        return "equal"
    largest = max(float(tensor.abs().max()) for tensor in reference.values() if tensor.numel())
    difference = max(
        float((tensor.double() - reference[name].double()).abs().max())
        for name, tensor in weights.items()
        if tensor.numel()
    )
    return f"differ by {difference / largest:.0e}" if largest else f"differ by {difference:.0e}, absolutely"


def table_of(rows: Sequence[Row], target: str, threads: int) -> Table:
    """Lay the rows out for people."""
    title = f"{target}: the same work in {len(rows)} ways"
    table = Table(title=title, caption="\n".join(_notes(rows, threads)), caption_justify="left")
    table.add_column("mode", no_wrap=True)
    for name in (
        "devices",
        "seconds",
        "ms per batch",
        "samples/s",
        "speed-up",
        "efficiency",
        "all-reduce",
        "waiting",
        "MB per rank",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("weights")
    for row in rows:
        differ = "" if row.replicas_identical else "; RANKS DIFFER"
        table.add_row(
            row.mode,
            str(row.devices),
            f"{row.seconds:.2f}",
            f"{1e3 * row.seconds_per_batch:,.1f}",
            _shown(row.samples_per_second, ",.0f" if (row.samples_per_second or 0) >= 10 else ".2g"),
            _shown(row.speedup, ".2f"),
            _shown(row.efficiency, ".2f"),
            _shown(row.all_reduce_share, ".1%"),
            _shown(row.waiting_share, ".1%"),
            f"{row.memory_bytes / 1e6:,.0f}",
            row.weights + differ,
        )
    return table


def _notes(rows: Sequence[Row], threads: int) -> list[str]:
    """Explain the columns, and whether the modes can be compared."""
    notes = [
        f"A device is a GPU, or {counted(threads, 'CPU thread')}. Efficiency: throughput by that of "
        "single and by the devices.",
        "All-reduce: the time of all-reducing the gradients while nothing else runs, by the time of a step. Waiting: "
        "the part of it that backward could not hide.",
        f"Weights are compared with those of {rows[0].mode}.",
    ]
    if rows[0].wrappers > 1:
        notes.append(
            f"The program wraps {rows[0].wrappers} models: a batch is a step of all their optimizers; all-reduce, "
            "waiting and weights are those of all models together."
        )
    if _rows_differ([row.largest_batch for row in rows]):
        notes.append(
            "Batches differ in size, so the modes did different work: take them from paceline.data.DataLoader, whose "
            "batch_size is that of all ranks together."
        )
    return notes


def _rows_differ(rows: Sequence[float | None]) -> bool:
    """Return whether modes were given batches of different size, such as by a script whose batch size is a rank's."""
    known = [row for row in rows if row]
    return bool(known) and max(known) > 1.01 * min(known)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


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
    axes.bar_label(bars, [_bar_label(row) for row in rows], padding=4, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.4)
    if any(waiting):
        axes.legend(frameon=False)
    return figure


def _bar_label(row: Row) -> str:
    time = f"{1e3 * row.seconds_per_batch:,.1f} ms"
    if row.speedup is None or row.efficiency is None:
        return time
    return f"{time}\n{row.speedup:.2f} × one device, efficiency {row.efficiency:.2f}"
