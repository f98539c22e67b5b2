"""What a plan says about a job: tables and JSON."""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from paceline.core.messages import counted, digits, duration, nbytes
from paceline.core.tables import new_table, print_table
from paceline.planner.critical_batch import Training, trainings
from paceline.planner.goodput import Goodput
from paceline.planner.hardware import GBIT
from paceline.planner.outer_steps import CHEAP, OuterSteps, outer_steps
from paceline.planner.predictions import WORTH, Job, Prediction, Workload, effects, stops_paying
from paceline.planner.replica_memory import NO_FIT, ReplicaMemory


@dataclass(frozen=True)
class Plan:
    """A job, and what is known about it."""

    job: Job
    memory: ReplicaMemory
    capacity: float = math.inf
    """Bytes of a device's memory; infinite if unknown."""
    assumed: str = ""
    """The assumed speed of a device; empty if it was measured."""
    in_half: tuple[str, Workload] | None = None
    """The device's half precision, and the same step in it, if that is faster."""
    headlines: dict[str, str] = field(default_factory=dict)
    """The headline of each profile, by its number of ranks."""
    unreliable: dict[str, str] = field(default_factory=dict)
    """Why a profile is unreliable, likewise."""


class Price(NamedTuple):
    """Price of a device per hour."""

    value: float
    unit: str


@dataclass(frozen=True)
class Entry:
    """One number of devices."""

    prediction: Prediction
    goodput: Goodput
    memory: float
    """Bytes on a device."""
    remedy: str
    """The smallest change that makes the replica fit; empty if it fits. Times and costs do not include it."""
    epoch_s: float | None
    """Seconds of an epoch, without time lost to failures; None if its samples are unknown, or if nothing fits."""
    cost: float | None
    """Price of an epoch, or of a million samples; None without a price, or if nothing fits."""


@dataclass(frozen=True)
class Outlook:
    """A plan for several numbers of devices."""

    plan: Plan
    entries: Sequence[Entry]
    samples: float | None
    """Samples of an epoch; None if unknown."""
    price: Price | None
    stops_paying: int | None
    """Devices that are not worth doubling; None if that is beyond the largest number."""
    changed_on: int
    """Devices for which `effects` holds."""
    effects: dict[str, float]
    trainings: Sequence[Training]
    """To the same loss, for each entry; empty if the critical batch size is unknown."""
    outer: OuterSteps | None = None
    """Comparison with averaging every H steps; None without ``--sync-every``."""


def look_ahead(
    plan: Plan,
    counts: Sequence[int],
    price: Price | None,
    samples: float | None,
    goodput_on: Callable[[int], Goodput],
    sync_every: int | None = None,
) -> Outlook:
    """Return the outlook for `counts` devices and an epoch of `samples`."""
    entries, job = [], plan.job
    for count in counts:
        prediction, remedy = job.predict(count), plan.memory.remedy(count, plan.capacity)
        is_possible = remedy != NO_FIT
        seconds = prediction.seconds(samples) if samples and is_possible else None
        cost = price.value * count * prediction.seconds(samples or 1e6) / 3600 if price and is_possible else None
        goodput = goodput_on(job.cluster.hosts(count))
        entries.append(Entry(prediction, goodput, plan.memory.total(count), remedy, seconds, cost))
    stops = stops_paying(job, max(counts), lambda count: goodput_on(job.cluster.hosts(count)).useful)
    changed_on = min(2 * stops, max(counts)) if stops else max(counts)
    changed = effects(job, changed_on, plan.in_half) if changed_on > 1 else {}
    predictions = [entry.prediction for entry in entries]
    steps = [(made.ranks, made.ranks * job.workload.samples, made.step.length_s) for made in predictions]
    compared = [] if job.critical_batch is None else trainings(steps, job.critical_batch)
    outer = None if sync_every is None else outer_steps(job, counts, sync_every)
    return Outlook(plan, entries, samples, price, stops, changed_on, changed, compared, outer)


