"""Hints of what to watch while a schedule is played, for someone who sees it for the first time."""

from __future__ import annotations

from collections.abc import Callable

from paceline.comm.algorithms import Schedule, holdings


def hint(schedule: Schedule) -> str:
    """Return a hint for the viewer of `schedule`; nothing where there is nothing to see, or no one wrote it down."""
    writer = _WRITERS.get(schedule.name)
    return writer(schedule) if writer is not None and schedule.steps else ""


def completed(schedule: Schedule, chunk: int) -> tuple[int, int]:
    """Find the first step after which a rank holds the whole sum of `chunk`, and that rank."""
    everyone = tuple(range(schedule.size))
    for number, ranks in enumerate(holdings(schedule)):
        for rank, chunks in enumerate(ranks):
            if chunks[chunk] == everyone:
                return number, rank
    raise AssertionError(f"{schedule.name} never sums up chunk {chunk}")


def _ring(schedule: Schedule) -> str:
    step, rank = completed(schedule, 0)
    return (
        f"row A: its sum travels from rank to rank and grows by one part a step, until it is complete on rank {rank} "
        f"after step {step}. Then copies of it travel on. Meanwhile every rank sends in every step."
    )


def _tree(schedule: Schedule) -> str:
    step, rank = completed(schedule, 0)
    return (
        f"rank {rank}: the sums come together there by step {step}, while fewer and fewer ranks send. "
        "Then the result spreads the same way back."
    )


def _halving_doubling(schedule: Schedule) -> str:
    step = max(completed(schedule, chunk)[0] for chunk in range(schedule.chunks))
    return (
        f"how much travels: partners add ever smaller parts, until each row is complete on one rank after step {step}."
        " Then the parts grow again, as the sums are copied back the same way."
    )


def _linear(schedule: Schedule) -> str:
    return f"rank {schedule.root}: it alone sends, to one rank a step, while all others wait."


def _tree_broadcast(schedule: Schedule) -> str:
    return (
        f"who has rank {schedule.root}'s tensor: they pass it on, so that up to twice as many have it after each step."
    )


def _scatter_all_gather(schedule: Schedule) -> str:
    dealt = len(schedule.steps) - (schedule.size - 1)  # the ring takes the rest
    return (
        f"rank {schedule.root}'s chunks: dealt out by step {dealt}, one to each rank. "
        "Then they travel round the ring, and every rank sends in every step."
    )


_WRITERS: dict[str, Callable[[Schedule], str]] = {
    "ring_all_reduce": _ring,
    "tree_all_reduce": _tree,
    "halving_doubling_all_reduce": _halving_doubling,
    "linear_broadcast": _linear,
    "tree_broadcast": _tree_broadcast,
    "scatter_all_gather_broadcast": _scatter_all_gather,
}
