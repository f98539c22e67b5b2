"""Algorithms for teaching: their schedules, the costs that these predict, and refusals of mismatched calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from math import ceil, log2
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from insides import NAMES, Model, bounds, build, elements, features, holdings
from paceline import World
from paceline.comm import algorithms
from paceline.errors import CommunicationError, DesyncError, PacelineError, UsageError, WorldError
from threads import ThreadRanks
from twins import Pools

# -- schedules ---------------------------------------------------------------------------------------------------------


SIZES = range(1, 18)
ROOTED = [name for name in NAMES if name.endswith("broadcast") or name in ("linear_reduce", "tree_reduce")]


def hosts_of(size: int) -> list[list[int] | None]:
    """Return placements of ranks on hosts: one host, blocks, round-robin, one rank apart, all apart, unequal hosts."""
    return [
        None,
        [rank // 3 for rank in range(size)],
        [rank % 2 for rank in range(size)],
        [min(rank, 1) for rank in range(size)],
        list(range(size)),
        [[0, 1, 1, 2, 2, 2][rank % 6] for rank in range(size)],
    ]


def every_schedule() -> list[Any]:
    found = []
    for name in NAMES:
        for size in SIZES:
            roots = sorted({0, 1 % size, size // 2, size - 1}) if name in ROOTED else [0]
            spread = hosts_of(size) if name == "hierarchical_all_reduce" else [None]
            found += [build(name, size, root, hosts) for root in roots for hosts in spread]
    return found


EVERY = every_schedule()


def test_every_contribution_is_counted_once() -> None:
    for schedule in EVERY:
        end, everyone = holdings(schedule)[-1], tuple(range(schedule.size))
        where = f"{schedule.name} of {schedule.size} ranks, root {schedule.root}"
        if schedule.result == "all-reduce":
            assert all(terms == everyone for chunks in end for terms in chunks), where
        elif schedule.result == "broadcast":
            assert all(terms == (schedule.root,) for chunks in end for terms in chunks), where
        elif schedule.result == "reduce":
            assert schedule.root is not None
            assert all(terms == everyone for terms in end[schedule.root]), where
        elif schedule.result == "reduce-scatter":
            assert [end[rank][rank] for rank in everyone] == [everyone] * schedule.size, where
        else:
            assert all(end[rank][chunk] == (chunk,) for rank in everyone for chunk in everyone), where


def test_a_step_sends_and_receives_at_most_one_message_of_disjoint_chunks() -> None:
    for schedule in EVERY:
        for step in schedule.steps:
            assert step, f"{schedule.name}: a step without a message"
            assert len({one.src for one in step}) == len(step) == len({one.dst for one in step})
            assert all(one.src != one.dst and len(one.chunks) > 0 for one in step)
            going = {(one.src, chunk) for one in step for chunk in one.chunks}
            assert not going & {(one.dst, chunk) for one in step for chunk in one.chunks}


def test_every_rank_sums_in_the_same_order() -> None:
    """The order of operands affects the bits of a sum, so all ranks must evaluate the same expression."""
    for schedule in EVERY:
        if schedule.result != "all-reduce":
            continue
        held: list[list[Any]] = [[rank] * schedule.chunks for rank in range(schedule.size)]
        for step in schedule.steps:
            before = [list(chunks) for chunks in held]
            for one in step:
                for chunk in one.chunks:
                    came = before[one.src][chunk]
                    held[one.dst][chunk] = (before[one.dst][chunk], came) if one.reduce else came
        assert all(chunks == held[0] for chunks in held), f"{schedule.name} of {schedule.size}"


def test_each_byte_crosses_the_network_once_each_way() -> None:
    hosts = [0, 0, 0, 0, 1, 1, 1, 1]
    schedule = build("hierarchical_all_reduce", 8, hosts=hosts)
    across = [0, 0]
    for step in schedule.steps:
        for one in step:
            if hosts[one.src] != hosts[one.dst]:
                across[hosts[one.src]] += elements(schedule, one, 800)
    assert across == [800, 800]  # 2 (h−1)/h · n


def test_chunks_split_any_length_evenly() -> None:
    for count, chunks in product([0, 1, 2, 5, 6, 7, 100], [1, 2, 6, 7]):
        parts = [bounds(count, chunks, chunk) for chunk in range(chunks)]
        assert [index for part in parts for index in range(count)[part]] == list(range(count))
        lengths = [part.stop - part.start for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert bounds(count, chunks, 0, chunks) == slice(0, count)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", 2), "unknown algorithm 'ring'; choose one of linear_broadcast"),
        (("ring_all_reduce", 0), "size=0, but a schedule needs at least 1 rank"),
        (("tree_broadcast", 4, 4), "root=4 is not one of the ranks 0 to 3"),
        (("hierarchical_all_reduce", 3, 0, "ab"), "hosts names 2 hosts for 3 ranks"),
    ],
)
def test_invalid_schedules_are_refused_by_name(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(*arguments)


# -- costs -------------------------------------------------------------------------------------------------------------


Law = Callable[[int, float], tuple[float, float, float]]


def log(size: int) -> int:
    return ceil(log2(size))


# Sequential messages, bytes moved, bytes reduced: the closed forms of cost.py's docstring.
ANY_SIZE: dict[str, Law] = {
    "linear_broadcast": lambda p, n: (p - 1, (p - 1) * n, 0),
    "linear_reduce": lambda p, n: (p - 1, (p - 1) * n, (p - 1) * n),
    "tree_broadcast": lambda p, n: (log(p), log(p) * n, 0),
    "tree_reduce": lambda p, n: (log(p), log(p) * n, log(p) * n),
    "tree_all_reduce": lambda p, n: (2 * log(p), 2 * log(p) * n, log(p) * n),
    "ring_reduce_scatter": lambda p, n: (p - 1, (p - 1) / p * n, (p - 1) / p * n),
    "ring_all_gather": lambda p, n: (p - 1, (p - 1) / p * n, 0),
    "ring_all_reduce": lambda p, n: (2 * (p - 1), 2 * (p - 1) / p * n, (p - 1) / p * n),
}
POWERS_OF_TWO: dict[str, Law] = {
    "scatter_all_gather_broadcast": lambda p, n: (log(p) + p - 1, 2 * (p - 1) / p * n, 0),
    "halving_doubling_all_reduce": lambda p, n: (2 * log(p), 2 * (p - 1) / p * n, (p - 1) / p * n),
}


def test_closed_forms_match_the_schedules() -> None:
    for name, law in {**ANY_SIZE, **POWERS_OF_TWO}.items():
        for size in (1, 2, 4, 8, 16, 32) if name in POWERS_OF_TWO else range(1, 20):
            assert features(build(name, size), 1000.0) == pytest.approx(law(size, 1000.0)), (name, size)


@pytest.mark.parametrize(("many", "each"), [(1, 4), (2, 2), (2, 4), (3, 2), (4, 4)])
def test_the_closed_form_for_hosts(many: int, each: int) -> None:
    size = many * each
    schedule = build("hierarchical_all_reduce", size, hosts=[rank // each for rank in range(size)])
    bytes_ = (size - 1) / size * 1000
    assert features(schedule, 1000.0) == pytest.approx((2 * (each + many - 2), 2 * bytes_, bytes_))


NETWORK = Model(alpha=50e-6, beta=1e-9, gamma=1e-10)


def fastest(nbytes: int, size: int, result: str) -> str:
    schedules = [schedule for name in NAMES if (schedule := build(name, size)).result == result]
    return min(schedules, key=lambda schedule: NETWORK.seconds(schedule, nbytes)).name


def test_short_messages_prefer_the_tree_and_long_ones_few_bytes() -> None:
    assert fastest(8, 6, "broadcast") == "tree_broadcast"
    assert fastest(10**8, 6, "broadcast") == "scatter_all_gather_broadcast"
    assert fastest(8, 6, "all-reduce") in ("tree_all_reduce", "halving_doubling_all_reduce")  # six steps each
    assert fastest(10**8, 6, "all-reduce") == "ring_all_reduce"
    assert fastest(10**8, 8, "all-reduce") == "halving_doubling_all_reduce"  # fewer steps, no more bytes
    assert fastest(10**8, 8, "reduce") == "tree_reduce"


# -- refusals ----------------------------------------------------------------------------------------------------------


ones = torch.ones
DTYPES = torch.int32, torch.float32
CASES: dict[str, tuple[Callable[[int, Any], Any], str]] = {
    "dtypes": (
        lambda rank, group: algorithms.linear_broadcast(ones(5, dtype=DTYPES[rank % 2]), group=group),
        "DesyncError: ranks call different collectives: linear_broadcast of 5 × int32 with src=0 on ranks 0, 2, "
        "linear_broadcast of 5 × float32 with src=0 on rank 1; call the same one on every rank",
    ),
    "roots": (
        lambda rank, group: algorithms.tree_broadcast(ones(5), src=rank // 2, group=group),
        "DesyncError: ranks call different collectives: tree_broadcast of 5 × float32 with src=0 on ranks 0, 1, "
        "tree_broadcast of 5 × float32 with src=1 on rank 2; call the same one on every rank",
    ),
    "a root outside the group": (
        lambda rank, group: algorithms.linear_reduce(ones(5), dst=3, group=group),
        "UsageError: dst=3 is not a rank of the group, which has ranks 0–2; pass one of these",
    ),
    "an average of integers": (
        lambda rank, group: algorithms.ring_all_reduce(ones(5, dtype=torch.int64), op=ReduceOp.AVG, group=group),
        "UsageError: ring_all_reduce on rank {rank}: AVG of int64 is not supported; use another op or dtype",
    ),
    "conjugate": (
        lambda rank, group: algorithms.ring_all_reduce(ones(5, dtype=torch.complex64).conj(), group=group),
        "UsageError: ring_all_reduce on rank {rank}: the tensor is a conjugate or negative view",
    ),
    "a device without a backend": (
        lambda rank, group: algorithms.ring_all_reduce(ones(5, device="meta"), group=group),
        "UsageError: ring_all_reduce on rank {rank}: the group has no backend that sends tensors on meta",
    ),
}


def refusal(group: Any, call: Callable[[int, Any], Any]) -> str:
    """Return a rank's error; a following all-reduce proves that the refused call left no operation pending."""
    answer = "nothing"
    try:
        call(group.rank(), group)
    except PacelineError as error:
        answer = f"{type(error).__name__}: {error}"
    after = ones(7)
    algorithms.ring_all_reduce(after, group=group)
    assert torch.equal(after, ones(7) * group.size())
    return answer


