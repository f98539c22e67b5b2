"""Whole training steps with the bare module, torch DDP and Paceline, in turns.

"bare" is the module without a wrapper, followed by a barrier, in the faster mode of zero_grad. It is the cost of a step
without synchronizing gradients. The reference is the minimum cost with a wrapper: a bare step, plus one copy and one
reduction of all gradients, which are timed separately in the same rounds.
Run by ``make bench``, or: paceline run --nproc 2 benchmarks/step_time.py --help
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.table import Table
from torch import nn

import paceline
from harness import median_ratio, parser_of, report, take_turns, timed
from paceline.comm.process_group import PacelineProcessGroup
from paceline.ddp.buckets import CAPACITY
from workloads import WORKLOADS, Workload

FIXED = ("bare", "bare, zeroed", "copy", "reduction", "torch", "paceline")
"""Variants that are always timed."""


def step_of(
    workload: Workload, wrap: Callable[[nn.Module], nn.Module], *, barrier: bool = False, to_none: bool = True
) -> Callable[[], None]:
    """Return a function that trains one step with fused AdamW."""
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
        optimizer.zero_grad(set_to_none=to_none)

    return step


def shapes_of(workload: Workload) -> list[torch.Size]:
    """Return the shapes of the model's parameters, without allocating the model."""
    with torch.device("meta"):
        return [parameter.shape for parameter in workload.build().parameters()]


def copy_of_gradients(workload: Workload) -> Callable[[], None]:
    """Return a function that copies gradients of the model's shapes into one flat tensor."""
    gradients = [torch.ones(shape) for shape in shapes_of(workload)]
    counts = [gradient.numel() for gradient in gradients]
    parts = torch.zeros(sum(counts)).split(counts)
    views = [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
    return lambda: torch._foreach_copy_(views, gradients)


def reduction_of_gradients(workload: Workload) -> Callable[[], None]:
    """Return a function that reduces the same number of elements in place, in buckets of Paceline's capacity."""
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, PacelineProcessGroup)
    flat = group.allocate(sum(shape.numel() for shape in shapes_of(workload)), torch.float32)
    buckets = flat.split(CAPACITY // 4)

    def reduce() -> None:
        for launched in [group.launch_all_reduce(bucket) for bucket in buckets]:
            launched.wait()

    return reduce


def torch_ddp(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Wrap with torch DDP in its fastest setting."""
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, process_group=group)


def variants_of(workload: Workload, extra: Sequence[str], capacities: Sequence[float]) -> dict[str, Callable[[], None]]:
    """Return the functions to time, by name."""
    gloo = dist.new_group(backend="gloo")
    ours = paceline.DistributedDataParallel
    more: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch on paceline": torch_ddp,
        "paceline on gloo": partial(ours, process_group=gloo),
        **{f"paceline {cap:g} MiB": partial(ours, bucket_cap_mb=cap) for cap in capacities},
    }
    return {
        "bare": step_of(workload, lambda module: module, barrier=True),
        "bare, zeroed": step_of(workload, lambda module: module, barrier=True, to_none=False),
        "copy": copy_of_gradients(workload),
        "reduction": reduction_of_gradients(workload),
        "torch": step_of(workload, partial(torch_ddp, group=gloo)),
        "paceline": step_of(workload, ours),
        **{name: step_of(workload, wrap) for name, wrap in more.items() if name in extra or name.endswith("MiB")},
    }


def summary(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the ratios, each as a median over the rounds."""
    bare = min(("bare", "bare, zeroed"), key=lambda name: statistics.median(seconds[name]))
    rounds = zip(seconds[bare], seconds["copy"], seconds["reduction"], strict=True)
    reference = [sum(parts) for parts in rounds]
    result = {f"{bare} ms": 1000 * statistics.median(seconds[bare])}
    result["reference / bare"] = median_ratio(reference, seconds[bare])
    for name in seconds:
        if name in ("torch", "paceline") or name not in FIXED:
            result[f"{name} / bare"] = median_ratio(seconds[name], seconds[bare])
            result[f"reference / {name}"] = median_ratio(reference, seconds[name])
            if name == "torch":
                continue
            result[f"torch / {name}"] = median_ratio(seconds["torch"], seconds[name])
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a variant's turn in a round")
    extra = ("torch on paceline", "paceline on gloo")
    parser.add_argument("--also", nargs="+", default=[], choices=extra, help="additional variants")
    parser.add_argument(
        "--bucket-cap-mb", type=float, nargs="+", default=[], help="also time Paceline with these bucket capacities"
    )
    parser.add_argument("--save-as", default="step-time", help="name of the results file, after the date")
    options = parser.parse_args()
    world = paceline.init("paceline")
    columns = ("bare ms", "torch DDP / bare", "Paceline / bare", "reference / Paceline", "torch DDP / Paceline")
    table = Table("workload", *columns, title="step time")
    results = {}
    for name in options.workloads:
        variants = variants_of(WORKLOADS[name], options.also, options.bucket_cap_mb)
        trial = torch.tensor(take_turns({"bare": partial(timed, variants["bare"], 1)}, 1)["bare"])
        dist.all_reduce(trial, op=dist.ReduceOp.MAX)
        repeat = max(1, int(options.seconds / float(trial[0])))
        turns = {variant: partial(timed, step, repeat) for variant, step in variants.items()}
        result = summary(take_turns(turns, options.rounds))
        results[name] = {key: round(value, 3) for key, value in result.items()}
        world.print(name, results[name], flush=True)
        shown = ("torch / bare", "paceline / bare", "reference / paceline", "torch / paceline")
        table.add_row(name, f"{next(iter(result.values())):.1f}", *(f"{result[column]:.2f}" for column in shown))
        del variants  # otherwise, there is not enough memory for the next model
        gc.collect()
    report(table, options.save_as, results)
    world.close()


if __name__ == "__main__":
    main()
