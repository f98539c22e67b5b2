"""Whole training steps with sharded and unsharded optimizers, for Paceline and torch, in turns in one run.

Instead of times, --memory measures a rank's peak memory and optimizer state, with each variant in separate processes.
--config CONFIG.json adds a language model in float32; SmolLM2-360M takes 5 to 8 GiB per rank.
Run by: paceline run --nproc 2 benchmarks/sharded_optimizer.py --help; with --memory, without paceline run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.table import Table
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import paceline
from harness import median_ratio, parser_of, report, slowest_timed, take_turns
from paceline.ddp.buckets import MIB
from paceline.optim import ShardedOptimizer
from step_time import torch_ddp
from workloads import WORKLOADS, language_model

ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
VARIANTS = ("torch DDP", "torch DDP + ZeRO", "paceline", "paceline, sharded")


def proportional_bytes() -> int:
    """Return the proportional set size of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/smaps_rollup has no Pss")


class Peak:
    """Samples the process's memory in a thread while it is open."""

    def __enter__(self) -> Peak:
        self.bytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(0.003):
            self.bytes = max(self.bytes, proportional_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def trained_by(
    variant: str, module: nn.Module, gloo: dist.ProcessGroup | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the wrapped module and its optimizer."""
    if variant.startswith("torch"):
        model = torch_ddp(module, gloo)
        if variant == "torch DDP":
            return model, torch.optim.AdamW(model.parameters(), **ADAMW)
        # Its fastest setting.
        view: dict[str, Any] = {"parameters_as_bucket_view": True, "process_group": gloo}
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **view, **ADAMW)
    ours = paceline.DistributedDataParallel(module)
    if variant == "paceline":
        return ours, torch.optim.AdamW(ours.parameters(), **ADAMW)
    return ours, ShardedOptimizer(ours, torch.optim.AdamW, **ADAMW)


def training_of(
    workload: str, variant: str, gloo: dist.ProcessGroup | None
) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """Return the optimizer, and a function that trains one step."""
    torch.manual_seed(0)
    model, optimizer = trained_by(variant, WORKLOADS[workload].build(), gloo)
    x, y = WORKLOADS[workload].batch()

    def step() -> None:
        out = model(x)
        F.cross_entropy(out, y.clamp(max=out.shape[-1] - 1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state that this rank holds."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    tensors = [value for entry in inner.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure_memory(workload: str, variant: str, steps: int, result: Path) -> None:
    """Train on this rank. Rank 0 writes the largest peak and the largest state of all ranks to the file `result`."""
    world = paceline.init("paceline" if variant.startswith("paceline") else "gloo")
    optimizer, step = training_of(workload, variant, dist.group.WORLD)
    for number in range(steps):
        if number == 2:  # by now, buckets have been rebuilt and the optimizer has its state
            peak = Peak().__enter__()
        step()
    peak.__exit__()
    most = torch.tensor([peak.bytes, state_bytes(optimizer)], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if world.is_main:
        peak_mib, state_mib = (most / MIB).tolist()
        result.write_text(json.dumps({"peak MiB": round(peak_mib, 1), "state MiB": round(state_mib, 1)}))
    world.close()


def compare_memory(workloads: list[str], nproc: int, steps: int, config: list[str]) -> None:
    table = Table("workload", "MiB of a rank", *VARIANTS, title="memory of a rank: peak, and the optimizer's state")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for workload in workloads:
        results[workload] = {}
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "memory"
                command = [sys.executable, "-m", "paceline", "run", "--nproc", str(nproc), __file__, *config]
                command += ["--steps", str(steps), "--train", workload, variant, str(result)]
                subprocess.run(command, check=True, timeout=1200)
                results[workload][variant] = json.loads(result.read_text())
        for name in ("peak MiB", "state MiB"):
            table.add_row(workload, name, *(f"{found[name]:,.0f}" for found in results[workload].values()))
        print(json.dumps({workload: results[workload]}), flush=True)
    report(table, "sharded-optimizer-memory", results, nproc)


def compare_times(workloads: list[str], rounds: int, seconds: float) -> None:
    world = paceline.init("paceline")
    gloo = dist.new_group(backend="gloo")
    columns = ("torch DDP ms", *(f"torch DDP / {name}" for name in VARIANTS[1:]), "ZeRO / ours", "unsharded / sharded")
    table = Table("workload", *columns, title=f"whole steps with fused AdamW, {world.size} ranks")
    results = {}
    for workload in workloads:
        steps = {name: training_of(workload, name, gloo)[1] for name in VARIANTS}
        for step in steps.values():  # the first steps create the optimizer's state and rebuild buckets
            step(), step()
        calls = torch.tensor(max(1, round(seconds / slowest_timed(steps["torch DDP"], 2))))
        dist.broadcast(calls, 0)
        turns = {name: partial(slowest_timed, step, int(calls)) for name, step in steps.items()}
        times = take_turns(turns, rounds, rotated=True)
        torch_zero, ours = times["torch DDP + ZeRO"], times["paceline, sharded"]
        found = {f"{name} ms": 1000 * statistics.median(each) for name, each in times.items()}
        found |= {f"torch DDP / {name}": median_ratio(times["torch DDP"], times[name]) for name in VARIANTS[1:]}
        found |= {"ZeRO / ours": median_ratio(torch_zero, ours)}
        found |= {"unsharded / sharded": median_ratio(times["paceline"], ours)}
        results[workload] = {name: round(value, 3) for name, value in found.items()}
        table.add_row(workload, *(f"{results[workload][name]:.2f}" for name in columns))
        if world.is_main:
            print(json.dumps({workload: results[workload]}), flush=True)
        del steps, turns
        gc.collect()
    report(table, "sharded-optimizer", results)
    world.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="*", default=["mlp-10M", "mlp-100M"], help=", ".join(WORKLOADS))
    parser.add_argument("--config", type=Path, help="config.json of an additional language model")
    parser.add_argument("--tokens", type=int, default=64, help="with --config: tokens in a rank's batch")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a variant's turn in a round")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--nproc", type=int, default=2, help="with --memory: number of ranks")
    parser.add_argument("--steps", type=int, default=8, help="with --memory: number of steps, 2 of them for warm-up")
    parser.add_argument("--train", nargs=3, metavar=("WORKLOAD", "VARIANT", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    config: list[str] = []
    if options.config is not None:
        if not options.config.is_file():
            parser.error(f"there is no file {options.config}")
        model = language_model(options.config, options.tokens)
        WORKLOADS[model.name] = model
        config = ["--config", str(options.config), "--tokens", str(options.tokens)]
        options.workloads.append(model.name)
    if unknown := [name for name in options.workloads if name not in WORKLOADS]:
        parser.error(f"there is no workload {unknown[0]}; choose from {', '.join(WORKLOADS)}")
    if options.steps < 3:
        parser.error("--steps has to be 3 or more, as the first two are not measured")
    if options.train:
        workload, variant, result = options.train
        measure_memory(workload, variant, options.steps, Path(result))
    elif options.memory:
        compare_memory(options.workloads, options.nproc, options.steps, config)
    else:
        compare_times(options.workloads, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
