"""Host time that a wrapper adds to a bare backward pass: hooks, bookkeeping and launches, measured with tiny tensors.

    layout     parameters   buckets
    small              16         3
    medium            160         8
    large             290        15   the number of parameters of SmolLM2-360M
    dense             161        29   the number of parameters of ResNet-50

Compares with torch's reducer in its two faster settings, ``gradient_as_bucket_view`` and ``batched_grad_copy``. All
variants take turns in one run, on one rank and on two. A turn is the median of many backward passes, and "added" is a
turn minus the bare turn of the same round. There are three clocks: wall time, CPU time of the thread that runs
backward, and CPU time of the process, which includes Gloo's threads. On shared cores, thread time is the steadiest. On
GPUs, it is the relevant time, because the reduction itself runs elsewhere.

On one rank, the backend does nothing, so only the reducer's time remains. By default, Paceline uses no reducer on one
rank; "paceline reducer" forces one. On two ranks, "paceline on gloo" leaves the reduction to Gloo's threads, like torch
DDP, and "paceline" reduces in shared memory, in the thread that runs backward.

Run by: paceline run --nproc 2 benchmarks/host_overhead.py --help
Decision 0051 has the results.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import nothing
import paceline
from harness import (
    CLOCKS,
    Clocks,
    between,
    median_ratio,
    medians,
    now,
    parser_of,
    save,
    take_turns,
    without_collections,
)

ELEMENTS = 64
"""Elements of each parameter."""
VIEWS, BATCHED = "torch views", "torch batched"


@dataclass(frozen=True)
class Layout:
    """The number of parameters and of buckets of a model."""

    parameters: int
    buckets: int

    @property
    def bucket_cap_mb(self) -> float:
        """The bucket capacity that results in this number of buckets."""
        return -(-self.parameters // self.buckets) * ELEMENTS * 4 / 2**20


LAYOUTS = {"small": Layout(16, 3), "medium": Layout(160, 8), "large": Layout(290, 15), "dense": Layout(161, 29)}


class Chain(nn.Module):
    """Tiny parameters that are used one after another, so that gradients also arrive one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(ELEMENTS)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """Map a vector to a number."""
        for part in self.parts:
            x = x * part
        return x.sum()


def wrappers(layout: Layout, world: int, gloo: dist.ProcessGroup, alone: dist.ProcessGroup) -> dict[str, nn.Module]:
    """Return the models to compare, by name. The group `gloo` has all ranks, `alone` only this rank."""
    cap = layout.bucket_cap_mb
    theirs = partial(nn.parallel.DistributedDataParallel, process_group=gloo if world > 1 else alone, bucket_cap_mb=cap)
    ours = partial(paceline.DistributedDataParallel, bucket_cap_mb=cap)
    found = {
        "bare": Chain(layout.parameters),
        VIEWS: theirs(Chain(layout.parameters), gradient_as_bucket_view=True),
        BATCHED: theirs(Chain(layout.parameters), batched_grad_copy=True),
    }
    if world == 1:
        reducing = ours(Chain(layout.parameters), process_group=alone)
        reducing._connect()
        return found | {"paceline": ours(Chain(layout.parameters), process_group=alone), "paceline reducer": reducing}
    return found | {
        "paceline": ours(Chain(layout.parameters)),
        "paceline on gloo": ours(Chain(layout.parameters), process_group=gloo),
    }


def turn(model: nn.Module, repeat: int) -> dict[str, Clocks]:
    """Run `repeat` steps. Return the median seconds of backward alone, and of forward and backward."""
    x = torch.ones(ELEMENTS)
    whole: list[list[int]] = []
    backward: list[list[int]] = []
    dist.barrier()
    with without_collections():
        for _ in range(repeat):
            loss_began = now()
            loss = model(x)
            began = now()
            loss.backward()
            ended = now()
            whole.append(between(loss_began, ended))
            backward.append(between(began, ended))
            for parameter in model.parameters():
                parameter.grad = None
    return {"backward": medians(backward), "forward and backward": medians(whole)}


def compare(models: dict[str, nn.Module], rounds: int, repeat: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the median milliseconds that each model adds according to each clock, and ratios to torch DDP."""
    turns = {name: partial(turn, model, repeat) for name, model in models.items()}
    measured = take_turns(turns, rounds)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for what in ("backward", "forward and backward"):
        added: dict[str, dict[str, list[float]]] = {}
        for name in models:
            pairs = list(zip(measured[name], measured["bare"], strict=True))
            added[name] = {clock: [a[what][clock] - b[what][clock] for a, b in pairs] for clock in CLOCKS}
        result = {
            "bare": {clock: 1000 * statistics.median(m[what][clock] for m in measured["bare"]) for clock in CLOCKS}
        }
        for name in models:
            if name == "bare":
                continue
            result[name] = {clock: 1000 * statistics.median(added[name][clock]) for clock in CLOCKS}
            for rival in (VIEWS, BATCHED):
                if name.startswith("paceline"):
                    for clock in CLOCKS:
                        result[name][f"{clock} / {rival}"] = median_ratio(added[name][clock], added[rival][clock])
        results[what] = {name: {key: round(value, 4) for key, value in row.items()} for name, row in result.items()}
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2], help="world sizes: 1, or the size of the job")
    parser.add_argument("--repeat", type=int, default=40, help="backward passes per turn")
    parser.add_argument("--quick", action="store_true", help="run few rounds, and write no file")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.repeat = 3, 15
    world = paceline.init("paceline")
    gloo = dist.new_group(backend="gloo")
    nothing.register()
    alone = [dist.new_group([rank], backend=nothing.NAME) for rank in range(world.size)][world.rank]
    table = Table("layout", "world", "wrapper", *CLOCKS, *(f"{clock} / views" for clock in CLOCKS), title="added, ms")
    results = {}
    for name in options.layouts:
        for size in options.worlds:
            models = wrappers(LAYOUTS[name], size, gloo, alone)
            result = compare(models, options.rounds, options.repeat)
            results[f"{name}, world of {size}"] = result
            for variant, row in result["forward and backward"].items():
                times = [f"{row[clock]:.3f}" for clock in CLOCKS]
                ratios = [f"{row[key]:.2f}" if (key := f"{clock} / {VIEWS}") in row else "" for clock in CLOCKS]
                table.add_row(name, str(size), variant, *times, *ratios)
            del models
            gc.collect()
    if world.is_main:
        Console(width=120).print(table)
        if not options.quick:
            print("kept in", save("host-overhead", results))
    world.close()


if __name__ == "__main__":
    main()
