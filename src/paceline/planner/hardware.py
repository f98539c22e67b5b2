"""Devices in hosts and the links between them, with nominal speeds, and the time of a collective on both."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from paceline.core.strict_json import LARGEST
from paceline.errors import UsageError
from paceline.planner.calibration import Calibration, Speed

Kind = Literal["peer", "staged", "rdma", "tcp", "memory", "sockets", "measured"]
SWITCHING, FILLED = 0.1, 1 / 3
"""Slowdown of ranks that share a core, and the share of an all-reduce over sockets during which a rank only waits, so
that another rank can use its core. Measured on 2026-11-28 with 4 ranks on 2 cores by
``benchmarks/planner.py ranks``."""


@dataclass(frozen=True)
class Link:
    """A connection between devices of a host, or of a host to others."""

    name: str
    bytes_per_s: float
    """Nominal speed in one direction: of a device inside a host, or of a whole host."""
    latency_s: float
    kind: Kind
    """Inside a host, ``peer`` for direct copies between devices, or ``staged`` for copies through the host's memory.
    Between hosts, ``rdma`` or ``tcp``. If ``measured``, ``memory`` or ``sockets``, `bytes_per_s` is the real
    speed and is not scaled; transfers through memory and sockets use the ranks' cores."""

    def seconds_per_byte(self, ends: int, calibration: Calibration) -> float:
        """Return the seconds per byte sent, if `ends` devices or hosts communicate."""
        nominal = 1 / self.bytes_per_s
        if self.kind == "peer":
            return calibration.inside * nominal
        if self.kind == "staged":  # devices share the bandwidth of the host's memory
            return calibration.inside * calibration.staged * math.sqrt(ends / 2) * nominal
        if self.kind == "rdma":
            return calibration.between * nominal
        return max(calibration.between * nominal, 1 / calibration.tcp) if self.kind == "tcp" else nominal


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with equal devices."""

    devices_per_host: int
    inside: Link
    between: Link
    reduces_on_cpu: bool = False
    """Whether the cores of each host reduce what arrives from other hosts."""
    cores: float | None = None
    """Cores of a host that the ranks share, if they compute on the CPU."""
    contention: float = 0.0
    """Slowdown of a rank's computing by each further rank that computes on the CPU of the same host, such as through
    its caches and memory."""

    def all_reduce_seconds(self, ranks: int, nbytes: float, calibration: Calibration, busy_cores: float = 0.0) -> float:
        """Return the seconds of an all-reduce of `nbytes` on each of `ranks` ranks.

        Ranks of one host form a ring. Between hosts, the faster of a ring and a pipelined tree is used; NCCL makes the
        same choice. Each rank keeps `busy_cores` of its host busy by computing.

        Sources: Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19
        (2005); Sanders, Speck & Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
        Computing 35 (2009).
        """
        local, hosts = min(ranks, self.devices_per_host), self.hosts(ranks)
        seconds, served = 0.0, self.serving(ranks, busy_cores)
        if local > 1 and self.inside.kind == "memory":  # every rank reads and writes all bytes once
            seconds += served * (self.inside.latency_s + nbytes / self.inside.bytes_per_s)
        elif local > 1:
            per_byte = self.inside.seconds_per_byte(local, calibration)
            seconds += served * 2 * (local - 1) * (self.inside.latency_s + nbytes / local * per_byte)
        if hosts > 1:
            per_byte = self.between.seconds_per_byte(hosts, calibration)
            per_byte += calibration.cpu if self.reduces_on_cpu else 0.0
            ring = 2 * (hosts - 1) * (self.between.latency_s + nbytes / hosts * per_byte)
            tree = 2 * math.ceil(math.log2(hosts)) * self.between.latency_s + 2 * nbytes * per_byte
            seconds += min(ring, tree)
        return seconds

    def hosts(self, ranks: int) -> int:
        """Return the number of hosts of `ranks` ranks."""
        return math.ceil(ranks / self.devices_per_host)

    def crowd(self, ranks: int, busy_cores: float) -> float:
        """Return by how much ranks that each keep `busy_cores` busy exceed the cores of a host; at least 1."""
        return max(1.0, min(ranks, self.devices_per_host) * busy_cores / self.cores) if self.cores else 1.0

    def stretch(self, ranks: int, busy_cores: float) -> float:
        """Return the factor by which ranks that each keep `busy_cores` busy slow each other down on a host."""
        switching = 1 + SWITCHING * self.turns(ranks, busy_cores)
        crowd = self.crowd(ranks, busy_cores)
        return (1 + self.contention * self.neighbors(ranks, busy_cores)) * crowd * switching

    def serving(self, ranks: int, busy_cores: float) -> float:
        """Return the slowdown of an all-reduce inside a host while ranks compute on the cores that it needs."""
        if self.inside.kind not in ("memory", "sockets"):
            return 1.0
        filled = FILLED * self.turns(ranks, busy_cores) if self.inside.kind == "sockets" else 0.0
        return self.stretch(ranks, busy_cores) * (1 - filled)

    def turns(self, ranks: int, busy_cores: float) -> float:
        """Return the share of cores that have more than one rank."""
        return min(1.0, self.crowd(ranks, busy_cores) - 1)

    def neighbors(self, ranks: int, busy_cores: float) -> float:
        """Return how many other ranks compute on the CPU of the same host at the same time."""
        if not (self.cores and busy_cores):
            return 0.0
        return max(1.0, min(ranks, self.devices_per_host, self.cores / busy_cores)) - 1


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
USUAL_RATIO = {"fp32": 1.0, "tf32": 8.0, "bf16": 15.0, "fp16": 15.0}
"""Peak relative to that in FP32, of a device that is described by its peak: as on A100 and H100."""
FLOPS_PER_BYTE = 200
"""Peak FLOPs per byte of memory bandwidth, of a device that is described by its peak: between V100 and H100."""
CORE_MEMORY = 1e10
"""Bytes per second that PyTorch's simple operations read and write on one CPU core (measured on 2026-11-27)."""
GBIT = 1e9 / 8
RDMA_S, TCP_S = 4e-6, 50e-6
"""Latency of a message between hosts. With RDMA, and inside hosts (``links.csv``), as in NCCL's cost model for rings
with protocol LL128 (``src/graph/tuning.cc`` of commit 01afd20); with TCP, assumed."""
SPEED = re.compile(
    r"(?:(\d+) ?[x×] ?(?:[A-Za-z]+ )*)?(\d+(?:\.\d+)?) ?"
    r"(?:[Gg]bit|[Gg]bps|Gb/s|Gb\b|[Gg]b[Ee]|GigE|(GB/s)|(Tb/s|[Tt]bit|[Tt]bps))"
)
"""A network's speed, such as ``100gbit`` or ``8x200gbit``; published texts also write ``25 Gbps`` or ``40 Gb/s``."""


