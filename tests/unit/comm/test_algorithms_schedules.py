from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from paceline.comm.algorithms import NAMES, bounds, build, elements, holdings
from paceline.errors import UsageError

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
