"""Presentation of a plan: tables, JSON and a chart."""

from __future__ import annotations

import json as json_text
import math

from rich.console import Console
from rich.table import Table

from paceline.core.output.charts import write_chart
from paceline.core.output.tables import new_table, print_table
from paceline.core.output.wording import counted, digits, duration
from paceline.planner.predictions import WORTH
from paceline.tools.plan.outlook import Outlook, document
from paceline.tools.plan.plot import plot_outlook


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
