"""The profiler's findings for planted causes, and its cost: ``python benchmarks/profiler_claims.py``.

Each plant is trained by 2 ranks in a script of its own, as users profile theirs; clean runs are of a recipe. Figures
that are known beforehand are printed beside the profile's. The cost is the difference between steps with the profiler
and the steps beside them without.
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
        # A rank that is a third slower is told from a busy host in ten seconds or so, not in four.
        found = profile(folder / name, script, name, 1, steps=150 if name == "sleep" else 40)
        advice = [one["kind"] for one in found["advice"]]
        bubble = found["bubble_ms_per_step"]["0"]
        rows.append([name, PLANTS[name], advice[:3], found["straggler_rank"], bubble])
        straggler = "" if found["straggler_rank"] is None else f", straggler: rank {found['straggler_rank']}"
        said = ", ".join(advice[:3])
        print(f"{name}: {said}; expected {PLANTS[name]}{straggler}; bubble {bubble:.1f} ms", flush=True)
    return rows


def accumulation(folder: Path, script: Path) -> list[float]:
    """Return all-reduce's share at 1 and 2 batches in a step, and the first run's prediction for 2."""
    runs = [profile(folder / "accumulated", script, "embedding", times) for times in (1, 2)]
    advice = next(one for one in runs[0]["advice"] if one["kind"] == "accumulation")
    shares = [*(run["allreduce_share"] for run in runs), advice["predictions"]["2"]]
    print(f"all-reduce share at 1, 2 batches: {shares[0]:.3f}, {shares[1]:.3f}; predicted for 2: {shares[2]:.3f}")
    return shares


COST = """
import json, random, sys, time, torch, paceline
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from torch import nn
from paceline.profiler.recording.recorder import Session
from paceline.profiler.recording.stack_samples import StackSampler
from paceline.profiler.recording.torch_spans import torch_spans
from paceline.core.telemetry.spans import recorder

folder, pairs, width, rows = sys.argv[1], *map(int, sys.argv[2:])
world = paceline.init()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
model = paceline.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(rows, width)

def step():
    wall, worked = time.perf_counter(), time.thread_time()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - wall, time.thread_time() - worked

for _ in range(40):
    step()
session = Session(Path(folder), operators=False)
for _ in range(12):  # those that warm up, and those with a mark for every gradient
    step()
session._hooks.close()
session._stacks.stop()
drawn = random.Random(0)  # the same on all ranks
on, off = [], []
for _ in range(pairs):
    for profiled in drawn.sample((True, False), 2):
        if not profiled:
            recorder.on = False
            off.append(step())
            continue
        with torch_spans(recorder, session):
            recorder.on, session._start = True, time.perf_counter()
            on.append(step())
recorder.on = False
began, count = time.thread_time(), len(session._steps.steps)
session._flush()
writing = (time.thread_time() - began) / count
session.close()
sampled = {True: [], False: []}
for _ in range(pairs // 5):
    for is_on in drawn.sample((True, False), 2):
        sampler = StackSampler() if is_on else None
        wall, worked = time.perf_counter(), time.process_time()
        for _ in range(10):
            step()
        sampled[is_on].append((time.perf_counter() - wall, time.process_time() - worked))
        if sampler is not None:
            sampler.stop()
if world.is_main:
    found = {"writing": writing}
    for place, clock in enumerate(("wall", "cpu")):
        ratios = [one[place] / other[place] - 1 for one, other in zip(sampled[True], sampled[False])]
        low, _, high = quantiles(ratios, n=4)
        found["sampler " + clock] = [median(ratios), 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5]
    for place, clock in enumerate(("wall", "cpu")):
        differences = [one[place] - other[place] for one, other in zip(on, off)]
        low, _, high = quantiles(differences, n=4)
        error = 1.25 * (high - low) / 1.35 / len(differences) ** 0.5
        found[clock] = [median(one[place] for one in off), median(differences), error]
    print(json.dumps(found))
"""


def overhead(folder: Path, pairs: int) -> dict[str, dict[str, Any]]:
    """Return the seconds that the profiler adds to small and middling steps, from pairs of steps with it and without.

    Two steps in a row, in an order that is drawn, have the machine's other load in common. Steps are written in one go
    every few seconds, so that is measured apart. So are the samples of the stack, in ten steps with them and ten
    without.
    """
    (folder / "cost.py").write_text(COST)
    found = {}
    for name, size in {"small": (256, 32), "middling": (512, 256)}.items():
        command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", str(folder / "cost.py")]
        arguments = map(str, (folder / name, pairs, *size))
        done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True, timeout=900)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        wall, cpu, writing = found[name]["wall"], found[name]["cpu"], found[name]["writing"]
        print(
            f"{name} steps of {wall[0] * 1e3:.1f} ms, of which {cpu[0] * 1e3:.1f} ms on a core: the profiler adds "
            f"{wall[1] * 1e6:.0f} ± {wall[2] * 1e6:.0f} us, {cpu[1] * 1e6:.0f} ± {cpu[2] * 1e6:.0f} us on the core, "
            f"and {writing * 1e6:.0f} us of writing: {(cpu[1] + writing) / cpu[0]:.1%} of the core's time",
            flush=True,
        )
        by_clock = {clock: "{:+.2%} ± {:.2%}".format(*found[name][f"sampler {clock}"]) for clock in ("wall", "cpu")}
        print(f"{name} steps: samples of the stack add {by_clock['wall']}, and {by_clock['cpu']} of cores", flush=True)
    return found


def clean_runs(folder: Path, runs: int) -> list[list[Any]]:
    """Profile the recipe digits, in which nothing is planted; returns steps, seconds and the straggler of each run."""
    command = [sys.executable, "-m", "paceline", "profile", "--nproc", "2", "--no-operators", "--out", str(folder)]
    found = []
    for number in range(runs):
        subprocess.run([*command, "digits", "--epochs", "4"], check=True, capture_output=True, timeout=600)
        summary = json.loads((folder / "summary.json").read_text())
        seconds = summary["steps"] * sum(summary["parts_ms_per_step"]["0"].values()) / 1e3
        found.append([summary["steps"], seconds, summary["straggler_rank"]])
        print(f"clean run {number}: {summary['steps']} steps, {seconds:.1f} s, straggler {found[-1][2]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clean", type=int, default=20, help="clean runs, in which no straggler may be named")
    parser.add_argument("--pairs", type=int, default=500, help="pairs of steps for the cost; 0 leaves it out")
    parser.add_argument("--no-accumulation", action="store_true")
    parser.add_argument("--plants", nargs="*", default=list(PLANTS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        rows = plants(folder, script, arguments.plants)
        alarms = clean_runs(folder / "clean", arguments.clean)
        shares = [] if arguments.no_accumulation else accumulation(folder, script)
        costs = overhead(folder, arguments.pairs) if arguments.pairs else {}
    named = sum(rank is not None for _, _, rank in alarms)
    print(f"clean runs: {named} of {arguments.clean} named a straggler")
    results = {"plants": rows, "clean": alarms, "shares and prediction": shares, "costs": costs}
    print("kept in", save("profiler-claims", results, ranks=2))


if __name__ == "__main__":
    main()
