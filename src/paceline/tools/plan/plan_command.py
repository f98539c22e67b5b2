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
from paceline.core.messages import counted
from paceline.core.option_rules import choice
from paceline.core.strict_json import LARGEST
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.planner.goodput import Goodput
    from paceline.planner.hardware import Device
    from paceline.planner.predictions import Job
    from paceline.planner.profiles import Profiled
    from paceline.planner.replica_memory import ReplicaMemory
    from paceline.tools.plan.report import Plan, Price

EXAMPLES = """Examples:

paceline plan runs/one-rank runs/two-ranks --devices 16

paceline plan --params 360M --samples-per-second 95 --device h100 --batch 8 --price 2.5USD --samples 10M

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


SPEED_OPTION = "--samples-per-second"
SPEED = "Speed of one device, measured. The normal way if the job was not profiled."
FLOPS = (
    "Use instead of a measured speed: FLOPs of a sample, forward and backward; 6 for each parameter and token of a "
    "language model."
)
FAMILY = "convnet or transformer, for the assumed speed."
MEMORY = "Peak bytes of a rank, from paceline estimate-memory; by default those of AdamW without activations."
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
    samples_per_second: Annotated[Text, _option("NUMBER", JOB, SPEED)] = None,
    flops: Annotated[Text, _option("NUMBER", JOB, FLOPS)] = None,
    family: Annotated[Text, _option("NAME", JOB, FAMILY)] = None,
    batch: Annotated[Text, _option("NUMBER", JOB, "Samples per device and step.")] = None,
    precision: Annotated[Text, _option("NAME", JOB, "fp32, tf32, bf16 or fp16; by default bf16, if supported.")] = None,
    memory: Annotated[Text, _option("NUMBER", JOB, MEMORY)] = None,
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
    price: Annotated[Text, _option("NUMBER", CLUSTER, "Price of a device per hour: 2.5 or 2.5USD.")] = None,
    failure_rate: Annotated[Text, _option("NUMBER", CLUSTER, "Failures per host and day; by default 0.0038.")] = None,
    restart_seconds: Annotated[
        Text, _option("NUMBER", CLUSTER, "Seconds from a failure until training continues; by default 600.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Predict speed, efficiency and cost of a training on up to thousands of devices.

    Also shows where more devices stop paying, and what changes would save. Give profiles of the job, or describe it.
    """
    load_torch()
    from paceline.tools.plan.report import look_ahead, report

    counts = _counts(devices, hosts_of or 1)
    numbers = {"--params": params, "--batch": batch, SPEED_OPTION: samples_per_second, "--flops": flops}
    numbers["--memory"] = memory
    if profiles:
        texts = numbers | {"--precision": precision, "--family": family}
        if given := [name for name, text in texts.items() if text is not None]:
            raise UsageError(f"{', '.join(given)} cannot be combined with a profile, which has measured the job")
        plan = _profiled([Path(path) for path in profiles], device, links, hosts_of)
    else:
        local = hosts_of or min(HOST, max(counts))
        plan = _described(numbers, precision, family, device, links, local)
    refusal = "; ".join(f"the profile of {ranks} is unreliable: {why}" for ranks, why in plan.unreliable.items())
    if refusal and not json:
        raise UsageError(refusal)
    epoch = None if samples is None else number("--samples", samples)
    failures = {"--failure-rate": failure_rate, "--save-seconds": save_seconds, "--restart-seconds": restart_seconds}
    report(look_ahead(plan, counts, _price(price), epoch, _goodput(plan.job, failures)), json)
    if refusal:  # other programs may still read the figures
        raise UsageError(refusal)


def _price(text: str | None) -> Price | None:
    """Return a price such as ``2.5`` or ``2.5USD``."""
    from paceline.tools.plan.report import Price

    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Z]{3})?", text.strip())
    if found is None or not 1e-9 <= float(found[1]) <= LARGEST:
        raise UsageError(f"--price={text} is not a price; write it as in 2.5 or 2.5USD")
    return Price(float(found[1]), found[2] or "price units")


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


