"""The price of small slices: virtual ranks compute V/N of them where an ordinary rank computes its share at once.

A slice and one of twice the size are timed before training. Their difference is the time for samples; the rest of a
slice's time does not depend on them, and is what each further slice costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.tools.recipes.memory_fit import is_out_of_memory, try_step

MOST = 0.25
"""Share of a step's time above which slices are called too small."""
RUNS = 3


@dataclass(frozen=True)
class SliceCost:
    """The times of a slice's forward and backward, and the slices of a rank in a step."""

    slices: int
    once: float
    """Seconds of a slice."""
    twice: float
    """Seconds of twice as many samples."""

    def more(self, slices: int) -> float:
        """Return the share by which the rank's step takes longer in so many slices than at once."""
        fixed = max(0.0, 2 * self.once - self.twice)
        samples = self.slices * (self.once - fixed)
        return (slices - 1) * fixed / (fixed + samples)

    def fitting(self) -> int:
        """Return the largest number of slices that cost no more than :data:`MOST`, a half of a half of those now."""
        slices = self.slices
        while slices > 1 and self.more(slices) > MOST:
            slices //= 2
        return slices


def measure(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], tuple[Tensor, float]],
    batch_of: Callable[[int], Any],
    samples: int,
    slices: int,
) -> SliceCost | None:
    """Time a slice of so many `samples`, of which a rank has so many; None where twice as many do not fit in memory.

    All ranks call it together, because they share the machine.
    """
    try:
        once, twice = (_seconds(model, loss, batch_of(rows), rows) for rows in (samples, 2 * samples))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return None
        raise
    return SliceCost(slices, once, twice)


def _seconds(model: nn.Module, loss: Any, batch: Any, rows: int) -> float:
    """Return the shortest time of a forward and backward, after one that warms up."""
    times = []
    for _ in range(1 + RUNS):
        began = time.perf_counter()
        try_step(model, loss, lambda _: batch, rows)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    # The shortest, because all that disturbs a run makes it longer.
    return min(times[1:])


def advice(cost: SliceCost, virtual_ranks: int, samples: int) -> str | None:
    """Return a remark where slices of so many `samples` are too small, with the number of them that would do."""
    if (more := cost.more(cost.slices)) <= MOST:
        return None
    fitting = cost.fitting()
    return (
        f"virtual_ranks={virtual_ranks} cuts a batch into slices of {samples}, which take {1e3 * cost.once:.1f} ms, "
        f"and twice as many samples {1e3 * cost.twice:.1f} ms: a step takes about {more:.0%} longer than with a rank's "
        f"share at once; virtual_ranks={virtual_ranks * fitting // cost.slices} would take {cost.more(fitting):.0%} "
        "longer, with other bits"
    )