def document(outlook: Outlook) -> dict[str, Any]:
    """Return the outlook for JSON."""
    plan, job = outlook.plan, outlook.plan.job
    return {
        "version": 1,
        "samples_per_device": job.workload.samples,
        "devices_per_host": job.cluster.devices_per_host,
        "assumed_speed": plan.assumed or None,
        "speed_interval": list(job.speed),
        "links": {"inside": asdict(job.cluster.inside), "between": asdict(job.cluster.between)},
        "calibration": asdict(job.calibration),
        "headlines": plan.headlines,
        "unreliable": plan.unreliable,
        "memory_of_device": None if math.isinf(plan.capacity) else plan.capacity,
        "price_unit": outlook.price and outlook.price.unit,
        "predictions": [_row(entry) for entry in outlook.entries],
        "stops_paying": outlook.stops_paying,
        "critical_batch": job.critical_batch,
        "trainings": [asdict(training) for training in outlook.trainings],
        "effects": {"devices": outlook.changed_on, "savings": outlook.effects},
        "outer_steps": outlook.outer and asdict(outlook.outer),
    }


def _row(entry: Entry) -> dict[str, Any]:
    made, step = entry.prediction, entry.prediction.step
    return {
        "devices": made.ranks,
        "hosts": entry.goodput.hosts,
        "step_s": step.length_s,
        "step_s_interval": _ends(made, step.length_s),
        **asdict(step),
        "samples_per_s": made.samples_per_s,
        "samples_per_s_interval": [made.samples_per_s * made.slowest, made.samples_per_s * made.fastest],
        "efficiency": made.efficiency,
        "interval": [made.low, made.high],
        "progress_per_sample": made.progress,
        "memory": entry.memory or None,
        "fits": not entry.remedy if entry.memory else None,
        "remedy": entry.remedy or None,
        "goodput": asdict(entry.goodput),
        "epoch_s": entry.epoch_s,
        "epoch_s_interval": entry.epoch_s and _ends(made, entry.epoch_s),
        "cost": entry.cost,
        "cost_interval": entry.cost and _ends(made, entry.cost),
    }


def report(outlook: Outlook, json: bool) -> None:
    """Print the plan."""
    if json:
        print(json_text.dumps(document(outlook), indent=2))
        return
    print_table(table(outlook))
    print()
    Console().print(*notes(outlook), sep="\n", soft_wrap=True, highlight=False, markup=False)
    tables = [times_table(outlook)]
    tables += [effects_table(outlook)] if outlook.effects else []
    tables += [trainings_table(outlook)] if outlook.trainings else []
    tables += [outer_table(outlook.outer)] if outlook.outer else []
    for one in tables:
        print()
        print_table(one)


def _cost_title(outlook: Outlook) -> str:
    assert outlook.price is not None
    return f"cost of {'an epoch' if outlook.samples else '1M samples'} ({outlook.price.unit})"


def table(outlook: Outlook) -> Table:
    """Return a row for each number of devices. If the speed of a device is assumed, intervals replace figures."""
    columns = ["devices", "hosts", "samples/s", "efficiency", "80 % interval", "memory", "useful time"]
    extra = ["epoch"] * bool(outlook.samples) + ([_cost_title(outlook)] if outlook.price else [])
    result = new_table(columns + extra)
    for entry in outlook.entries:
        made = entry.prediction
        if not outlook.plan.assumed:  # figures instead of intervals
            made = replace(made, slowest=1.0, fastest=1.0)
        cells = [
            f"{made.ranks:,}",
            f"{entry.goodput.hosts:,}",
            _span(digits, made.samples_per_s * made.slowest, made.samples_per_s * made.fastest),
            f"{made.efficiency:.1%}",
            f"{made.low:.0%} to {made.high:.0%}" if made.ranks > 1 else "",
            (nbytes(entry.memory) if entry.memory else "") + (f": {entry.remedy}" if entry.remedy else ""),
            f"{entry.goodput.useful:.1%}",
        ]
        for is_shown, value, text in ((outlook.samples, entry.epoch_s, duration), (outlook.price, entry.cost, digits)):
            if is_shown:
                cells.append("" if value is None else _span(text, *_ends(made, value)))
        result.add_row(*cells, style="bold" if made.ranks == outlook.stops_paying else "")
    return result


def _span(text: Callable[[float], str], low: float, high: float | None) -> str:
    if high is None:
        return f"at least {text(low)}"
    if not low:
        return f"up to {text(high)}"
    return text(low) if low == high else f"{text(low)} to {text(high)}"