@pytest.fixture(scope="module")
def three() -> ThreadRanks:
    return ThreadRanks(3)


@pytest.mark.parametrize("case", CASES)
def test_mismatched_calls_are_named_on_every_rank_before_sending(case: str, three: ThreadRanks) -> None:
    call, message = CASES[case]
    for rank, answer in enumerate(three.run(refusal, call)):
        assert answer.startswith(message.format(rank=rank))


def test_other_ranks_name_the_rank_that_refused_its_tensor(three: ThreadRanks) -> None:
    tensors = ones(3, 4), ones(4, 3).t()
    call = lambda rank, group: algorithms.ring_all_reduce(tensors[rank % 2], group=group)  # noqa: E731
    first, second, third = three.run(refusal, call)
    assert first == third == "DesyncError: rank 1 rejected its arguments; see its error"
    assert second.startswith("UsageError: ring_all_reduce on rank 1: the tensor of shape (3, 4) is not contiguous")


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(WorldError, match=re.escape("no process group exists yet; call paceline.init() first")):
        algorithms.ring_all_reduce(ones(3))


def outside(world: World) -> str:
    group = dist.new_group([1, 2])
    if world.rank == 0:
        with pytest.raises(UsageError) as caught:
            algorithms.ring_all_reduce(ones(3), group=group)
        return str(caught.value)
    with pytest.raises(UsageError, match=r"src=0 is not a rank of the group, which has ranks 1, 2"):
        algorithms.tree_broadcast(ones(3), group=group)
    tensor = ones(3) * world.rank
    algorithms.tree_broadcast(tensor, src=2, group=group)  # its rank in the world
    assert torch.equal(tensor, ones(3) * 2)
    with pytest.raises(DesyncError, match=r"all_reduce of 4 × float32 by SUM on rank 1, ring_all_reduce of 5 ×"):
        algorithms.ring_all_reduce(ones(3 + world.rank), group=group)
    return ""


def test_a_rank_outside_the_group_gets_a_clear_error(pools: Pools) -> None:
    answer = pools.run(3, outside)
    assert answer[0] == "rank 0 is not in the group; call the collective only on the group's ranks"


def test_a_lost_rank_raises_a_communication_error() -> None:
    ranks = ThreadRanks(2)
    ranks.leave(1)
    with pytest.raises(CommunicationError, match=r"rank 0: the agreement with rank 1 failed"):
        ranks.run(lambda group: group and algorithms.ring_all_reduce(ones(100), group=group))
