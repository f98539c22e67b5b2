"""What a plan says about a job: tables, JSON and a chart."""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from paceline.core.messages import counted, digits, duration
from paceline.core.output_files import new_figure, write_chart
from paceline.core.tables import new_table, print_table
from paceline.planner.critical_batch import Training, trainings
from paceline.planner.goodput import Goodput
from paceline.planner.predictions import RULE_OF_THUMB, WORTH, Job, Prediction, effects, stops_paying

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Entry:
    """One number of devices."""

    prediction: Prediction
    goodput: Goodput
    epoch_s: float | None
    """Seconds of an epoch, without time lost to failures; None if the samples of an epoch are unknown."""
    cost: float | None
    """Price of an epoch, or of a million samples; None without a price."""


@dataclass(frozen=True)
class Outlook:
    """A plan."""

    job: Job
    entries: Sequence[Entry]
    stops_paying: int | None
    """Devices that are not worth doubling; None if that is beyond the largest number."""
    changed_on: int
    """Devices for which `effects` holds."""
    effects: dict[str, float]
    trainings: Sequence[Training]
    """To the same loss, for each entry; empty if the critical batch size is unknown."""


def look_ahead(
    job: Job,
    counts: Sequence[int],
    price: float | None,
    epoch: float | None,
    speedup: float | None,
    goodput_on: Callable[[int], Goodput],
) -> Outlook:
    """Return the plan for `counts` devices, at a `price` per device and hour; `epoch` is its number of samples."""
    entries = []
    for count in counts:
        prediction = job.predict(count)
        hosts = math.ceil(count / job.cluster.devices_per_host)
        seconds = None if epoch is None else prediction.seconds(epoch)
        cost = None if price is None else price * count * prediction.seconds(epoch or 1e6) / 3600
        entries.append(Entry(prediction, goodput_on(hosts), seconds, cost))
    stops = stops_paying(job, max(counts))
    changed_on = min(2 * stops, max(counts)) if stops else max(counts)
    changed = effects(job, changed_on, speedup) if changed_on > 1 else {}
    predictions = [entry.prediction for entry in entries]
    steps = [(made.ranks, made.ranks * job.workload.samples, made.step.length_s) for made in predictions]
    compared = [] if job.critical_batch is None else trainings(steps, job.critical_batch)
    return Outlook(job, entries, stops, changed_on, changed, compared)


def document(outlook: Outlook) -> dict[str, Any]:
    """Return the plan for JSON."""
    return {
        "samples_per_device": outlook.job.workload.samples,
        "devices_per_host": outlook.job.cluster.devices_per_host,
        "links": {"inside": asdict(outlook.job.cluster.inside), "between": asdict(outlook.job.cluster.between)},
        "calibration": asdict(outlook.job.calibration),
        "predictions": [
            {
                "devices": entry.prediction.ranks,
                "hosts": entry.goodput.hosts,
                "step_s": entry.prediction.step.length_s,
                "exposed_s": entry.prediction.step.exposed_s,
                "samples_per_s": entry.prediction.samples_per_s,
                "efficiency": entry.prediction.efficiency,
                "interval": [entry.prediction.low, entry.prediction.high],
                "progress_per_sample": entry.prediction.progress,
                "goodput": asdict(entry.goodput),
                "epoch_s": entry.epoch_s,
                "cost": entry.cost,
            }
            for entry in outlook.entries
        ],
        "stops_paying": outlook.stops_paying,
        "critical_batch": outlook.job.critical_batch,
        "trainings": [asdict(training) for training in outlook.trainings],
        "effects": {"devices": outlook.changed_on, "savings": outlook.effects},
    }


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


def report(outlook: Outlook, json: bool, plot: str | None) -> None:
    """Print the plan, and draw it if asked to."""
    if json:
        print(json_text.dumps(document(outlook), indent=2))
    else:
        print_table(table(outlook))
        print()
        Console().print(*notes(outlook), sep="\n", soft_wrap=True, highlight=False, markup=False)
        if outlook.effects:
            print()
            print_table(effects_table(outlook))
        if outlook.trainings:
            print()
            print_table(trainings_table(outlook))
    if plot is not None:
        write_chart("--plot", plot, plot_outlook(outlook))


def table(outlook: Outlook) -> Table:
    """Return a row for each number of devices."""
    has_epoch, has_cost = (outlook.entries[0].epoch_s is not None, outlook.entries[0].cost is not None)
    columns = ["devices", "hosts", "step", "exposed", "samples/s", "efficiency", "80 % interval", "useful time"]
    extra = ["epoch"] * has_epoch + [("cost of an epoch" if has_epoch else "cost of 1M samples")] * has_cost
    result = new_table(columns + extra)
    for entry in outlook.entries:
        prediction = entry.prediction
        cells = [
            f"{prediction.ranks:,}",
            f"{entry.goodput.hosts:,}",
            duration(prediction.step.length_s),
            duration(prediction.step.exposed_s),
            digits(prediction.samples_per_s),
            f"{prediction.efficiency:.1%}",
            f"{prediction.low:.0%} to {min(prediction.high, 1.0):.0%}" if prediction.ranks > 1 else "",
            f"{entry.goodput.useful:.1%}",
        ]
        cells += [] if entry.epoch_s is None else [duration(entry.epoch_s)]
        cells += [] if entry.cost is None else [digits(entry.cost)]
        result.add_row(*cells, style="bold" if prediction.ranks == outlook.stops_paying else "")
    return result


def notes(outlook: Outlook) -> list[str]:
    """Return what the table does not say."""
    cluster, last = outlook.job.cluster, outlook.entries[-1]
    most, stops = last.prediction.ranks, outlook.stops_paying
    lines = [f"Doubling the devices pays up to {most:,}, the largest number in this plan."]
    if stops is not None:
        on = counted(f"{stops:,}", "device")
        lines = [f"Stops paying at {on}: twice as many are less than {WORTH} times as fast."]
    if last.goodput.hosts > 1:
        local = f", with {cluster.devices_per_host} devices over {cluster.inside.name}"
        lines.append(f"Hosts are connected over {cluster.between.name}{local if cluster.devices_per_host > 1 else ''}.")
    hosts, good = counted(f"{last.goodput.hosts:,}", "host"), last.goodput
    lines.append(
        f"On {hosts}, a failure stops the job every {duration(good.mtbf_s)}; saving every {duration(good.interval_s)} "
        "loses the least time."
    )
    if (knee := outlook.job.critical_batch) is not None:
        devices = counted(max(1, round(knee / outlook.job.workload.samples)), "device")
        lines.append(
            f"The knee of time against cost is at a global batch of {digits(knee)} samples, the critical batch size: "
            f"about {devices}."
        )
    return lines


def trainings_table(outlook: Outlook) -> Table:
    """Return time and cost of a training to the same loss, relative to the least, with the knee in bold."""
    result = new_table(["devices", "global batch", "steps", "samples", "time", "device hours"])
    knee = outlook.job.critical_batch or 0.0
    nearest = min(outlook.trainings, key=lambda training: abs(math.log(training.batch / knee)))
    for training in outlook.trainings:
        figures = (training.batch, training.steps, training.samples, training.time, training.cost)
        style = "bold" if training is nearest else ""
        result.add_row(f"{training.devices:,}", *map(digits, figures), style=style)
    return result


def effects_table(outlook: Outlook) -> Table:
    """Return the share of the time per sample that each change saves."""
    title = f"changes on {counted(f'{outlook.changed_on:,}', 'device')}"
    result = new_table([title, "save"], words=(title,))
    for change, saving in outlook.effects.items():
        result.add_row(change, f"{saving:.1%}")
    return result
