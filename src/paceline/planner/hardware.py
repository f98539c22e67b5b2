"""Known devices and links, with their nominal speeds; every entry of the tables in ``tables/`` has a source and a date."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from paceline.errors import UsageError
from paceline.planner.cluster import Link

HALF = ("bf16", "fp16", "fp8")
PRECISIONS = ("fp32", "tf32", *HALF)
MFU = 0.4
"""Share of the peak that training reaches if nothing was measured: 38 to 43 % with Llama 3.1 (Grattafiori et al., "The Llama
3 Herd of Models", 2024), 46 % with PaLM (Chowdhery et al. 2022)."""
GBIT = 1e9 / 8
AWS_FLOW = 5 * GBIT
"""Bytes per second of one TCP connection between AWS instances, outside a cluster placement group ("Amazon EC2 instance network
bandwidth", read in 2026-11)."""
RDMA_S, TCP_S = 4e-6, 50e-6
"""Latency of a message between hosts. With RDMA, and inside hosts (``links.csv``), as in NCCL's cost model (rings with protocol
LL128, `src/graph/tuning.cc` of commit 01afd20); with TCP, assumed."""
SPEED = re.compile(r"(?:(\d+) ?[x×] ?)?(\d+(?:\.\d+)?) ?(?:[Gg]bit|[Gg]bps|Gb/s|Gb\b|GbE|GigE|(GB/s))")
"""A network's speed, such as ``100gbit`` or ``8x200gbit``; published texts also write ``25 Gbps`` or ``40 Gb/s``."""


@dataclass(frozen=True)
class Device:
    """A kind of device, and what connects such devices unless something else is known."""

    name: str
    flops: float
    """Peak FLOP/s in FP32 or TF32, without sparsity."""
    half_flops: float
    """The same in BF16 or FP16."""
    nvlink: str = ""
    """Fast link between the devices of a host; empty if there is none."""
    pcie: str = "pcie4"
    network: float = 100 * GBIT
    """Bytes per second of a host's network."""
    has_peer_copies: bool = True
    """Whether devices copy to each other over PCIe without passing through the host's memory."""

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s in a precision."""
        return self.half_flops if precision in HALF else self.flops


@cache
def table(name: str) -> Sequence[dict[str, str]]:
    """Return the rows of a table."""
    return tuple(csv.DictReader(io.StringIO(files("paceline.planner").joinpath("tables", f"{name}.csv").read_text("utf-8"))))


def match(name: str, text: str, **columns: str) -> dict[str, str] | None:
    """Return the first row of a table whose pattern occurs in `text`, among those with the given values in `columns`."""
    rows = (row for row in table(name) if columns.items() <= row.items())
    return next((row for row in rows if re.search(row["pattern"], text)), None)


def device(text: str) -> Device:
    """Return the device that `text` names, or describes by its peak, as in ``400tflops``."""
    name = text.lower().strip()
    if described := re.fullmatch(r"([\d.]+) ?tflops", name):
        return Device(name, 1e12 * float(described[1]), 1e12 * float(described[1]))
    if (row := match("devices", name)) is None:
        raise UsageError(
            f"unknown device {text!r}; known devices: {', '.join(row['name'] for row in table('devices'))}. Describe another "
            "by its dense peak in your precision and its links, as in --device 400tflops --links pcie5,100gbit"
        )
    tera = [1e12 * float(row[column]) for column in ("tflops", "half_tflops")]
    network = GBIT * float(row["network_gbit"])
    return Device(row["name"], *tera, row["nvlink"], row["pcie"], network, row["peer"] == "yes")


def speed(text: str) -> float | None:
    """Return the bytes per second that a text states, or None."""
    found = SPEED.search(text)
    return None if found is None else int(found[1] or 1) * float(found[2]) * (1e9 if found[3] else GBIT)


def inside_link(text: str, kind: Device) -> Link:
    """Return the link that `text` names between the devices of a host; by default the fastest that `kind` has."""
    text = text.lower()
    row = match("links", text, place="inside")
    if row is None:
        nvlink = kind.nvlink or ("nvlink-bridge" if "nvlink" in text else "")
        row = match("links", kind.pcie if "pcie" in text or not nvlink else nvlink, place="inside")
    assert row is not None
    staged = row["name"].startswith("pcie") and not kind.has_peer_copies
    seconds = 1e-6 * float(row["latency_us"])
    return Link(row["name"], 1e9 * float(row["gbyte_per_s"]), seconds, "staged" if staged else "peer")


def between_link(text: str, kind: Device) -> Link:
    """Return the link that `text` names between hosts; by default the usual network of hosts with such devices."""
    stated, text = speed(text), text.lower()
    row = match("links", text, place="between")
    nominal = stated or (1e9 * float(row["gbyte_per_s"]) if row else kind.network)
    latency = 1e-6 * float(row["latency_us"]) if row else RDMA_S
    if "tcp" not in text:
        return Link(text or f"{nominal / GBIT:g}gbit", nominal, latency, "rdma")
    return Link(text, min(nominal, AWS_FLOW) if "aws" in text else nominal, TCP_S, "tcp")


def links(text: str, kind: Device) -> tuple[Link, Link]:
    """Return the links ``INSIDE,BETWEEN`` of a command line; those left out are the usual ones of `kind`."""
    first, _, second = (part.strip().lower() for part in text.partition(","))
    if not second and (match("links", first, place="between") or speed(first)):
        first, second = "", first
    inside = [*dict.fromkeys(row["name"] for row in table("links") if row["place"] == "inside"), "nvlink", "pcie"]
    between = [row["name"] for row in table("links") if row["place"] == "between"]
    if first and first not in inside:
        hint = "between hosts; write INSIDE,BETWEEN" if first in between else f"unknown; known: {', '.join(inside)}"
        raise UsageError(f"--links {text}: the link {first!r} inside a host is {hint}")
    if second and second not in between and not SPEED.fullmatch(second.removesuffix("-tcp")):
        raise UsageError(
            f"--links {text}: the link {second!r} between hosts is unknown; known: {', '.join(between)}, or a speed such as "
            "100gbit, 8x200gbit or 25gbit-tcp (without RDMA)"
        )
    if re.fullmatch(r"nvlink\d", first) and kind.nvlink != first and not kind.name.endswith("tflops"):
        has = f"{kind.nvlink}" if kind.nvlink else "no NVLink, except nvlink-bridge between two devices"
        raise UsageError(f"--links {text} contradicts --device {kind.name}, which has {has}; correct one of them")
    return inside_link(first, kind), between_link(second, kind)
