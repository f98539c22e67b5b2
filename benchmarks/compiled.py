"""Training steps of a compiled model: torch DDP with DDPOptimizer, and Paceline inside and around the compiled module.

"bare" is the compiled module without a wrapper, as a single graph, followed by a barrier. Two columns show how well
communication overlaps: the share of gradient bytes launched before the last tenth of backward, and the time that a step
waits at the end of backward. The last launch counts as the end of the computation, so a slow copy into buckets makes
the share too high; this happens without graph splitting. "paceline, uncut" does not split graphs (``optimize_ddp`` is
off), so all gradients arrive at once.
Run by: paceline run --nproc 2 benchmarks/compiled.py --help
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import paceline
from harness import median_ratio, parser_of, save, take_turns, timed
from paceline.core.spans import recorder
from workloads import WORKLOADS, Workload

EARLY = 0.1
"""A launch counts as early if at least this share of backward is still to come."""


@dataclass
class Launches:
    """Launches in one backward pass: seconds since its start, and number of bytes."""

    began: float = 0.0
    moments: list[tuple[float, int]] = field(default_factory=list)

    def add(self, moment: float, nbytes: int) -> None:
        """Record a launch of `nbytes` at `moment`, a value of ``time.perf_counter``."""
        self.moments.append((moment - self.began, nbytes))

    def early(self) -> float:
        """Return the share of bytes launched early. The last launch counts as the end of the computation."""
        end = max(moment for moment, _ in self.moments)
        early = sum(nbytes for moment, nbytes in self.moments if moment <= (1 - EARLY) * end)
        return early / sum(nbytes for _, nbytes in self.moments)


class Variant:
    """The model, wrapped and compiled in one of the ways to compare."""

    def __init__(self, workload: Workload, wrap: Callable[[nn.Module], Any], *, cut: bool = True) -> None:
        torch.manual_seed(0)
        self.call = wrap(workload.build())
        self.model: Any = getattr(self.call, "_orig_mod", self.call)
        self.cut = cut
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.x, self.y = workload.batch()

    def step(self, launches: Launches | None = None) -> None:
        """Train one step with fused AdamW."""
        with torch._dynamo.config.patch(optimize_ddp=self.cut):
            loss = F.cross_entropy(self.call(self.x), self.y)
            if launches is not None:
                launches.began = time.perf_counter()
            loss.backward()
        if not isinstance(self.model, nn.parallel.DistributedDataParallel):
            dist.barrier()
        self.optimizer.step()
        self.optimizer.zero_grad()


def launches_of(variant: Variant, steps: int) -> float | None:
    """Measure the median share of bytes that a wrapper launches early."""
    model: Any = variant.model
    shares = []
    if not hasattr(model, "no_sync"):
        return None
    launches, is_ours = Launches(), isinstance(model, paceline.DistributedDataParallel)
    if not is_ours:  # torch DDP calls a hook to launch a reduction

        def note_and_reduce(bucket: Any) -> Any:
            launches.add(time.perf_counter(), bucket.buffer().nbytes)
            return allreduce_hook(model.process_group, bucket)

        model.register_comm_hook(None, lambda _state, bucket: note_and_reduce(bucket))
    for _ in range(steps):
        launches.moments.clear()
        recorder.spans.clear()
        recorder.on = is_ours
        variant.step(launches)
        if is_ours:
            recorder.on = False
            sizes = {name: parameter.nbytes for name, parameter in paceline.unwrap(model).named_parameters()}
            buckets = [sum(map(sizes.__getitem__, names)) for names in model.bucket_layout()]
            spans = [span for span in recorder.spans if span.label == "launch"]
            for span, nbytes in zip(spans, buckets, strict=True):
                launches.add(span.start, nbytes)
        shares.append(launches.early())
    return statistics.median(shares)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", default="gpt-17M", choices=list(WORKLOADS))
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--bucket-cap-mb", type=float, default=None, help="bucket capacity of every wrapper")
    parser.add_argument("--repeat", type=int, default=4, help="steps in a variant's turn")
    return parser.parse_args()


def main() -> None:
    options = parse()
    world = paceline.init("paceline")
    workload, gloo = WORKLOADS[options.workload], dist.new_group(backend="gloo")
    # Isolate recompiles; otherwise, a variant would use graphs that another variant compiled from the same code.
    compile_: Any = partial(torch.compile, backend=options.backend, isolate_recompiles=True)
    wrapper_options: dict[str, Any] = {} if options.bucket_cap_mb is None else {"bucket_cap_mb": options.bucket_cap_mb}
    theirs: Any = partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True, **wrapper_options)
    ours: Any = partial(paceline.DistributedDataParallel, **wrapper_options)
    variants = {
        "bare": Variant(workload, compile_),
        "torch DDP on Gloo": Variant(workload, lambda module: compile_(theirs(module, process_group=gloo))),
        "torch DDP": Variant(workload, lambda module: compile_(theirs(module))),
        "paceline around": Variant(workload, lambda module: compile_(ours(module))),
        "paceline inside": Variant(workload, lambda module: ours(compile_(module))),
        "paceline, uncut": Variant(workload, lambda module: compile_(ours(module)), cut=False),
        "eager": Variant(workload, ours),
    }
    for name, variant in variants.items():
        start = time.perf_counter()
        for _ in range(3):
            variant.step()
        world.print(f"{name}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
    waited = {name: getattr(variant.model, "exposed_seconds", None) for name, variant in variants.items()}
    turns = {name: partial(timed, variant.step, options.repeat) for name, variant in variants.items()}
    seconds = take_turns(turns, options.rounds)
    steps = (options.rounds + 1) * options.repeat
    table = Table("variant", "ms", "/ bare", "torch DDP on Gloo /", "launched early", "exposed ms", title=workload.name)
    results: dict[str, dict[str, float]] = {}
    for name, variant in variants.items():
        result = {
            "ms": 1000 * statistics.median(seconds[name]),
            "/ bare": median_ratio(seconds[name], seconds["bare"]),
            "torch DDP on Gloo /": median_ratio(seconds["torch DDP on Gloo"], seconds[name]),
        }
        before = waited[name]
        if before is not None:
            result["exposed ms"] = 1000 * (variant.model.exposed_seconds - before) / steps
        if (early := launches_of(variant, 9)) is not None:
            result["launched early"] = early
        results[name] = {key: round(value, 3) for key, value in result.items()}
        shown = ("ms", "/ bare", "torch DDP on Gloo /", "launched early", "exposed ms")
        table.add_row(name, *(f"{result[key]:.2f}" if key in result else "" for key in shown))
    if world.is_main:
        Console(width=110).print(table)
        kept = {workload.name: {"backend": options.backend, **wrapper_options, **results}}
        print("kept in", save(f"compiled-{workload.name}", kept))
    world.close()


if __name__ == "__main__":
    main()
