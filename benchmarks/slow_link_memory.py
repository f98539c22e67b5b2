"""Resident memory of LocalSGD and DiLoCo on two ranks, in copies of the model.

Each variant runs in new processes. Its figures are those of rank 0, which leads an island, minus AdamW's alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline
from harness import parser_of, save
from paceline.optim import DiLoCo, LocalSGD

VARIANTS: dict[str, dict[str, Any] | None] = {
    "AdamW": None,
    "LocalSGD": {},
    "DiLoCo": {"fragments": 1},
    "DiLoCo, 4 fragments": {"fragments": 4},
    "DiLoCo, int8": {"fragments": 1, "compress": "int8"},
}
EVERY, STEPS, WIDTH, LAYERS = 4, 8, 1024, 24


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def measure(name: str) -> None:
    """Train on this rank, and print the memory at the end and at the peak."""
    world, options = paceline.init(), VARIANTS[name]
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    size = sum(parameter.nbytes for parameter in net.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters())
    if name == "LocalSGD":
        optimizer = LocalSGD(net, optimizer, EVERY)
    elif options is not None:
        outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        optimizer = DiLoCo(net, optimizer, outer, EVERY, **options)
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident())

    threading.Thread(target=watch, daemon=True).start()
    for _ in range(STEPS):
        net(torch.randn(4, WIDTH, device="cpu")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    done.set()
    world.print(json.dumps({"kept": resident() / size, "peak": peak[0] / size}))
    world.close()


def main() -> None:
    parser_of(__doc__ or "", rounds=None).parse_args()
    results: dict[str, dict[str, float]] = {}
    for name in VARIANTS:
        command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", __file__, name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
    table = Table("", "kept", "at the peak")
    alone = results.pop("AdamW")
    for name, result in results.items():
        results[name] = {key: value - alone[key] for key, value in result.items()}
        table.add_row(name, *(f"+{value:.1f}" for value in results[name].values()))
    Console().print(table)
    print("kept in", save("slow-link-memory", results, ranks=2))


if __name__ == "__main__":
    measure(sys.argv[1]) if sys.argv[1:] and sys.argv[1] in VARIANTS else main()
