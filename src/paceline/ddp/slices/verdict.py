"""The verdict on a slice that several computations gave different bits: a device is wrong, or nobody repeats itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.core.processes.missing_ranks import named_ranks


class Fault(Enum):
    """The kind of a difference."""

    PASSING = "a rank computed other bits once, and the usual ones when the slice was repeated"
    LASTING = "a rank computes other bits than most ranks, each time the same"
    UNSTEADY = "a rank computes other bits each time, while the others agree"
    UNDECIDED = "ranks differ, each with the same bits each time, and no value has a majority"
    MODEL = "ranks do not repeat their own bits, so the computation is not one that repeats"


@dataclass(frozen=True)
class Verdict:
    """The fault, and the ranks that it is found on."""

    fault: Fault
    ranks: tuple[int, ...]


def judge(repeats: Sequence[Sequence[int]], earlier: Iterable[tuple[int, int]] = ()) -> Verdict | None:
    """Compare digests of one slice's result; returns None if all are equal.

    Args:
        repeats: for each rank, the digests of its repetitions, at least two.
        earlier: rank and digest of computations before them.
    """
    unsteady = tuple(rank for rank, digests in enumerate(repeats) if len(set(digests)) > 1)
    values = Counter(digests[0] for rank, digests in enumerate(repeats) if rank not in unsteady)
    if unsteady:
        # A kernel that does not repeat itself would hardly do so on half of the ranks, several times.
        is_a_device = len(values) == 1 and 2 * len(unsteady) <= len(repeats)
        return Verdict(Fault.UNSTEADY if is_a_device else Fault.MODEL, unsteady)
    value, count = values.most_common(1)[0]
    if count < len(repeats):
        if 2 * count <= len(repeats):
            return Verdict(Fault.UNDECIDED, tuple(range(len(repeats))))
        return Verdict(Fault.LASTING, tuple(rank for rank, digests in enumerate(repeats) if digests[0] != value))
    wrong = tuple(sorted({rank for rank, digest in earlier if digest != value}))
    return Verdict(Fault.PASSING, wrong) if wrong else None


def describe(verdict: Verdict, step: int, devices: Mapping[int, str], changed: Sequence[str], *, times: int) -> str:
    """Say in one sentence which device is wrong, and what to do.

    Args:
        verdict: of any fault but that of the model.
        step: the job's step under way, counted from 1.
        devices: device and host of each rank.
        changed: names of parameters and buffers whose bits differ between ranks.
        times: how often each rank has repeated the slice.
    """
    who = " and ".join(f"{named_ranks([rank])} ({devices[rank]})" for rank in verdict.ranks)
    singular, size = len(verdict.ranks) == 1, len(devices)
    begin = f"in step {step}, {who}"
    remedy = "the step is not taken; start again from the last checkpoint"
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        bits = f"other bits in {changed[0]!r}{more}"
        has = f"{'has' if singular else 'have'} {bits}" + (" than the other ranks" if singular else " from each other")
        return (
            f"{begin} {has}, so gradients differ; {remedy}, and look for a forward, a hook or a backward past the "
            "wrapper that changes weights by the samples of one rank, or for faulty memory"
        )
    match verdict.fault:
        case Fault.PASSING:
            compared = "than in each of" if size == 1 else "than all ranks in each of"
            return (
                f"{begin} computed other gradients for a slice {compared} {times} repetitions, so the device erred "
                f"once; {remedy}, without that device if it errs again"
            )
        case Fault.LASTING:
            verb = "computes" if singular else "compute"
            return (
                f"{begin} {verb} other gradients for a slice than most ranks, in each of {times} repetitions, from the "
                f"same weights; {remedy}, without that device, or with devices of one kind"
            )
        case Fault.UNSTEADY:
            verb = "computes" if singular else "compute"
            return (
                f"{begin} {verb} other gradients for one slice each time, while the other ranks agree; {remedy}, "
                "without that device"
            )
        case _:
            return (
                f"{begin} compute different gradients for one slice from the same weights, and no majority tells which "
                f"are right; {remedy}, with a third rank to tell, or with devices of one kind"
            )