@dataclass(frozen=True)
class Device:
    """A kind of device, and what usually connects such devices."""

    name: str
    peaks: Mapping[str, float]
    """Peak FLOP/s by precision, without sparsity. FP32 is real float32, as torch computes by default."""
    memory: float
    """Bytes per second of the device's memory."""
    capacity: float = math.inf
    """Bytes of the device's memory; infinite if unknown."""
    nvlink: str = ""
    """Fast link between the devices of a host; empty if there is none."""
    pcie: str = "pcie4"
    network: float = 100 * GBIT
    """Bytes per second of a host's network."""
    has_peer_copies: bool = True
    """Whether devices copy to each other over PCIe without passing through the host's memory."""

    @property
    def half(self) -> str | None:
        """The half precision of the device: BF16 or FP16; None if it has none."""
        return next((precision for precision in ("bf16", "fp16") if precision in self.peaks), None)

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s in a precision."""
        if precision not in self.peaks:
            has = " or ".join(", ".join(self.peaks).rsplit(", ", 1))
            raise UsageError(f"--precision {precision}: {self.name} does not compute in {precision}; give {has}")
        return self.peaks[precision]

    def flops(self, precision: str, speed: Speed) -> float:
        """Return the FLOP/s of training in a precision, by published speeds."""
        single = self.peaks["fp32"]
        return speed.share * single * math.pow(self.peak(precision) / single, speed.exponent)


UNKNOWN = Device("unknown", {"fp32": 15e12, "fp16": 100e12, "bf16": 100e12, "tf32": 100e12}, 900e9, pcie="pcie3")
"""For a device that is not in the table: as fast as a V100."""


@cache
def table(name: str) -> Sequence[dict[str, str]]:
    """Return the rows of a table."""
    text = files("paceline.planner").joinpath("tables").joinpath(f"{name}.csv").read_text("utf-8")
    return tuple(csv.DictReader(io.StringIO(text)))


def match(name: str, text: str, **columns: str) -> dict[str, str] | None:
    """Return the first row of a table whose pattern occurs in `text` and whose columns have the given values."""
    rows = (row for row in table(name) if columns.items() <= row.items())
    return next((row for row in rows if re.search(row["pattern"], text)), None)


def device(text: str, precision: str = "bf16") -> Device:
    """Return a device by its name in the table, or by its peak speed in `precision` (``400tflops``)."""
    name = text.lower().strip()
    described = re.fullmatch(r"(\d+(?:\.\d+)?) ?tflops", name)
    if described and 1 <= (peak := 1e12 * float(described[1])) <= LARGEST:
        return Device(name, {"fp32": peak / USUAL_RATIO[precision], precision: peak}, peak / FLOPS_PER_BYTE)
    if (row := match("devices", name)) is None:
        raise UsageError(
            f"unknown device {text!r}; known devices: {', '.join(row['name'] for row in table('devices'))}. Describe "
            "another device by its dense peak in your precision and its links, as in --device 400tflops --links "
            "pcie5,100gbit"
        )
    peaks = {precision: 1e12 * float(row[precision]) for precision in PRECISIONS if row[precision]}
    stated = re.search(r"(\d+) ?gi?b\b", name)
    capacity = 2.0**30 * float(stated[1] if stated else row["memory_gib"])
    memory, network = 1e9 * float(row["memory_gbyte_per_s"]), GBIT * float(row["network_gbit"])
    return Device(row["name"], peaks, memory, capacity, row["nvlink"], row["pcie"], network, row["peer"] == "yes")


def device_or_unknown(text: str) -> Device:
    """Return the device that `text` names, or :data:`UNKNOWN`."""
    return device(text) if match("devices", text.lower()) else UNKNOWN


def inside_link(text: str, kind: Device) -> Link:
    """Return the link that `text` names between the devices of a host; by default the fastest that `kind` has."""
    text = text.lower()
    row = match("links", text, place="inside")
    if row is None:
        nvlink = kind.nvlink or ("nvlink-bridge" if "nvlink" in text else "")
        row = match("links", kind.pcie if "pcie" in text or not nvlink else nvlink, place="inside")
    assert row is not None
    is_staged = row["name"].startswith("pcie") and not kind.has_peer_copies
    seconds = 1e-6 * float(row["latency_us"])
    return Link(row["name"], 1e9 * float(row["gbyte_per_s"]), seconds, "staged" if is_staged else "peer")


def between_link(text: str, kind: Device) -> Link:
    """Return the link that `text` names between hosts; by default the usual network of hosts with such devices."""
    nominal, latency = kind.network, RDMA_S
    if row := match("links", text.lower(), place="between"):
        cards = re.match(r"(\d{1,2}) ?[x×] ?[A-Za-z]", text)
        nominal = 1e9 * float(row["gbyte_per_s"]) * int(cards[1] if cards else 1)
        latency = 1e-6 * float(row["latency_us"])
    nominal = _speed(SPEED.search(text)) or nominal
    name = text or f"{nominal / GBIT:g}gbit"
    return Link(name, nominal, TCP_S, "tcp") if "tcp" in text.lower() else Link(name, nominal, latency, "rdma")


def _speed(stated: re.Match[str] | None) -> float | None:
    """Return the bytes per second of a network's stated speed; None without one, or if it is impossible."""
    if stated is None:
        return None
    unit = 1e9 if stated[3] else 1000 * GBIT if stated[4] else GBIT
    speed = float(stated[1] or 1) * float(stated[2]) * unit
    return speed if 1 <= speed <= LARGEST else None


