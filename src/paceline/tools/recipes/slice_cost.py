"""The price of small slices: virtual ranks compute V/N of them where an ordinary rank computes its share at once.

A slice and one of twice the size are timed before training. Their difference is the time for samples; the rest of a
slice's time does not depend on them, and is what each further slice costs. Other programs on the machine make single
times longer, so both sizes take turns, and both the shortest times and the median over the turns have to say so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.tools.recipes.memory_fit import is_out_of_memory, try_step

MOST = 0.25
"""Share of a step's time above which slices are called too small."""
FEWEST, MOST_TURNS, SECONDS = 5, 100, 0.5
"""How often each size is timed: so often at least and at most, in between as long as that took no more seconds."""


@dataclass(frozen=True)
class SliceCost:
    """The times of a slice's forward and backward, and the slices of a rank in a step."""

    slices: int
    once: float
    """Seconds of a slice, at best."""
    twice: float
    """Seconds of twice as many samples, at best."""
    least: float = math.inf
    """Share by which a step takes longer, at least, as far as single turns tell."""

    @classmethod
    def of(cls, slices: int, once: Sequence[float], twice: Sequence[float]) -> SliceCost:
        """Return the cost by the times of both sizes in several turns."""
        shares = sorted(cls(slices, *turn).more(slices) for turn in zip(once, twice, strict=True))
        # The lower bound of the median, with a confidence of 95 % for independent turns: by the sign test.
        rank = len(shares) / 2 - 1.645 * math.sqrt(len(shares)) / 2
        return cls(slices, min(once), min(twice), shares[max(0, int(rank))])

    def more(self, slices: int) -> float:
        """Return the share by which the rank's step takes longer in so many slices than at once."""
        fixed = min(self.once, max(0.0, 2 * self.once - self.twice))
        if not fixed:
            return 0.0
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
    times: dict[int, list[float]] = {samples: [], 2 * samples: []}
    try:
        batches = {rows: batch_of(rows) for rows in times}
        for rows, batch in batches.items():  # which warms up
            _seconds(model, loss, batch, rows)
        until = time.perf_counter() + SECONDS
        while (done := len(times[samples])) < FEWEST or (done < MOST_TURNS and time.perf_counter() < until):
            for rows, batch in batches.items():
                times[rows].append(_seconds(model, loss, batch, rows))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return None
        raise
    return SliceCost.of(slices, times[samples], times[2 * samples])


def _seconds(model: nn.Module, loss: Any, batch: Any, rows: int) -> float:
    """Return the time of a forward and backward."""
    began = time.perf_counter()
    try_step(model, loss, lambda _: batch, rows)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def advice(cost: SliceCost, virtual_ranks: int, samples: int) -> str | None:
    """Return a remark where slices of so many `samples` are too small, with the number of them that would do.

    None where they are not, or where the times differ so much that this cannot be told.
    """
    # Where twice as many samples seem to take less time than once as many, the machine was busy in a slice's turns.
    if cost.twice < 0.9 * cost.once or min(cost.least, more := cost.more(cost.slices)) <= MOST:
        return None
    fitting = cost.fitting()
    return (
        f"virtual_ranks={virtual_ranks} cuts a batch into slices of {samples}, which take {1e3 * cost.once:.1f} ms, "
        f"and twice as many samples {1e3 * cost.twice:.1f} ms: a step takes about {more:.0%} longer than with a rank's "
        f"share at once; virtual_ranks={virtual_ranks * fitting // cost.slices} would take {cost.more(fitting):.0%} "
        "longer, with other bits"
    )
