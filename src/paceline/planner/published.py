"""Published scaling results: read from a CSV file, predicted as a user's job is, and used to fit the calibration."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.planner.calibration import PUBLISHED, Calibration
from paceline.planner.cluster import Cluster, Link
from paceline.planner.hardware import AWS_FLOW, HALF, MFU, Device, between_link, device, inside_link, match
from paceline.planner.predictions import Job, Prediction
from paceline.planner.workload import equal_layers

COLUMNS = (
    "source model params_millions precision per_device_batch device intra_link inter_link devices devices_per_node "
    "throughput unit single_device_throughput efficiency notes"
).split()
MOST = 1.5
"""Efficiencies above this are mistakes of the source."""
UNKNOWN_DEVICE = Device("unknown", 15e12, 100e12, pcie="pcie3")
UNKNOWN_STEP_S = 0.3
"""Median step of the rows that tell it."""
HOST = 8
"""Devices of a host, if unknown."""
OWN_REDUCER = re.compile("no horovod|replicated|parameter.?server|distributed tensorflow|mirrored|paddle")
"""Software that reduces gradients after backward and without NVLink: frameworks from before they had NCCL in buckets."""
LIBRARY = re.compile("(?<!no )horovod|ddp|apex")


@dataclass(frozen=True)
class Row:
    """A published result."""

    source: str
    title: str
    job: Job
    devices: int
    baseline: int
    """Devices of the throughput to which `efficiency` is relative."""
    efficiency: float

    def predict(self, calibration: Calibration = PUBLISHED) -> Prediction:
        """Return the prediction for the row."""
        return Job(self.job.workload, self.job.cluster, calibration).predict(self.devices, self.baseline)


def read(path: str) -> tuple[Sequence[Row], int]:
    """Return the rows with an efficiency, and how many rows were left out: flagged as suspect, or without an efficiency."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if missing := [name for name in COLUMNS if not rows or rows[0].get(name) is None]:
        raise UsageError(f"{path} lacks the columns {', '.join(missing)}; they may be empty, but must exist")
    parsed = [_parse(row, f"{path}, row {number}") for number, row in enumerate(rows, 2)]
    kept = [row for row in parsed if row is not None]
    if not kept:
        raise UsageError(f"{path} has no row with an efficiency")
    return kept, len(rows) - len(kept)


def _parse(row: dict[str, str], place: str) -> Row | None:
    """Return a row; None if it is flagged as suspect or states no efficiency."""
    row = {name: row.get(name) or "" for name in COLUMNS}
    title = f"{row['model']}, {row['devices']} × {row['device']}"

    def number(name: str) -> float | None:
        try:
            value = float(row[name]) if row[name] else None
        except ValueError:
            value = math.nan
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{place} ({title}): {name}={row[name]} must be a positive number")
        return value

    efficiency, devices = number("efficiency"), number("devices")
    notes = row["notes"].lower()
    if efficiency is None or devices is None or "flag=suspect" in notes:
        return None
    if efficiency > MOST:
        raise UsageError(
            f"{place} ({title}): efficiency={efficiency:g} is above {MOST}; give a fraction, or mark the row with "
            "flag=suspect in its notes"
        )
    baseline = int(_find(r"baseline_devices=(\d+)", notes, 1))
    return Row(row["source"], title, _job(row, notes, number, baseline), int(devices), baseline, efficiency)


def _find(pattern: str, text: str, default: float) -> float:
    found = re.search(pattern, text)
    return float(found[1]) if found else default


def _job(row: dict[str, str], notes: str, number, baseline: int) -> Job:
    model, precision = row["model"].lower(), row["precision"].lower()
    kind = _device(row["device"])
    is_half = bool(re.match("fp16|amp|bf16|mixed|fp8", precision)) and " or " not in precision
    known = match("models", model)
    assert known is not None  # the last pattern is empty
    shards = _find(r"(\d+)-way model", model, 1)
    params = 1e6 * (number("params_millions") or _stated(model) or float(known["parameters_millions"])) / shards
    accumulated = int(_find(r"grad_accum=(\d+)", notes, 1))
    batch = _find(r"([\d.]+)", row["per_device_batch"], 0)
    step = _step_s(row, notes, number, baseline, batch, known)
    if step is None:
        gflop = float(known["forward_gflop"])
        flops = 3e9 * gflop if gflop else 6 * params * float(known["units"])
        step = flops * batch / kind.peak("fp16" if is_half else "fp32") / MFU if batch else UNKNOWN_STEP_S
    width = 2 if "compression" in precision or (is_half and precision[:4] in HALF) else 4
    if "fsdp" in notes:
        width = 3  # two gathers and a scatter of 2 bytes each, while an all-reduce is one gather and one scatter
    if "no gradient sync" in notes:
        width = 0
    hosted = int(number("devices_per_node") or HOST)
    return Job(equal_layers(step, params * width, batch or 1, accumulated), _cluster(row, notes, kind, hosted))


def _device(text: str) -> Device:
    try:
        return device(text)
    except UsageError:
        return UNKNOWN_DEVICE


def _stated(model: str) -> float | None:
    """Return the millions of parameters that a model's name states, as in ``Llama 3.1 8B``."""
    found = re.search(r"\b(\d+(?:\.\d+)?) ?(m|b)\b", model)
    return float(found[1]) * (1000 if found[2] == "b" else 1) if found else None


def _step_s(row, notes, number, baseline, batch, known) -> float | None:
    """Return the seconds of a micro-batch on a device; None if the row does not tell."""
    single, unit = number("single_device_throughput"), row["unit"].lower()
    if stated := _find(r"baseline_throughput=([\d.]+)", notes, 0):
        single = stated / baseline
    single = _find(r"baseline tokens/s/gpu=([\d.]+)", notes, single or 0)
    if "lower is better" in unit:
        steps = _find(r"(\d+) steps", notes, 0)
        return single / steps if steps and single else None
    if not single or not batch or "speed-up" in unit:
        return None
    counts_parts = re.search("tokens|mels", unit) or float(known["units"]) > 2048
    units = _find(r"seq(?:[ _]?len(?:gth)?)?[ =]+(\d+)", notes, float(known["units"]))
    return batch * (units if counts_parts and batch < 2000 else 1) / single


def _cluster(row: dict[str, str], notes: str, kind: Device, hosted: int) -> Cluster:
    inside = inside_link(f"{row['intra_link']} {row['device']}", kind)
    if OWN_REDUCER.search(notes) and not LIBRARY.search(notes):
        inside = min(inside, inside_link("pcie", kind), key=lambda link: link.bytes_per_s)
    network = row["inter_link"]
    between = between_link(f"{network} {row['device']}" , kind)
    nominal, text = between.bytes_per_s, network.lower()
    if "per gpu" in text or "per device" in text:
        nominal *= hosted
    is_tcp = ("tcp" in text + notes and "rdma" not in notes) or "no horovod" in notes
    if is_tcp and "aws" in text:
        nominal = min(nominal, AWS_FLOW)
    between = Link(network, nominal, between.latency_s, "tcp" if is_tcp else "rdma")
    return Cluster(hosted, inside, between, bool(re.search("all-?reduce on cpu|horovod on cpu", notes)))