def links(text: str, kind: Device) -> tuple[Link, Link]:
    """Return the links that a user wrote as ``INSIDE,BETWEEN``; a missing one is the usual one of `kind`."""
    inside = [row["name"] for row in table("links") if row["place"] == "inside"] + ["nvlink", "pcie"]
    between = [row["name"] for row in table("links") if row["place"] == "between"]

    def is_between(name: str) -> bool:
        return name in between or _speed(SPEED.fullmatch(name.removesuffix("-tcp"))) is not None

    first, comma, second = (part.strip().lower() for part in text.partition(","))
    if not comma and is_between(first):
        first, second = "", first
    if first and first not in inside:
        wrong = "connects hosts, not devices" if is_between(first) else "is unknown"
        raise UsageError(
            f"--links {text}: {first!r} {wrong}; write INSIDE,BETWEEN, where INSIDE is one of {', '.join(inside)}"
        )
    if second and not is_between(second):
        wrong = "connects devices, not hosts" if second in inside else "is unknown"
        raise UsageError(
            f"--links {text}: {second!r} {wrong}; write INSIDE,BETWEEN, where BETWEEN is one of {', '.join(between)}, "
            "or a host's speed, such as 100gbit, 8x200gbit or 25gbit-tcp (without RDMA)"
        )
    if re.fullmatch(r"nvlink\d", first) and kind.nvlink != first and not kind.name.endswith("flops"):
        has = kind.nvlink or "no NVLink, apart from nvlink-bridge between two devices"
        raise UsageError(f"--links {text} contradicts --device {kind.name}, which has {has}; correct one of them")
    return inside_link(first, kind), between_link(second, kind)
