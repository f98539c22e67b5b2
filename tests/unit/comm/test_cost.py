from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

import pytest

from paceline.comm.algorithms import NAMES, build
from paceline.comm.schedules import Model, features

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
