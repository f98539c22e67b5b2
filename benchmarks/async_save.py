"""Slowdown of a training loop from blocking and background saves of a model with AdamW.

Blocking saves, background saves and no saves take turns. In each turn, the loop saves, then computes for `--step`
seconds on one thread. The cost of a save is the extra time of a turn compared with a turn without a save. It includes
the time that the background thread takes from the training thread. ::

    python benchmarks/async_save.py --parameters 100_000_000 --rounds 5
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

from harness import parser_of, save
from paceline import Checkpointer


def states(parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with about this number of parameters, and AdamW after its first step."""
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(max(1, parameters // width**2))))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def compute(seconds: float, size: int = 256) -> int:
    """Multiply matrices for `seconds`, and return the number of products."""
    matrix, count, end = torch.rand(size, size), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix
        count += 1
    return count


def multiply(count: int, size: int = 256) -> None:
    """Compute `count` matrix products, as in :func:`compute`."""
    matrix = torch.rand(size, size)
    for _ in range(count):
        matrix @ matrix


def turn(checkpointer: Checkpointer | None, step: int, count: int) -> tuple[float, float]:
    """Save, compute, and wait for the save. Return the seconds in save(), and the seconds until the wait."""
    start = time.perf_counter()
    if checkpointer is not None:
        checkpointer.save(step)
    held = time.perf_counter() - start
    multiply(count)
    total = time.perf_counter() - start
    if checkpointer is not None:
        checkpointer.wait()
    return held, total


def main() -> None:
    """Print medians as JSON."""
    parser = parser_of(__doc__, 5)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--step", type=float, default=10.0, help="seconds of computation after a save")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=None, help="folder on the disk to write to")
    parser.add_argument("--keep", action="store_true", help="keep the results in a file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, optimizer = states(options.parameters)
    count = compute(options.step)
    found: dict[str, list[tuple[float, float]]] = {"none": [], "waits": [], "background": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpointers = {
            "none": None,
            "waits": Checkpointer(f"{folder}/waits", keep=1),
            "background": Checkpointer(f"{folder}/background", keep=1, async_save=True),
        }
        for checkpointer in checkpointers.values():
            if checkpointer is not None:
                checkpointer.register("model", model)
                checkpointer.register("optimizer", optimizer)
        for round in range(options.rounds + 1):
            for name, checkpointer in checkpointers.items():
                seconds = turn(checkpointer, round, count)
                if round:  # skip the first round, which touches new memory
                    found[name].append(seconds)
        for checkpointer in checkpointers.values():
            if checkpointer is not None:
                checkpointer.close()
    held = {name: statistics.median(held for held, _ in each) for name, each in found.items()}
    total = {name: statistics.median(total for _, total in each) for name, each in found.items()}
    loop: dict[str, Any] = {name: total[name] - total["none"] for name in ("waits", "background")}
    results = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "threads": options.threads,
        "save_s": held,
        "loop_s": loop,
        "save_share": held["background"] / held["waits"],
        "loop_share": loop["background"] / loop["waits"],
    }
    print(json.dumps(results, indent=1))
    if options.keep:
        print("kept in", save("async-save", results, ranks=1))


if __name__ == "__main__":
    main()
