"""Results of a comparison: a table with notes, and values for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.core.messages import counted, digits
from paceline.core.tables import new_table, print_table
from paceline.tools.compare.measured_run import SAMPLED, TURN, WARM_UP
from paceline.tools.compare.modes import Way

EQUAL = 1e-6
"""Maximum relative difference of weights that a different order of float32 sums can explain."""


@dataclass(frozen=True)
class Row:
    """The results of one variant.

    The baseline is the mode ``single`` or, without it, the first variant. Its time per step is the median over its
    turns. The time of any other variant is the baseline's time multiplied by the median of their turn-by-turn ratios,
    because only times of the same turn are comparable.
    """

    mode: str
    devices: int
    ranks: int
    turns: tuple[float, ...]
    """Seconds per step of the slowest rank, in each turn."""
    seconds_per_step: float
    samples_per_step: float | None
    """Mean number over the timed steps, of all devices together; None if the model's inputs contain no tensor."""
    samples_per_second: float | None
    """:attr:`samples_per_step` divided by :attr:`seconds_per_step`."""
    speedup: float
    """:attr:`samples_per_second` relative to the baseline."""
    efficiency: float
    """:attr:`speedup` divided by the ratio of the numbers of devices."""
    memory_bytes: int
    """Peak memory of the rank with the highest peak."""
    replicas_identical: bool
    """Whether the final weights of all ranks are bit-identical."""
    weights_difference: float | None
    """Largest deviation from the baseline's weights, relative to its largest weight; None if the models differ."""


def figures(
    ways: Sequence[Way], records: Sequence[Mapping[str, Any]], weights: Sequence[Mapping[str, Tensor]]
) -> list[Row]:
    """Return a row for each variant, given its record and weights."""
    start = next((number for number, way in enumerate(ways) if way.mode == "single"), 0)
    base = _row(ways[start], records[start], None, 0.0)
    return [
        base if way == ways[start] else _row(way, record, base, weights_difference(weights[start], own_weights))
        for way, record, own_weights in zip(ways, records, weights, strict=True)
    ]


def _row(way: Way, record: Mapping[str, Any], base: Row | None, difference: float | None) -> Row:
    ranks = record["ranks"]
    steps = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    turns = [fmean(steps[start : start + TURN]) for start in range(0, len(steps), TURN)]
    if base is None:
        seconds = median(turns)
    else:
        # A median, because an evaluation or a checkpoint may fall between two steps.
        seconds = base.seconds_per_step * median(time / base_ for time, base_ in zip(turns, base.turns, strict=True))
    samples = sum(rank["samples"] for rank in ranks) / len(steps) or None
    speedup = 1.0 if base is None else base.seconds_per_step / seconds
    if samples and base and base.samples_per_step:  # otherwise, assume that steps have equally many samples
        speedup *= samples / base.samples_per_step
    return Row(
        way.mode,
        way.devices,
        len(ranks),
        turns=tuple(turns),
        seconds_per_step=seconds,
        samples_per_step=samples,
        samples_per_second=samples / seconds if samples else None,
        speedup=speedup,
        efficiency=speedup * (base.devices if base else way.devices) / way.devices,
        memory_bytes=max(rank["memory"] for rank in ranks),
        replicas_identical=len({rank["sha256"] for rank in ranks}) == 1,
        weights_difference=difference,
    )


def weights_difference(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> float | None:
    """Return the largest difference relative to the largest weight in `reference`; None if the models differ."""
    if {name: tensor.shape for name, tensor in reference.items()} != {name: w.shape for name, w in weights.items()}:
        return None
    names = [name for name, tensor in weights.items() if tensor.numel()]
    differences = [float((weights[name].double() - reference[name].double()).abs().max()) for name in names]
    largest = max((float(reference[name].double().abs().max()) for name in names), default=0.0)
    return max(differences, default=0.0) / (largest or 1.0)


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
    return {"version": 1, "target": target, "threads": threads, "times": statistic(rows), "rows": [*map(asdict, rows)]}