def _counts(text: str, local: int) -> list[int]:
    """Return the numbers of devices: those in a list, or powers of two up to a single number."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,6}", word) and int(word) <= MOST for word in words):
        raise UsageError(f"--devices={text} must be a number from 1 to {MOST:,}, or a list such as 1,8,64")
    counts = {int(word) for word in words}
    if max(counts) < local:
        raise UsageError(
            f"--devices {text} is less than the {local} devices of one host; give more, or a smaller --hosts-of"
        )
    if len(words) == 1:
        counts |= {2**power for power in range(max(counts).bit_length())}
    return sorted(counts)


def _described(numbers: dict[str, Text], precision: Text, family: Text, name: Text, links: Text, local: int) -> Plan:
    """Return the job that options describe."""
    from paceline.planner import calibration, hardware
    from paceline.planner.hardware import Cluster
    from paceline.planner.predictions import Job, described
    from paceline.tools.plan.report import Plan

    given = {option: text for option, text in (numbers | {"--device": name}).items() if text is not None}
    needed = [option for option in ("--params", "--batch", "--device") if option not in given]
    if not given.keys() & {SPEED_OPTION, "--flops"}:
        needed.append(f"{SPEED_OPTION} (measured on one device) or --flops")
    if name is None or needed:
        raise UsageError(f"give a profile, or describe the job: {', '.join(needed)} missing")
    if given.keys() >= {SPEED_OPTION, "--flops"}:
        raise UsageError(f"{SPEED_OPTION} has measured what --flops estimates; omit --flops")
    if family is not None:
        choice("--family", family, tuple(filter(None, calibration.SPEEDS)))
    if precision is not None:
        choice("--precision", precision, hardware.PRECISIONS)
    kind = hardware.device(name, precision or "bf16")
    precision = precision or kind.half or "fp32"
    inside, between = hardware.links(links or "", kind)
    params, batch = number("--params", given["--params"], FEWEST_PARAMS), number("--batch", given["--batch"])
    known = calibration.SPEEDS[family]
    rate, is_measured = kind.flops(precision, known), SPEED_OPTION in given
    speed = number(SPEED_OPTION, given[SPEED_OPTION]) if is_measured else rate / number("--flops", given["--flops"])
    job = Job(described(params, batch / speed, kind, batch), Cluster(local, inside, between))
    assumed, in_half = "", None
    if not is_measured:
        job = replace(job, intervals=calibration.ASSUMED, speed=(known.low, known.high))
        assumed = f"{rate / kind.peak(precision):.0%} of the peak of {name} in {precision}"
    if kind.half and kind.peak(kind.half) > kind.peak(precision):
        faster = kind.flops(kind.half, known) / rate * speed
        in_half = kind.half, described(params, batch / faster, kind, batch)
    return Plan(job, _replica(params, batch, given.get("--memory")), kind.capacity, assumed, in_half)


def _replica(params: float, batch: float, peak: Text) -> ReplicaMemory:
    """Return the memory of a replica with AdamW in float32, or with the given `peak`."""
    from paceline.planner.replica_memory import ReplicaMemory

    memory = ReplicaMemory(4 * params, 4 * params, 8 * params, samples=batch)
    if peak is None:
        return memory
    rest = number("--memory", peak) - 8 * params
    if rest < 0:
        raise UsageError(
            f"--memory={peak} is less than the {8 * params:,.0f} bytes of weights and gradients; give a rank's peak"
        )
    return replace(memory, state=min(rest, memory.state), activations=max(0.0, rest - memory.state))


def _profiled(paths: list[Path], name: str | None, links: str | None, local: int | None) -> Plan:
    """Return the job that profiles measured, on the hosts and links that options describe."""
    from paceline.planner import hardware
    from paceline.planner.profiles import from_summary
    from paceline.planner.replica_memory import ReplicaMemory
    from paceline.tools.plan.report import Plan

    summaries = sorted(map(from_summary, paths), key=lambda summary: summary.plan.ranks)
    last, held = summaries[-1].plan, summaries[-1].memory
    kind = hardware.device(name) if name else hardware.device_or_unknown(last.device)
    if name and kind.name != hardware.device_or_unknown(last.device).name:
        raise UsageError(
            f"--device {name}: the job was profiled on {last.device}, which is not {kind.name}; profile it there, or "
            f"describe it with {SPEED_OPTION}"
        )
    job = _on_links([summary.plan for summary in summaries], kind, name, links, local)
    weights, gradients, state = (held.get(part, 0) for part in ("parameters", "gradients", "optimizer"))
    memory = ReplicaMemory(weights, gradients, state, samples=last.samples / last.micro_batches)
    memory = replace(memory, activations=max(0.0, held.get("peak", 0) - memory.total(last.ranks)))
    ranks = {summary.plan.ranks: counted(summary.plan.ranks, "rank") for summary in summaries}
    return Plan(
        job,
        memory,
        kind.capacity,
        headlines={ranks[summary.plan.ranks]: summary.headline for summary in summaries if summary.headline},
        unreliable={ranks[summary.plan.ranks]: summary.unreliable for summary in summaries if summary.unreliable},
    )


def _on_links(profiles: list[Profiled], kind: Device, name: str | None, links: str | None, local: int | None) -> Job:
    from paceline.planner import hardware
    from paceline.planner.hardware import Cluster
    from paceline.planner.profiles import from_profiles, on_hosts_of

    last = profiles[-1]
    if links is None:
        if name is not None:
            raise UsageError("--device needs --links if the job was profiled; add --links, or leave out --device")
        job = from_profiles(profiles)
        if local is None:
            return job
        if last.hosts == 1:
            raise UsageError("--hosts-of needs --links for the network between hosts: the profile was made on one host")
        return on_hosts_of(replace(job, profiled={}), local)
    inside, between = hardware.links(links, kind)
    local = local or math.ceil(last.ranks / last.hosts)
    is_named = inside != hardware.inside_link("", kind)
    if last.link() is None or last.hosts > 1 or is_named:
        return from_profiles(profiles, Cluster(local, inside, between, cores=last.cores))
    return on_hosts_of(from_profiles(profiles), local, between)
