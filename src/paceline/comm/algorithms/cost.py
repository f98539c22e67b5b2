"""The cost of an algorithm: the alpha-beta-gamma model, counted from its schedule; its fit; and the choice it allows.

A message costs alpha seconds, and beta for each byte; to reduce a byte costs gamma. Hockney, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20 (1994); with gamma as in Thakur, Rabenseifner &
Gropp, IJHPCA 19 (2005). A rank sends and receives at the same time, one message each way. So a step takes

    alpha  +  beta · the most bytes that a rank sends or receives  +  gamma · the most bytes that a rank reduces

and an algorithm the sum of its steps. For p ranks, n bytes, L = ⌈log₂ p⌉ (tested equal to the schedules):

    linear broadcast, reduce           (p−1) α  +  (p−1) n β          [+ (p−1) n γ]
    tree broadcast, reduce             L α      +  L n β              [+ L n γ]
    scatter, all-gather (p = 2^L)      (L+p−1) α + 2 (p−1)/p n β
    ring reduce-scatter, all-gather    (p−1) α  +  (p−1)/p n β        [+ (p−1)/p n γ]
    ring all-reduce                    2(p−1) α +  2 (p−1)/p n β       + (p−1)/p n γ
    tree all-reduce                    2 L α    +  2 L n β             + L n γ
    halving-doubling (p = 2^L)         2 L α    +  2 (p−1)/p n β       + (p−1)/p n γ
    hierarchical, h hosts of m         2(m+h−2) α + 2 (p−1)/p n β      + (p−1)/p n γ

Two things of the real world change that:

- Ranks that share a host's `cores` copy every byte twice, once to send and once to receive it, and that is work of the
  CPU. A step moves no faster than all its copies and sums, divided by the cores. With 2 ranks on 2 cores the ring then
  takes as long as the tree, because the work of all ranks together counts, and not how evenly it is spread.
  Measured over Gloo on 2 cores, from 64 KB to 25 MB (2026-11-20, kept in ``benchmarks/results``): with 2 ranks the
  fitted model is off by 10 % in the median and 28 % at most (34 of 44 times within 20 %), with 4 ranks by 13 % and 38 %
  (35 of 44). Without `cores` it is off by 19 % and 41 % in the median. With 2 ranks ring, halving-doubling and
  hierarchy send the very same messages, and their times differ by up to 25 %.
- Between hosts messages cost `across`, and all ranks of a host share its way out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from paceline.comm.algorithms.schedule import Result, Schedule, Step
from paceline.comm.algorithms.schedules import NAMES, build
from paceline.errors import UsageError

LARGEST = 2**40
"""Largest size, in bytes, that :func:`crossovers` considers."""


class Link(NamedTuple):
    """The cost of messages between hosts."""

    alpha: float
    """Seconds for a message."""
    beta: float
    """Seconds for a byte."""


class Model(NamedTuple):
    """The costs of messages and sums."""

    alpha: float
    """Seconds for a message."""
    beta: float
    """Seconds for a byte that is sent."""
    gamma: float = 0.0
    """Seconds for a byte that is reduced."""
    cores: int | None = None
    """Number of cores that the ranks of a host share; None if every rank has enough of its own."""
    across: Link | None = None
    """Cost of messages between hosts; None if it is the same as inside."""

    def seconds(self, schedule: Schedule, nbytes: float, hosts: Sequence[Hashable] | None = None) -> float:
        """Return the seconds of `schedule` for a tensor of `nbytes`, with the ranks on `hosts`, by default on one."""
        if self.across is None or hosts is None:
            messages, moved, reduced = features(schedule, nbytes, self.cores)
            return self.alpha * messages + self.beta * moved + self.gamma * reduced
        return sum(self._step(schedule, step, nbytes, hosts) for step in schedule.steps)

    def _step(self, schedule: Schedule, step: Step, nbytes: float, hosts: Sequence[Hashable]) -> float:
        """Return a step's seconds. Messages inside hosts and across travel at the same time; the sums come after."""
        assert self.across is not None
        per_chunk = nbytes / schedule.chunks
        inside, out, into = 0.0, dict.fromkeys(hosts, 0.0), dict.fromkeys(hosts, 0.0)
        for host in out:
            local = tuple(transfer for transfer in step if hosts[transfer.src] == hosts[transfer.dst] == host)
            messages, moved, _ = _count(local, per_chunk, self.cores)
            inside = max(inside, self.alpha * messages + self.beta * moved)
        crossing = [transfer for transfer in step if hosts[transfer.src] != hosts[transfer.dst]]
        for transfer in crossing:
            out[hosts[transfer.src]] += per_chunk * len(transfer.chunks)
            into[hosts[transfer.dst]] += per_chunk * len(transfer.chunks)
        widest = max(*out.values(), *into.values())
        outside = self.across.alpha + self.across.beta * widest if crossing else 0.0
        reduced = 0.0
        for host in out:
            arriving = tuple(transfer for transfer in step if hosts[transfer.dst] == host)
            reduced = max(reduced, _count(arriving, per_chunk, self.cores)[2])
        return max(inside, outside) + self.gamma * reduced


Features = tuple[float, float, float]
"""Factors of alpha, beta and gamma."""


