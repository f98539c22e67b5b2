"""Predictions of ``paceline estimate-memory`` compared with the peak memory of training, on one rank and on two.

Each model trains in new ranks of ``paceline run``. The measured value is the peak of resident memory (VmHWM) minus the
resident memory after all imports. Buckets that are mapped from other ranks do not count, so the sum over ranks is the
job's memory. The models in ``FRESH`` were held out when the constants were chosen, except ``LIFETIME`` (decision 52).

Run by: python benchmarks/memory_estimate.py --help
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import estimated_models
import paceline
from estimated_models import ALL, CASES, FRESH, HELD_OUT
from harness import parser_of, save
from paceline.ddp.buckets import MIB
from paceline.tools.memory_estimate.footprints import DDP, parse_optimizer

MARGIN = 0.15
"""Relative error within which an estimate counts as good."""


def read_bytes(file: str, *names: str) -> list[int]:
    """Read values in bytes from a file of this process in /proc."""
    pairs = (line.partition(":")[::2] for line in Path(f"/proc/self/{file}").read_text().splitlines())
    found = {name: value for name, value in pairs if name in names}
    return [1024 * int(found[name].split()[0]) for name in names]


def loss_of(output: Tensor, x: Tensor) -> Tensor:
    """Return a loss that suits the shape of the output."""
    if output.shape == x.shape:
        return F.mse_loss(output, x)
    logits = output.flatten(0, -2)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


def train(name: str, steps: int, result: Path) -> None:
    """Train on this rank. Rank 0 writes the largest peaks of all ranks to the file `result`."""
    case = ALL[name]
    trial = parse_optimizer(case.optimizer)
    with torch.device("meta"):
        case.module()  # imports the libraries that it needs
    (before,) = read_bytes("status", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the current value
    world = paceline.init()
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(case.module())
    optimizer = trial.optimizer_class(model.parameters(), **trial.options)
    for _ in range(steps):
        x = case.inputs()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            if callable(case.build):
                output = model(x)
                loss = loss_of(output, x)
            else:
                output = model(input_ids=x, labels=x)
                loss = output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # wait, so that all ranks still map the shared memory, which is divided among them
    peak, shared = read_bytes("status", "VmHWM", "RssShmem")
    (share,) = read_bytes("smaps_rollup", "Pss_Shmem")
    peaks = torch.tensor([peak - before - shared + share, peak - before], dtype=torch.float64)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    if world.is_main:
        result.write_text(json.dumps([int(value) for value in peaks]))
    world.close()


def measure(name: str, ranks: int, steps: int) -> tuple[int, int]:
    """Return the peak of a rank without the memory mapped from other ranks, and with it."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "peaks"
        command = [sys.executable, "-m", "paceline", "run", "--nproc", str(ranks), __file__]
        subprocess.run([*command, "--steps", str(steps), "--train", name, str(result)], check=True, timeout=900)
        own, resident = json.loads(result.read_text())
    return own, resident


def predict(name: str) -> dict[int, dict[str, Any]]:
    """Return the row of the wrapper that the command prints for one rank and for two."""
    case = ALL[name]
    with tempfile.TemporaryDirectory() as folder:
        if callable(case.build):
            model = f"{estimated_models.__file__}:{case.build.__name__}"
        else:
            model = f"{folder}/config.json"
            Path(model).write_text(json.dumps(case.build))
        command = [
            sys.executable,
            "-m",
            "paceline",
            "estimate-memory",
            model,
            "--nproc",
            "1,2",
            *case.options,
            "--json",
        ]
        done = subprocess.run(command, check=True, capture_output=True, timeout=600)
    return {row["nproc"]: row for row in json.loads(done.stdout)["ranks"] if row["strategy"] == DDP}


def compare(name: str, steps: int, table: Table) -> dict[str, Any]:
    """Measure one model, and return a row for each number of ranks."""
    result: dict[str, Any] = {}
    for ranks, row in predict(name).items():
        own, resident = measure(name, ranks, steps)
        peak = row["peak"] / MIB
        ratio = row["peak"] / own
        is_inside = abs(ratio - 1) <= MARGIN
        result[str(ranks)] = {
            "predicted": round(peak, 1),
            "measured": round(own / MIB, 1),
            "with_memory_of_others": round(resident / MIB, 1),
            "ratio": round(ratio, 3),
        }
        cells = [
            f"{peak:.0f}",
            f"{own / MIB:.0f}",
            f"{ratio:.2f}",
            "" if is_inside else "outside",
        ]
        table.add_row(name if ranks == 1 else "", str(ranks), *cells)
        print(json.dumps({name: {ranks: result[str(ranks)]}}), flush=True)
    return result


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the smallest and the largest ratio, and the number of good estimates."""
    ratios = [row["ratio"] for rows in results.values() for row in rows.values()]
    good = sum(abs(ratio - 1) <= MARGIN for ratio in ratios)
    return {"lowest_ratio": min(ratios), "highest_ratio": max(ratios), "good": good, "of": len(ratios)}


def main() -> None:
    parser = parser_of(__doc__, None)
    parser.add_argument("--models", nargs="+", default=[*ALL], choices=[*ALL])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--train", nargs=2, metavar=("MODEL", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train[0], options.steps, Path(options.train[1]))
        return
    table = Table("model", "ranks", "predicted MiB", "measured", "ratio", "", title="peak memory of a rank")
    found = {name: compare(name, options.steps, table) for name in options.models}
    groups = {"ten": CASES, "held_out": HELD_OUT, "fresh": FRESH}
    results = {group: {name: rows for name, rows in found.items() if name in names} for group, names in groups.items()}
    summaries = {group: summary(rows) for group, rows in results.items() if rows}
    Console().print(table)
    print(json.dumps(summaries))
    print("kept in", save("memory-estimate", {**results, "summary": summaries}, 2))


if __name__ == "__main__":
    main()
