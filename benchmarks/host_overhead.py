"""Host time that a wrapper adds to a bare step: hooks, bookkeeping and launches, measured with tiny tensors.

    layout     parameters   buckets
    tiny                8         1
    small              16         3
    medium            160         8
    large             290        15   the number of parameters of SmolLM2-360M
    dense             161        29   the number of parameters of ResNet-50

A step is a forward, a backward, an optimizer step and zero_grad. All variants take turns in one run; torch DDP's
reducer is in its two faster settings, ``gradient_as_bucket_view`` and ``batched_grad_copy``. A turn is the median of
many steps, and "added" is a turn minus the bare turn of the same round. There are three clocks: wall time, CPU time of
the thread that runs the step, and CPU time of the process, which includes Gloo's threads. On shared cores, thread time
is the steadiest. On GPUs, it is the relevant time, because the reduction itself runs elsewhere.

On one rank, the backend does nothing, so only the reducer's time remains. By default, Paceline uses no reducer on one
rank; "paceline reducer" forces one. On two ranks, "paceline on gloo" leaves the reduction to Gloo's threads, like torch
DDP, and "paceline" reduces in shared memory, in the thread that runs backward.

With ``--beside-gpu``, Paceline takes the path of ranks whose gradients are on GPUs: reports are read at the optimizer
step, and stand-ins take the place of the device's events and of its queries, so their own time is not included. With
``--backward-thread``, backward runs in a second thread on another core, as autograd's does for a device.

``paceline run`` gives every rank a black box, which Paceline's variants write to in every step; torchrun does not.

Run by: paceline run --nproc 2 benchmarks/host_overhead.py --help
Decision 0051 has the results.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks as global_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_pre_hooks

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
from paceline.ddp import finisher
from paceline.ddp.channel import TEST_HOST_CHANNEL
from paceline.ddp.extensions import GraphCapture

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


LAYOUTS = {
    "tiny": Layout(8, 1),
    "small": Layout(16, 3),
    "medium": Layout(160, 8),
    "large": Layout(290, 15),
    "dense": Layout(161, 29),
}


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


class PassedEvent:
    """Takes the place of a device event that the device has passed."""

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return that the device has passed the event."""
        return True

    def elapsed_time(self, _end: PassedEvent) -> float:
        """Return the milliseconds between two events."""
        return 0.0


def is_not_capturing() -> bool:
    """Takes the place of torch's function that asks the driver, which is also a call in Python."""
    return False


@contextmanager
def beside_gpu() -> Iterator[None]:
    """Make wrappers of the block take the path of ranks whose gradients are on GPUs, with tensors on the CPU."""
    with (
        mock.patch.dict(os.environ, {TEST_HOST_CHANNEL: "always"}),
        mock.patch.object(finisher, "is_queued", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", is_not_capturing),
    ):
        yield


def as_beside_gpu(model: Any) -> nn.Module:
    """Give the parts of a wrapper that ask for the type of the device a GPU; all names of such internals are here."""
    gpu: Any = SimpleNamespace(type="cuda")
    reducer = model._engine.connected()
    exposed = reducer.exposed_time
    exposed.device, exposed.of_host, exposed._event = gpu, nullcontext(), PassedEvent
    for extension in reducer.extensions.all:
        if isinstance(extension, GraphCapture):
            extension._device = gpu
    reducer.extensions.is_stale = True
    wrapped: nn.Module = model
    return wrapped


def wrappers(
    layout: Layout, world: int, gloo: dist.ProcessGroup, alone: dist.ProcessGroup, *, gpu: bool
) -> dict[str, nn.Module]:
    """Return the models to compare, by name. The group `gloo` has all ranks, `alone` only this rank."""
    cap = layout.bucket_cap_mb
    theirs = partial(nn.parallel.DistributedDataParallel, process_group=gloo if world > 1 else alone, bucket_cap_mb=cap)
    ours = partial(paceline.DistributedDataParallel, bucket_cap_mb=cap)
    found = {
        "bare": Chain(layout.parameters),
        VIEWS: theirs(Chain(layout.parameters), gradient_as_bucket_view=True),
        BATCHED: theirs(Chain(layout.parameters), batched_grad_copy=True),
    }
    if gpu:
        group = gloo if world > 1 else alone
        found["paceline beside a GPU"] = as_beside_gpu(ours(Chain(layout.parameters), process_group=group))
    elif world == 1:
        reducing = ours(Chain(layout.parameters), process_group=alone)
        reducing._connect()
        found |= {"paceline": ours(Chain(layout.parameters), process_group=alone), "paceline reducer": reducing}
    else:
        found["paceline"] = ours(Chain(layout.parameters))
        found["paceline on gloo"] = ours(Chain(layout.parameters), process_group=gloo)
    return found


@contextmanager
def surroundings_of(name: str) -> Iterator[None]:
    """Remove what Paceline leaves in a process, while a variant that does without it runs."""
    if name.startswith("paceline"):
        yield
        return
    # torch calls our hooks for every optimizer
    with mock.patch.dict(global_pre_hooks, clear=True), mock.patch.dict(global_post_hooks, clear=True):
        yield


def turn(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, pool: ThreadPoolExecutor | None, repeat: int
) -> dict[str, Clocks]:
    """Run `repeat` steps. Return the median seconds of backward alone, and of the whole step."""
    x = torch.ones(ELEMENTS)
    rows: dict[str, list[list[int]]] = {"backward": [], "whole step": []}
    dist.barrier()

    def backward(loss: Tensor) -> list[int]:
        began = now()
        loss.backward()
        return between(began, now())

    with without_collections(), surroundings_of(name):
        for _ in range(repeat):
            began = now()
            loss = model(x)
            forward_ended = now()
            row = backward(loss) if pool is None else pool.submit(backward, loss).result()
            backward_ended = now()
            optimizer.step()
            optimizer.zero_grad()
            rest = between(backward_ended, now())
            rows["backward"].append(row)
            rows["whole step"].append(
                [sum(parts) for parts in zip(between(began, forward_ended), row, rest, strict=True)]
            )
    return {part: medians(measured) for part, measured in rows.items()}


def other_core(rank: int) -> ThreadPoolExecutor:
    """Return a pool of one thread, which has another core than the calling thread; both are pinned."""
    cores = sorted(os.sched_getaffinity(0))
    own, other = cores[rank % len(cores)], cores[(rank + 1) % len(cores)]
    pool = ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {other}))
    pool.submit(int).result()  # a thread that starts later would be pinned with this one
    os.sched_setaffinity(0, {own})
    return pool


