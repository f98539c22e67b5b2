"""Published scaling results in a CSV file, each as the job that it describes."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.strict_json import LARGEST, read_text
from paceline.errors import UsageError
from paceline.planner.calibration import MEASURED, PUBLISHED, SPEEDS, Calibration, Intervals
from paceline.planner.hardware import GBIT, Cluster, Device, between_link, device_or_unknown, inside_link, match
from paceline.planner.predictions import Job, Prediction, equal_layers

COLUMNS = (
    *("source", "model", "params_millions", "precision", "per_device_batch", "device", "intra_link", "inter_link"),
    *("devices", "devices_per_node", "throughput", "unit", "single_device_throughput", "efficiency", "notes"),
)
MOST = 1.5
"""Efficiencies above this are mistakes of the source."""
UNKNOWN_STEP_S = 0.3
"""Median step time of the rows that state one."""
AWS_FLOW = 5 * GBIT
"""Bytes per second of one TCP connection between AWS instances outside a cluster placement group ("Amazon EC2 instance
network bandwidth", read in 2026-11)."""
HOST = 8
"""Devices of a host, if unknown."""
OWN_REDUCER = re.compile("no horovod|replicated|parameter.?server|distributed tensorflow|mirrored|paddlepaddle 1")
"""Frameworks that reduce gradients with custom code, which does not use NVLink."""
SHARDED = re.compile("fsdp|zero-3|-way model")
LIBRARY = re.compile("(?<!no )horovod|ddp|apex")
COUNTED = re.compile("image|img|sequence|sample|sentence|example|token|mel|row|item")
"""Units of a throughput that are known."""
NUMBER = r"\d{1,15}(?:\.\d{1,15})?"
STATED_PARAMS = re.compile(rf"\b({NUMBER}) ?(m|b)\b")
"""Millions or billions of parameters in a model's name, as in ``Llama 3.1 8B``."""


@dataclass(frozen=True)
class Row:
    """A published result."""

    source: str
    title: str
    job: Job
    devices: int
    baseline: int
    """Number of devices whose throughput is the baseline of `efficiency`."""
    efficiency: float
    is_sharded: bool
    """Whether the model is divided over devices, so that this is not plain data parallelism."""
    is_timed: bool
    """Whether the row states the speed of one device, or of the baseline."""
    from_flags: Job
    """The same job with the assumed speed of one device."""

    def predict(self, calibration: Calibration = PUBLISHED, intervals: Intervals = MEASURED) -> Prediction:
        """Return the prediction for the row."""
        job = replace(self.job, calibration=calibration, intervals=intervals)
        return job.predict(self.devices, self.baseline)


def read(path: str) -> tuple[Sequence[Row], int]:
    """Return the usable rows, and the number of others: without an efficiency or a device, or flagged as suspect."""
    try:
        reader = csv.DictReader(io.StringIO(read_text(Path(path)).removeprefix("\ufeff"), newline=""))
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        texts = [] if missing else [(reader.line_num, row) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if missing:
        raise UsageError(f"{path} lacks the columns {', '.join(missing)}; add them, even if they are empty")
    rows = [
        parse(_Text({name: printable(row[name] or "") for name in COLUMNS}, f"{path}, line {line}"))
        for line, row in texts
    ]
    kept = [row for row in rows if row is not None]
    if not kept:
        raise UsageError(f"{path} has no usable row: every row lacks an efficiency or a device, or is suspect")
    return kept, len(rows) - len(kept)


def printable(text: str) -> str:
    """Return `text` without characters that could control a terminal."""
    return "".join(filter(str.isprintable, text))


class _Text:
    """The texts of a row."""

    def __init__(self, values: dict[str, str], place: str) -> None:
        self.values, self.place = values, place
        self.notes = values["notes"].lower()
        self.model = values["model"].lower()
        self.precision = values["precision"].lower()
        self.unit = values["unit"].lower()
        self.network = values["inter_link"].lower()
        self.title = f"{values['model']}, {values['devices']} × {values['device']}"

    def number(self, name: str) -> float | None:
        """Return the number in a column; None if the column is empty."""
        text = self.values[name].strip()
        try:
            value = float(text) if text else None
        except ValueError:
            value = math.nan
        if value is not None and not 0 < value <= LARGEST:
            raise UsageError(f"{self.place} ({self.title}): {name}={text} is not a positive number; correct it")
        return value

    def count(self, name: str) -> int | None:
        """Return the whole number in a column; None if the column is empty."""
        value = self.number(name)
        if value is not None and value % 1:
            raise UsageError(
                f"{self.place} ({self.title}): {name}={self.values[name]} is not a whole number; correct it"
            )
        return None if value is None else int(value)

    def noted(self, pattern: str, default: float) -> float:
        """Return the number that the notes state; `default` if they state none, or zero."""
        found = re.search(pattern.replace("#", NUMBER), self.notes)
        return (float(found[1]) if found else 0.0) or default


def parse(text: _Text) -> Row | None:
    """Return a row; None if it is flagged as suspect, or does not state its device or its efficiency."""
    if "flag=suspect" in text.notes or "not stated" in text.values["device"]:
        return None
    efficiency, devices = text.number("efficiency"), text.count("devices")
    if efficiency is None or devices is None:
        return None
    if efficiency > MOST:
        raise UsageError(
            f"{text.place} ({text.title}): efficiency={efficiency:g} is above {MOST}; write it as a fraction, or add "
            "flag=suspect to the notes"
        )
    baseline = int(text.noted(r"baseline_devices=(\d{1,15})", 1))
    is_sharded = bool(SHARDED.search(text.notes + text.model))
    kind = device_or_unknown(text.values["device"])
    source = text.values["source"]
    is_timed, job, from_flags = _jobs(text, kind, baseline)
    return Row(source, text.title, job, devices, baseline, efficiency, is_sharded, is_timed, from_flags)


def _jobs(text: _Text, kind: Device, baseline: int) -> tuple[bool, Job, Job]:
    """Return whether the row states a speed, the job with that speed, and the job with the assumed speed."""
    known = match("models", text.model)
    assert known is not None  # the table's last pattern is empty
    stated, shards = STATED_PARAMS.search(text.model), re.search(r"\b([1-9]\d{0,14})-way model", text.model)
    millions = text.number("params_millions") or float(known["parameters_millions"])
    if stated and not text.values["params_millions"]:
        millions = float(stated[1]) * (1000 if stated[2] == "b" else 1)
    params = 1e6 * millions / (int(shards[1]) if shards else 1)
    is_half = bool(re.match("fp16|amp|bf16|mixed|fp8", text.precision)) and " or " not in text.precision
    size = re.search(NUMBER, text.values["per_device_batch"])
    batch = (float(size[0]) if size else 0.0) or None
    gflop = float(known["forward_gflop"])
    units, assumed = float(known["units"]), UNKNOWN_STEP_S
    if batch is not None and (gflop or units > 1):
        flops = 3e9 * gflop if gflop else 6 * params * units
        # Frameworks compute in TF32 if the device does; torch stopped that in 1.12.
        precision = (kind.half or "fp32") if is_half else "tf32" if "tf32" in kind.peaks else "fp32"
        assumed = flops * batch / kind.flops(precision, SPEEDS["convnet" if gflop else "transformer"])
    seconds = _measured_s(text, baseline, batch, units)
    width = 2 if "compression" in text.precision or (is_half and text.precision[:4] in ("bf16", "fp16")) else 4
    if "fsdp" in text.notes or "zero-3" in text.notes:
        width = 3  # two gathers and a scatter of 2 bytes; an all-reduce is one gather and one scatter
    if "no gradient sync" in text.notes:
        width = 0
    classifier, micro_batches = float(known["classifier"]), int(text.noted(r"grad_accum=(\d{1,15})", 1))

    def job(step_s: float) -> Job:
        work = equal_layers(step_s, params * width, batch or 1, micro_batches, classifier)
        return Job(replace(work, is_host_bound=is_half and gflop > 0), _cluster(text, kind))

    return seconds is not None, job(seconds or assumed), job(assumed)


def _measured_s(text: _Text, baseline: int, batch: float | None, units: float) -> float | None:
    """Return the seconds of a micro-batch on a device of the baseline; None if the row does not state it.

    `units` is the number of tokens, or other units of the throughput, in a sample.
    """
    single = text.number("single_device_throughput") or 0.0
    single = text.noted(r"baseline_throughput=(#)", single * baseline) / baseline
    single = text.noted(r"baseline tokens/s/gpu=(#)", single)
    if "lower is better" in text.unit:
        steps = text.noted(r"(\d{1,15}) steps", 0)
        return single / steps if steps and single else None
    if not single or batch is None or not COUNTED.search(text.unit):
        return None
    counts_units = batch < 2000 and ("tokens" in text.unit or "mels" in text.unit or units > 7000)
    length = text.noted(r"seq(?:[ _]?len(?:gth)?)?[ =]+(\d{1,15})", units)
    return batch * (length if counts_units else 1) / single


def _cluster(text: _Text, kind: Device) -> Cluster:
    name, local = text.values["device"], text.count("devices_per_node") or HOST
    inside = inside_link(text.values["intra_link"] or name, kind)
    if OWN_REDUCER.search(text.notes) and not LIBRARY.search(text.notes):
        inside = min(inside, inside_link("pcie", kind), key=lambda link: link.bytes_per_s)
    between = between_link(f"{text.values['inter_link']} {name}", kind)
    speed = between.bytes_per_s * (local if "per gpu" in text.network or "per device" in text.network else 1)
    is_tcp = ("tcp" in text.network + text.notes and "rdma" not in text.notes) or "no horovod" in text.notes
    if is_tcp and "aws" in text.network:
        speed = min(speed, AWS_FLOW)
    between = replace(between, bytes_per_s=speed, kind="tcp" if is_tcp else "rdma")
    on_cpu = bool(re.search("all-?reduce on cpu|horovod on cpu", text.notes))
    return Cluster(local, inside, between, on_cpu)
