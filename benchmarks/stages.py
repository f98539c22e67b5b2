"""Time that a wrapper spends in each function during a backward pass, from Python's profiler.

The profiler makes calls more expensive. The times are therefore scaled so that their sum is the thread CPU time that
the wrapper adds to a bare backward pass.
"""

from __future__ import annotations

import cProfile
import gc
import runpy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn

from harness import without_collections

WARM = 10
_PACKAGE = "/paceline/"


class Stage(NamedTuple):
    """A function of Paceline, including the C functions that it calls."""

    where: str
    calls: float
    """Calls per backward pass."""
    seconds: float
    """Seconds per backward pass, without called functions."""


def model_of(path: str) -> tuple[nn.Module, Tensor]:
    """Call the function ``FILE.py:NAME``, and return its module and batch."""
    file, _, name = path.rpartition(":")
    module, batch = runpy.run_path(file)[name]()
    return module, batch


def _backwards(model: nn.Module, batch: Tensor, count: int, around: Callable[[Callable[[], None]], None]) -> None:
    for _ in range(count):
        loss = model(batch).sum()
        around(loss.backward)
        for parameter in model.parameters():
            parameter.grad = None


def _median(model: nn.Module, batch: Tensor, count: int) -> float:
    seconds: list[float] = []

    def timed(run: Callable[[], None]) -> None:
        began = time.thread_time()
        run()
        seconds.append(time.thread_time() - began)

    with without_collections():
        _backwards(model, batch, count, timed)
    return statistics.median(seconds)


def stages(model: nn.Module, bare: nn.Module, batch: Tensor, count: int) -> list[Stage]:
    """Return the stages of a backward pass of `model`, the most expensive first. All ranks of its group must call this.

    Args:
        model: a wrapper.
        bare: the wrapped module, or a copy of it.
        batch: a batch for both.
        count: number of backward passes to measure.
    """
    _backwards(model, batch, WARM, lambda run: run())
    gc.collect()
    added = _median(model, batch, count) - _median(bare, batch, count)
    dist.barrier()
    profile = cProfile.Profile(time.thread_time_ns, 1e-9)
    with without_collections():
        _backwards(model, batch, count, profile.runcall)
    profile.create_stats()
    calls: dict[str, float] = defaultdict(float)
    shares: dict[str, float] = defaultdict(float)
    statistics_of: dict[Any, Any] = profile.stats
    for (file, _, name), (_, times, exclusive, _, callers) in statistics_of.items():
        if _PACKAGE in file:
            place = f"{file.rpartition(_PACKAGE)[2]} {name}"
            calls[place] += times
            shares[place] += exclusive
        elif file == "~":  # a C function, whose time is added to its caller
            for (caller, _, caller_name), (_, _, inside, _) in callers.items():
                if _PACKAGE in caller:
                    shares[f"{caller.rpartition(_PACKAGE)[2]} {caller_name}"] += inside
    total = sum(shares.values())
    found = [Stage(place, calls[place] / count, added * share / total) for place, share in shares.items()]
    return sorted(found, key=lambda stage: -stage.seconds)


def table_of(title: str, found: list[Stage], rows: int) -> Table:
    """Return a table of the most expensive stages, with the rest in one row."""
    table = Table("µs", "share", "calls", "function", title=title, title_justify="left")
    total = sum(stage.seconds for stage in found) or 1.0
    for stage in found[:rows]:
        table.add_row(f"{1e6 * stage.seconds:.1f}", f"{stage.seconds / total:.0%}", f"{stage.calls:g}", stage.where)
    rest = sum(stage.seconds for stage in found[rows:])
    table.add_row(f"{1e6 * rest:.1f}", f"{rest / total:.0%}", "", f"{max(0, len(found) - rows)} more")
    table.add_row(f"{1e6 * total:.1f}", "", f"{sum(stage.calls for stage in found):g}", "all that the wrapper adds")
    return table


def exists(path: str) -> bool:
    """Return whether the file of ``FILE.py:NAME`` exists."""
    return Path(path.rpartition(":")[0]).is_file()