def features(schedule: Schedule, nbytes: float, cores: int | None = None) -> Features:
    """Count the messages one after the other, the bytes moved and the bytes reduced, for a tensor of `nbytes`."""
    counts = [_count(step, nbytes / schedule.chunks, cores) for step in schedule.steps]
    messages, moved, reduced = (sum(column) for column in zip(*counts, strict=True)) if counts else (0.0, 0.0, 0.0)
    return messages, moved, reduced


def _count(step: Step, per_chunk: float, cores: int | None) -> Features:
    """Count the features of one step: the busiest rank's work, or all ranks' work divided by the cores."""
    if not step:
        return 0.0, 0.0, 0.0
    sent: dict[int, float] = {}
    received: dict[int, float] = {}
    reduced: dict[int, float] = {}
    for transfer in step:
        size = per_chunk * len(transfer.chunks)
        sent[transfer.src] = sent.get(transfer.src, 0.0) + size
        received[transfer.dst] = received.get(transfer.dst, 0.0) + size
        if transfer.reduce:
            reduced[transfer.dst] = reduced.get(transfer.dst, 0.0) + size
    port = max(*sent.values(), *received.values())
    adder = max(reduced.values(), default=0.0)
    if cores is None:
        return 1.0, port, adder
    copies = sum(sent.values()) + sum(received.values())
    # Both ends of a message take a core, for its setup as for its bytes.
    return max(1.0, 2 * len(step) / cores), max(port, copies / cores), max(adder, sum(reduced.values()) / cores)


class Sample(NamedTuple):
    """A measurement."""

    schedule: Schedule
    nbytes: int
    """Bytes of the tensor."""
    seconds: float


def fit(samples: Sequence[Sample], cores: int | None = None) -> Model:
    """Return the model with the least squares of relative errors and no negative cost.

    Relative, so that a sample of 64 KB counts as much as one of 25 MB.
    """
    if any(sample.seconds <= 0 for sample in samples):
        raise UsageError("a measured time is not positive; measure again")
    measured = [
        (features(sample.schedule, sample.nbytes, cores), sample.seconds) for sample in samples if sample.schedule.steps
    ]
    if not measured:
        raise UsageError("there is nothing to fit: measure an algorithm with 2 ranks or more")
    rows = torch.tensor([[part / seconds for part in counts] for counts, seconds in measured], dtype=torch.float64)
    best, least = [0.0, 0.0, 0.0], float("inf")
    # Least squares without negative costs: the best such model is the plain one for some choice of the three costs,
    # so trying all seven finds it, and needs no SciPy.
    for kept in (chosen for many in (1, 2, 3) for chosen in combinations(range(3), many)):
        part = rows[:, list(kept)]
        # Columns of norm 1, because seconds per message and per byte differ by many orders of magnitude.
        scale = part.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
        found = torch.linalg.lstsq(part / scale, torch.ones(len(rows), 1, dtype=torch.float64)).solution[:, 0] / scale
        error = float((part @ found - 1).norm())
        # Not quite 1, so that the model with fewer costs is kept if another one fits equally well.
        if bool((found >= 0).all()) and error < least * 0.999999:
            least, best = error, [0.0, 0.0, 0.0]
            for index, value in zip(kept, found.tolist(), strict=True):
                best[index] = value
    return Model(best[0], best[1], best[2], cores)


def select(
    nbytes: float,
    size: int,
    model: Model,
    *,
    result: Result = "all-reduce",
    hosts: Sequence[Hashable] | None = None,
) -> str:
    """Return the name of the algorithm that gives `result` for a tensor of `nbytes` in the least time.

    If several are equally fast, it is the first in the order of :data:`~paceline.comm.algorithms.NAMES`.
    """
    return _chooser(size, model, result, hosts)(nbytes)


def crossovers(
    size: int, model: Model, *, result: Result = "all-reduce", hosts: Sequence[Hashable] | None = None
) -> list[tuple[int, str]]:
    """Return the sizes, in bytes, where the best algorithm changes: ``[(0, "tree_all_reduce"), (81920, …)]``.

    Costs are linear in the bytes (with `across`, nearly so), so the best algorithm at both ends of a range is the best
    within.
    """
    best = _chooser(size, model, result, hosts)
    found = [(0, best(0))]

    def search(low: int, high: int) -> None:
        if best(low) == best(high):
            return
        if high - low == 1:
            found.append((high, best(high)))
            return
        middle = (low + high) // 2
        search(low, middle)
        search(middle, high)

    search(0, LARGEST)
    return found


def _chooser(size: int, model: Model, result: Result, hosts: Sequence[Hashable] | None) -> Callable[[float], str]:
    """Return :func:`select` as a function of bytes alone, with the schedules built once."""
    schedules = [
        schedule for name in NAMES if (schedule := build(name, size, hosts=_hosts_for(name, hosts))).result == result
    ]
    return lambda nbytes: min(schedules, key=lambda schedule: model.seconds(schedule, nbytes, hosts)).name


def _hosts_for(name: str, hosts: Sequence[Hashable] | None) -> Sequence[Hashable] | None:
    return hosts if name == "hierarchical_all_reduce" else None