def compare(
    models: dict[str, nn.Module], rounds: int, repeat: int, pool: ThreadPoolExecutor | None
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the median milliseconds that each model adds according to each clock, and ratios to torch DDP."""
    turns = {
        name: partial(turn, name, model, torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True), pool, repeat)
        for name, model in models.items()
    }
    measured = take_turns(turns, rounds, warm_up=2, rotated=True)  # long enough for the frozen step
    results: dict[str, dict[str, dict[str, float]]] = {}
    for what in ("backward", "whole step"):
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
            for rival in models.keys() & {VIEWS, BATCHED}:
                if name.startswith("paceline"):
                    for clock in CLOCKS:
                        result[name][f"{clock} / {rival}"] = median_ratio(added[name][clock], added[rival][clock])
        results[what] = {name: {key: round(value, 4) for key, value in row.items()} for name, row in result.items()}
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--worlds", nargs="+", type=int, help="world sizes: 1 and the size of the job by default")
    parser.add_argument("--variants", nargs="+", help="wrappers beside bare and torch views; all by default")
    parser.add_argument("--repeat", type=int, default=40, help="steps per turn")
    parser.add_argument("--beside-gpu", action="store_true", help="take the path of ranks whose gradients are on GPUs")
    parser.add_argument("--backward-thread", action="store_true", help="run backward in a thread on another core")
    parser.add_argument("--quick", action="store_true", help="run few rounds, and write no file")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.repeat = 3, 15
    world = paceline.init("paceline")
    gloo = dist.new_group(backend="gloo")
    nothing.register()
    alone = [dist.new_group([rank], backend=nothing.NAME) for rank in range(world.size)][world.rank]
    pool = other_core(world.rank) if options.backward_thread else None
    table = Table("layout", "world", "wrapper", *CLOCKS, *(f"{clock} / views" for clock in CLOCKS), title="added, ms")
    results = {}
    for name in options.layouts:
        for size in options.worlds or sorted({1, world.size}):
            with beside_gpu() if options.beside_gpu else nullcontext():
                models = wrappers(LAYOUTS[name], size, gloo, alone, gpu=options.beside_gpu)
                for variant in models.keys() - {"bare", VIEWS, *(options.variants or models)}:
                    del models[variant]
                gc.collect()
                result = compare(models, options.rounds, options.repeat, pool)
            results[f"{name}, world of {size}"] = result
            for variant, row in result["whole step"].items():
                times = [f"{row[clock]:.3f}" for clock in CLOCKS]
                ratios = [f"{row[key]:.2f}" if (key := f"{clock} / {VIEWS}") in row else "" for clock in CLOCKS]
                table.add_row(name, str(size), variant, *times, *ratios)
            del models
            gc.collect()
    if world.is_main:
        Console(width=120).print(table)
        if not options.quick:
            suffix = "-beside-gpu" * options.beside_gpu + "-backward-thread" * options.backward_thread
            print("kept in", save(f"host-overhead{suffix}", results))
    world.close()


if __name__ == "__main__":
    main()
