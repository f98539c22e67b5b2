"""The command ``paceline plan``: its options, and the job that they describe.

The modules that need torch are imported in functions, so that ``--help`` does not load torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.core.command_line import load_torch
from paceline.core.option_rules import choice
from paceline.core.strict_json import LARGEST
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.planner.goodput import Goodput
    from paceline.planner.predictions import Job

EXAMPLES = """Examples:

paceline plan runs/one-rank runs/two-ranks --devices 16

paceline plan --params 360M --flops 4.4T --device h100 --batch 8 --price 2.5 --samples 10M

paceline plan --params 25M --flops 24G --batch 128 --device v100 --precision fp32 --links pcie,25gbit-tcp --hosts-of 4
"""
HOST = 8
DEVICES = 4096
MOST = 2**20
"""Most devices."""
JOB, CLUSTER, OUTPUT = "The job, if it was not profiled", "The cluster", "Output"
FEWEST_PARAMS = 1000
GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient."""
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}


def _option(metavar: str | None, panel: str, text: str, **settings: Any) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel, **settings)


FLOPS = "FLOPs of a sample, forward and backward: for a language model, 6 for each parameter and token."
LINKS = (
    "Between devices, and of a host: nvlink4,8x400gbit or pcie4,25gbit-tcp; by default the usual ones of the device."
)
SAVE = "Seconds that saving a checkpoint stops training; by default 28 per 1G parameters."
Text = str | None


def plan(
    profiles: Annotated[
        list[str] | None, typer.Argument(metavar="PROFILE", help="Folders of paceline profile, on 1, 2, … ranks.")
    ] = None,
    params: Annotated[Text, _option("NUMBER", JOB, "Parameters, such as 360M.")] = None,
    flops: Annotated[Text, _option("NUMBER", JOB, FLOPS)] = None,
    batch: Annotated[Text, _option("NUMBER", JOB, "Samples per device and step.")] = None,
    precision: Annotated[Text, _option("NAME", JOB, "fp32, tf32, bf16 or fp16; by default bf16.")] = None,
    save_seconds: Annotated[Text, _option("NUMBER", JOB, SAVE)] = None,
    samples: Annotated[Text, _option("NUMBER", JOB, "Samples in an epoch, such as 1.2M.")] = None,
    device: Annotated[Text, _option("NAME", CLUSTER, "Such as h100, or its dense peak: 400tflops.")] = None,
    links: Annotated[Text, _option("INSIDE,BETWEEN", CLUSTER, LINKS)] = None,
    hosts_of: Annotated[
        int | None, _option("N", CLUSTER, f"Devices in a host; {HOST} without a profile.", min=1)
    ] = None,
    devices: Annotated[str, _option("N|LIST", CLUSTER, "Largest number of devices, or a list such as 1,8,64.")] = str(
        DEVICES
    ),
    price: Annotated[Text, _option("NUMBER", CLUSTER, "Price of a device per hour.")] = None,
    failure_rate: Annotated[Text, _option("NUMBER", CLUSTER, "Failures per host and day; by default 0.0038.")] = None,
    restart_seconds: Annotated[
        Text, _option("NUMBER", CLUSTER, "Seconds from a failure until training continues; by default 600.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)] = False,
    plot: Annotated[Text, _option("FILE", OUTPUT, "Draw a chart (.svg, .png or .pdf).")] = None,
) -> None:
    """Predict speed, efficiency and cost of a training on up to thousands of devices.

    Also shows where more devices stop paying, and what changes would save. Give profiles of the job, or describe it.
    """
    load_torch()
    from paceline.core.output_files import check_chart
    from paceline.tools.plan.report import look_ahead, report

    check_chart("--plot", plot)
    numbers = {"--params": params, "--flops": flops, "--batch": batch}
    if profiles and (given := [name for name, text in (numbers | {"--precision": precision}).items() if text]):
        raise UsageError(f"{', '.join(given)} cannot be combined with a profile, which has measured the job")
    counts = _counts(devices)
    job, speedup = (
        (_profiled([Path(path) for path in profiles], device, links, hosts_of), None)
        if profiles
        else _described(numbers, precision or "bf16", device, links, hosts_of or HOST)
    )
    if max(counts) < (local := hosts_of or (1 if profiles else HOST)):
        raise UsageError(
            f"--devices {devices} is less than the {local} devices of one host; give more, or a smaller --hosts-of"
        )
    price_per_hour = None if price is None else number("--price", price)
    epoch = None if samples is None else number("--samples", samples)
    failures = {"--failure-rate": failure_rate, "--save-seconds": save_seconds, "--restart-seconds": restart_seconds}
    report(look_ahead(job, counts, price_per_hour, epoch, speedup, _goodput(job, failures)), json, plot)


def number(option: str, text: str, least: float = 1e-9) -> float:
    """Return a number such as ``360M``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)([kmgbtp]?)", text.strip().lower())
    if found is None or not float(found[1]):
        raise UsageError(f"{option}={text} is not a positive number; write it as in 360M or 4.4T")
    value = float(found[1]) * UNITS[found[2]]
    if not least <= value <= LARGEST:
        raise UsageError(f"{option}={text} is out of range; give a value from {least:g} to {LARGEST:g}")
    return value


def _goodput(job: Job, numbers: dict[str, str | None]) -> Callable[[int], Goodput]:
    """Return the function that predicts the useful share of time on a number of hosts."""
    from paceline.checkpoint.due_saves import FAILURES_PER_HOST_DAY
    from paceline.planner.goodput import RESTART_S, goodput, save_seconds

    rate, save_s, restart_s = (None if text is None else number(option, text) for option, text in numbers.items())
    return partial(
        goodput,
        save_s=save_s or save_seconds(job.workload.nbytes / GRADIENT_BYTES),
        restart_s=restart_s or RESTART_S,
        failures_per_host_day=rate or FAILURES_PER_HOST_DAY,
    )


def _counts(text: str) -> list[int]:
    """Return the numbers of devices: those in a list, or powers of two up to a single number."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,6}", word) and int(word) <= MOST for word in words):
        raise UsageError(f"--devices={text} must be a number from 1 to {MOST:,}, or a list such as 1,8,64")
    counts = {int(word) for word in words}
    if len(words) == 1:
        counts |= {2**power for power in range(max(counts).bit_length())}
    return sorted(counts)


