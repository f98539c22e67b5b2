"""Whole training steps: the bare module, torch DDP and Paceline side by side, on the same process group.

Bare is the module without a wrapper, followed by a barrier: what a step costs without any synchronization.
Run by ``make bench``, or: paceline run --nproc 2 benchmarks/step_time.py --help
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline
from measure import median_ratio, save, take_turns
from workloads import WORKLOADS, Workload


def step_of(workload: Workload, wrap: Callable[[nn.Module], nn.Module], *, barrier: bool = False) -> Callable[[], None]:
    """One training step with fused AdamW, as a function."""
    torch.manual_seed(0)
    model = wrap(workload.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = workload.batch()

    def step() -> None:
        out = model(x)
        target = y if out.shape[-1] != 16 else y.clamp(max=15)
        F.cross_entropy(out, target).backward()
        if barrier:
            dist.barrier()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_ddp(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """torch's wrapper in its fastest setting."""
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, process_group=group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a variant's turn in a round")
    parser.add_argument("--crossed", action="store_true", help="also torch DDP on our group, and ours on Gloo")
    parser.add_argument("--bucket-cap-mb", type=float, nargs="*", help="also compare Paceline with these capacities")
    parser.add_argument("--save-as", default="step-time", help="name of the results' file, after the date")
    options = parser.parse_args()
    world = paceline.init("paceline")
    gloo = dist.new_group(backend="gloo")
    table = Table(
        "workload", "bare ms", "torch DDP / bare", "Paceline / bare", "torch DDP / Paceline", title="step time"
    )
    results = {}
    for name in options.workloads:
        workload = WORKLOADS[name]
        variants = {
            "bare": step_of(workload, lambda module: module, barrier=True),
            "torch": step_of(workload, partial(torch_ddp, group=gloo)),
            "paceline": step_of(workload, paceline.DistributedDataParallel),
        }
        if options.crossed:
            variants["torch on paceline"] = step_of(workload, torch_ddp)
            wrap = partial(paceline.DistributedDataParallel, process_group=gloo)
            variants["paceline on gloo"] = step_of(workload, wrap)
        for cap in options.bucket_cap_mb or ():
            wrap = partial(paceline.DistributedDataParallel, bucket_cap_mb=cap)
            variants[f"paceline {cap:g} MiB"] = step_of(workload, wrap)
        trial = torch.tensor(take_turns({"bare": variants["bare"]}, 1, 1)["bare"])
        dist.all_reduce(trial, op=dist.ReduceOp.MAX)
        seconds = take_turns(variants, options.rounds, max(1, int(options.seconds / float(trial[0]))))
        result = {"bare_ms": 1000 * statistics.median(seconds["bare"])}
        for variant in list(variants)[1:]:
            result[f"{variant} / bare"] = median_ratio(seconds[variant], seconds["bare"])
            result[f"torch / {variant}"] = median_ratio(seconds["torch"], seconds[variant])
        results[name] = {key: round(value, 3) for key, value in result.items()}
        world.print(name, results[name], flush=True)
        table.add_row(
            name,
            f"{result['bare_ms']:.1f}",
            f"{result['torch / bare']:.2f}",
            f"{result['paceline / bare']:.2f}",
            f"{result['torch / paceline']:.2f}",
        )
    if world.is_main:
        Console().print(table)
        print("kept in", save(options.save_as, results))
    world.close()


if __name__ == "__main__":
    main()
