"""Cores for each rank, from one NUMA node if possible: ``paceline run --pin``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import UsageError

OPTION = "--pin"
CORES = "PACELINE_CORES"
"""Environment variable that tells :mod:`paceline.launch.rank.child` the cores of each rank: ``0,1;2,3``."""
NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pinned(ranks: int) -> list[list[int]]:
    """Return the cores for each of `ranks` ranks on this host, among those that this process may use."""
    if sys.platform != "linux":
        raise UsageError(f"{OPTION} needs Linux, and this is {sys.platform}; leave it out")
    return share_cores(numa_nodes(os.sched_getaffinity(0)), ranks)


def share_cores(nodes: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Deal the cores of `nodes` to `ranks` ranks: neighbours in one node, as equally as they go.

    Each rank goes to the node that then has most cores for each of its ranks (D'Hondt's method), so that no node has
    more ranks than cores.
    """
    total = sum(map(len, nodes))
    if total < ranks:
        raise UsageError(
            f"{OPTION} gives every rank cores of its own, and there are {total} for {ranks} ranks; start at most "
            f"{total}, or leave it out"
        )
    counts = [0] * len(nodes)
    for _ in range(ranks):
        place = max(range(len(nodes)), key=lambda at: len(nodes[at]) / (counts[at] + 1))
        counts[place] += 1
    shares: list[list[int]] = []
    for cores, count in zip(nodes, counts, strict=True):
        for part in range(count):
            shares.append(list(cores[len(cores) * part // count : len(cores) * (part + 1) // count]))
    return shares


def numa_nodes(allowed: set[int], nodes: Path = NODES, cpus: Path = CPUS) -> list[list[int]]:
    """Return the `allowed` cores of each NUMA node, threads of one physical core side by side."""
    found: list[list[int]] = []
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores = _numbers(folder / "cpulist") & allowed
        if cores:
            found.append(sorted(cores, key=lambda core: (_first_sibling(core, cpus), core)))
    known = {core for cores in found for core in cores}
    rest = sorted(allowed - known, key=lambda core: (_first_sibling(core, cpus), core))
    return [*found, rest] if rest else found


def _first_sibling(core: int, cpus: Path) -> int:
    return min(_numbers(cpus / f"cpu{core}" / "topology" / "thread_siblings_list"), default=core)


def _numbers(file: Path) -> set[int]:
    """Read a list such as ``0-3,8``; empty if there is none."""
    try:
        parts = [part.partition("-") for part in file.read_text().strip().split(",") if part]
        return {number for low, _, high in parts for number in range(int(low), int(high or low) + 1)}
    except (OSError, ValueError):
        return set()


def as_setting(shares: Sequence[Sequence[int]]) -> str:
    """Return `shares` in the format of :data:`CORES`."""
    return ";".join(",".join(map(str, cores)) for cores in shares)
