"""What a plan says about a job: predictions for several numbers of devices, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.planner.critical_batch import Training, trainings
from paceline.planner.goodput import Goodput
from paceline.planner.predictions import Job, Prediction, effects, stops_paying


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
