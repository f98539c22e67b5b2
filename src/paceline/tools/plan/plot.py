"""Chart of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.output.charts import new_figure
from paceline.planner.predictions import RULE_OF_THUMB
from paceline.tools.plan.outlook import Outlook

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_outlook(outlook: Outlook) -> Figure:
    """Draw efficiency with its interval and the rule of thumb, throughput, cost, and time against cost, if known."""
    entries = outlook.entries
    counts = [entry.prediction.ranks for entry in entries]
    lines = [("samples per second", [entry.prediction.samples_per_s for entry in entries])]
    if costs := [entry.cost for entry in entries if entry.cost is not None]:
        lines.append(("cost of an epoch" if entries[0].epoch_s else "cost of a million samples", costs))
    if outlook.trainings:
        lines.append(("training to the same loss", [training.time for training in outlook.trainings]))
    figure = new_figure(7, 4 + 2.5 * len(lines))
    first, *others = figure.subplots(1 + len(lines), 1, sharex=True, height_ratios=[1.6] + [1] * len(lines))
    _efficiency(first, outlook, counts)
    others[0].set_yscale("log")
    for axes, (name, values) in zip(others, lines, strict=True):
        axes.plot(counts, values, "o-", color="C0", markersize=3)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    if outlook.trainings:
        _time_and_cost(others[-1], outlook, counts)
    for axes in (first, *others):
        if outlook.stops_paying is not None:
            axes.axvline(outlook.stops_paying, color="C3", linestyle=":", linewidth=1)
    others[-1].set_xscale("log", base=2)
    others[-1].set_xticks(counts, [f"{count:,}" for count in counts], rotation=45)
    others[-1].set_xlabel("devices")
    return figure


def _time_and_cost(axes: Axes, outlook: Outlook, counts: Sequence[int]) -> None:
    """Add the cost to the time of trainings to the same loss, and mark the knee."""
    axes.plot(counts, [training.cost for training in outlook.trainings], "o-", color="C4", markersize=3)
    axes.axvline((outlook.job.critical_batch or 0.0) / outlook.job.workload.samples, color="C2", linestyle="--")
    axes.legend(["time", "device hours", f"knee: {outlook.job.critical_batch:,.0f} samples"])
    axes.set_yscale("log")


def _efficiency(axes: Axes, outlook: Outlook, counts: Sequence[int]) -> None:
    predictions = [entry.prediction for entry in outlook.entries]
    for first, last, low, high in RULE_OF_THUMB:
        if first <= max(counts):
            ends, label = [first, min(last or math.inf, max(counts))], "rule of thumb" if first == 2 else None
            axes.fill_between(ends, low, high, color="C1", alpha=0.3, linewidth=0, label=label)
    bounds = [one.low for one in predictions], [min(1.0, one.high) for one in predictions]
    axes.fill_between(counts, *bounds, color="C0", alpha=0.2, linewidth=0, label="80 % interval")
    axes.plot(counts, [one.efficiency for one in predictions], "o-", color="C0", markersize=3, label="predicted")
    if outlook.stops_paying is not None:
        axes.plot([], [], ":", color="C3", label=f"stops paying: {outlook.stops_paying:,}")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("scaling efficiency")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
