"""Devices in hosts, the links between them, and the time of a collective on both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.planner.calibration import Calibration

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
        local, hosts = min(ranks, self.devices_per_host), math.ceil(ranks / self.devices_per_host)
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
