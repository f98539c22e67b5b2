"""What the profiler says of planted causes, and what it costs: ``python benchmarks/profiler_claims.py``.

Each plant is trained by 2 ranks in a script of its own, as users profile theirs; so is a clean run, several times. The
figures that are known beforehand are printed beside what the profile says. The cost is that of the same training with
the profiler on and off, in turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dated_results import save

SCRIPT = """
import random, sys, time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, Dataset

plant, accumulate = sys.argv[1], int(sys.argv[2])
world = paceline.init()
torch.manual_seed(0)
width = {"tiny": 32, "embedding": 64}.get(plant, 512)
rows = {"tiny": 2, "embedding": 64}.get(plant, 512)

class Data(Dataset):
    def __len__(self):
        return rows * 400
    def __getitem__(self, index):
        if plant == "data":
            time.sleep(0.0002)
        return torch.randint(0, 200000, (8,)) if plant == "embedding" else torch.randn(width)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(200000, width) if plant == "embedding" else nn.Identity()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)])
    def forward(self, x):
        x = self.layers(self.table(x))
        if plant == "sleep" and world.rank == 1:
            time.sleep(0.03)
        if plant == "uneven":
            time.sleep(0.05 * random.random())
        return x

if plant == "cores" and world.rank == 1:
    import os, subprocess
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [core])
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core
    import atexit
    atexit.register(rival.kill)
model = paceline.DistributedDataParallel(Net(), bucket_cap_mb=1)
if plant == "bucket":
    def hook(state, bucket):
        if bucket.index() == 1:
            time.sleep(0.03)
        return torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(None, bucket)
    import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
    model.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
steps = 0
while True:
    for batch in paceline.accumulate(model, DataLoader(Data(), batch_size=rows), accumulate):
        model(batch).square().mean().backward()
        if model.do_sync:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if len(sys.argv) > 3 and steps == int(sys.argv[3]):
                raise SystemExit
"""
PLANTS = {
    "sleep": "straggler",
    "data": "data-loading",
    "embedding": "accumulation",
    "tiny": "larger-batch",
    "bucket": "slow-bucket",
    "uneven": "balance",
    "cores": "straggler",
}


def profile(folder: Path, script: Path, *arguments: Any, steps: int = 40) -> dict[str, Any]:
    """Profile the script; returns its summary."""
    command = [sys.executable, "-m", "paceline", "profile", "--nproc", "2", "--steps", str(steps), "--out", str(folder)]
    subprocess.run([*command, str(script), *map(str, arguments)], check=True, capture_output=True, timeout=600)
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def plants(folder: Path, script: Path, names: Iterable[str]) -> list[list[Any]]:
    """Profile every plant; returns rows for the table."""
    rows = []
    for name in names:
        found = profile(folder / name, script, name, 1)
        advice = [one["kind"] for one in found["advice"]]
        bubble = found["bubble_ms_per_step"]["0"]
        rows.append([name, PLANTS[name], advice[:3], found["straggler_rank"], bubble])
        straggler = "" if found["straggler_rank"] is None else f", straggler: rank {found['straggler_rank']}"
        said = ", ".join(advice[:3])
        print(f"{name}: {said}; expected {PLANTS[name]}{straggler}; bubble {bubble:.1f} ms", flush=True)
    return rows


COST = """
import contextlib, json, sys, time, torch, paceline
from statistics import median
from torch import nn

folder, turns, width, rows = sys.argv[1], *map(int, sys.argv[2:])
world = paceline.init()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
model = paceline.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(rows, width)

def steps(count):
    times = []
    for _ in range(count):
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return median(times[12:])  # without those that warm up, and those with a mark for every gradient

steps(30)
ratios = []
for turn in range(turns):
    on = {}
    for profiled in (True, False) if turn % 2 else (False, True):
        with paceline.profiler.profile(f"{folder}/{turn}", operators=False) if profiled else contextlib.nullcontext():
            on[profiled] = steps(60)
    ratios.append(on[True] / on[False])
if world.is_main:
    print(json.dumps([median(ratios), on[False]]))
"""


def overhead(folder: Path, turns: int) -> dict[str, list[float]]:
    """Return, for small and middling steps, the step with the profiler by that without, and seconds of the latter."""
    (folder / "cost.py").write_text(COST)
    found = {}
    for name, size in {"small": (256, 32), "middling": (512, 256)}.items():
        command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", str(folder / "cost.py")]
        arguments = map(str, (folder / "on", turns, *size))
        done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True, timeout=900)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clean", type=int, default=20, help="clean runs, in which no straggler may be named")
    parser.add_argument("--turns", type=int, default=9, help="pairs of stretches of 60 steps for the cost")
    parser.add_argument("--plants", nargs="*", default=list(PLANTS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        rows = plants(folder, script, arguments.plants)
        alarms = [profile(folder / "clean", script, "none", 1)["straggler_rank"] for _ in range(arguments.clean)]
        named = sum(rank is not None for rank in alarms)
        accumulated = [profile(folder / "accumulated", script, "embedding", times) for times in (1, 2)]
        predicted = next(one for one in accumulated[0]["advice"] if one["kind"] == "accumulation")["predictions"]["2"]
        shares = [one["allreduce_share"] for one in accumulated]
        costs = overhead(folder, arguments.turns) if arguments.turns else {}
    print(f"clean runs: {named} of {arguments.clean} named a straggler")
    print(f"all-reduce share at 1, 2 batches: {shares[0]:.3f}, {shares[1]:.3f}; predicted for 2: {predicted:.3f}")
    for name, (ratio, seconds) in costs.items():
        print(f"{name} steps of {seconds * 1e3:.1f} ms: with the profiler / without {ratio:.3f}")
    results = {"plants": rows, "clean": alarms, "shares": shares, "predicted": predicted, "on by off": costs}
    print("kept in", save("profiler-claims", results, ranks=2))


if __name__ == "__main__":
    main()