def times_table(outlook: Outlook) -> Table:
    """Return the parts of a step, which add up to it, for each number of devices."""
    columns = ["devices", "step", "computing", "exposed", "interference", "jitter"]
    result = new_table(columns + ["80 % interval of the step"] * bool(outlook.plan.assumed))
    for entry in outlook.entries:
        made, step = entry.prediction, entry.prediction.step
        parts = (step.length_s, step.compute_s, step.exposed_s, step.interference_s, step.jitter_s)
        ends = [_span(duration, *_ends(made, step.length_s))] * bool(outlook.plan.assumed)
        result.add_row(f"{made.ranks:,}", *map(duration, parts), *ends)
    return result


def _ends(made: Prediction, value: float) -> tuple[float, float | None]:
    """Return the 80 % interval of a time or a cost; None if it has no upper end."""
    return value / made.fastest, value / made.slowest if made.slowest else None


def notes(outlook: Outlook) -> list[str]:
    """Return what the table does not say."""
    cluster, last = outlook.plan.job.cluster, outlook.entries[-1]
    most, stops = last.prediction.ranks, outlook.stops_paying
    lines = [f"Doubling the devices pays up to {most:,}, the largest number in this plan."] * (most > 1)
    if stops is not None:
        on = counted(f"{stops:,}", "device")
        lines = [f"Stops paying at {on}: twice as many are less than {WORTH} times as fast."]
    if outlook.plan.assumed:
        low, high = outlook.plan.job.speed
        lines.append(
            f"The speed of a device is assumed: {outlook.plan.assumed}. 80 % of published speeds are {low:.2g} to "
            f"{high:.2g} times this value. Measure one device, and give --samples-per-second."
        )
    if outlook.effects and outlook.plan.in_half:
        lines.append(f"The saving by {outlook.plan.in_half[0]} precision is that of published speeds.")
    for ranks, headline in outlook.plan.headlines.items():
        lines.append(f"Profile of {ranks}: {''.join(filter(str.isprintable, headline))}")
    if any(entry.remedy for entry in outlook.entries):
        lines.append(
            f"A replica that does not fit in the {nbytes(outlook.plan.capacity)} of a device is marked with a change "
            "that makes it fit. Times and costs are without that change."
        )
    if last.goodput.hosts > 1:
        local = f", with {cluster.devices_per_host} devices over {cluster.inside.name}"
        lines.append(f"Hosts are connected over {cluster.between.name}{local if cluster.devices_per_host > 1 else ''}.")
    hosts, good = counted(f"{last.goodput.hosts:,}", "host"), last.goodput
    lines.append(
        f"On {hosts}, a failure stops the job every {duration(good.mtbf_s)}; saving every {duration(good.interval_s)} "
        "loses the least time."
    )
    if (knee := outlook.plan.job.critical_batch) is not None:
        devices = counted(max(1, round(knee / outlook.plan.job.workload.samples)), "device")
        lines.append(
            f"The knee of time against cost is at a global batch of {digits(knee)} samples, the critical batch size: "
            f"about {devices}."
        )
    if outlook.outer:
        lines.append(outer_note(outlook.outer, cluster.between.name))
    return lines


def outer_note(outer: OuterSteps, link: str) -> str:
    """Return a sentence with the speed above which outer steps do not pay, and their savings over `link`."""
    last, cheap = outer.rows[-1], f"costs less than {CHEAP:.0%}"
    known = outer.cheap_from and f"{cheap} above {digits(outer.cheap_from / GBIT)} Gbit/s between hosts"
    return (
        f"On {last.devices:,} devices, averaging in every step {known or f'never {cheap} over such links'}; "
        f"over {link}, --sync-every {outer.sync_every} saves {last.saving:.0%}. docs/slow-networks.md shows its effect "
        "on the loss."
    )


def outer_table(outer: OuterSteps) -> Table:
    """Return a table of step times with averaging in every step, and with an outer step every H steps."""
    result = new_table(["devices", "averaging in every step", f"every {outer.sync_every} steps", "saves"])
    for row in outer.rows:
        result.add_row(f"{row.devices:,}", duration(row.averaged_step_s), duration(row.step_s), f"{row.saving:.1%}")
    return result


def trainings_table(outlook: Outlook) -> Table:
    """Return time and cost of a training to the same loss, relative to the least, with the knee in bold."""
    result = new_table(["devices", "global batch", "steps", "samples", "time", "device hours"])
    knee = outlook.plan.job.critical_batch or 0.0
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