def _described(
    numbers: dict[str, str | None], precision: str, name: str | None, links: str | None, local: int
) -> tuple[Job, float | None]:
    """Return the job that options describe, and the speedup of a lower precision."""
    from paceline.planner import hardware
    from paceline.planner.hardware import Cluster
    from paceline.planner.predictions import Job, from_flags

    given = numbers | {"--device": name}
    if missing := [option for option, text in given.items() if text is None]:
        raise UsageError(f"give a profile, or describe the job: {', '.join(missing)} missing")
    choice("--precision", precision, hardware.PRECISIONS)
    kind = hardware.device(name or "")
    inside, between = hardware.links(links or "", kind)
    params, flops, batch = (
        number(option, text or "", FEWEST_PARAMS if option == "--params" else 1e-9) for option, text in numbers.items()
    )
    work = from_flags(params, flops, kind, precision, batch)
    return Job(work, Cluster(local, inside, between)), kind.half_speedup(precision)


def _profiled(paths: list[Path], name: str | None, links: str | None, local: int | None) -> Job:
    """Return the job that profiles measured, on the hosts and links that options describe."""
    from paceline.planner import hardware
    from paceline.planner.hardware import Cluster
    from paceline.planner.profiles import from_profiles, from_summary

    profiles = [from_summary(path) for path in paths]
    last = max(profiles, key=lambda profile: profile.ranks)
    if links is None:
        if name is not None:
            raise UsageError("--device needs --links if the job was profiled; add --links, or leave out --device")
        job = from_profiles(profiles)
        if local is None:
            return job
        if last.hosts == 1:
            raise UsageError("--hosts-of needs --links for the network between hosts: the profile was made on one host")
        return replace(job, cluster=replace(job.cluster, devices_per_host=local))
    kind = hardware.device(name) if name else hardware.device_or_unknown(last.device)
    inside, between = hardware.links(links, kind)
    local = local or math.ceil(last.ranks / last.hosts)
    is_named = inside != hardware.inside_link("", kind)
    if last.link() is None or last.hosts > 1 or is_named:
        return from_profiles(profiles, Cluster(local, inside, between, cores=last.cores))
    job = from_profiles(profiles)
    return replace(job, cluster=replace(job.cluster, devices_per_host=local, between=between))
