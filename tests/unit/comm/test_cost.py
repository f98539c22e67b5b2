from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil, log2

import pytest

from paceline.comm.algorithms import NAMES, build
from paceline.comm.algorithms.cost import LARGEST, Model, Sample, crossovers, features, fit
from paceline.errors import UsageError

Law = Callable[[int, float], tuple[float, float, float]]


def log(size: int) -> int:
    return ceil(log2(size))


# Messages one after the other, bytes moved, bytes reduced: the closed forms of cost.py's docstring.
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


def test_the_closed_form_equals_the_count_of_the_schedule() -> None:
    for name, law in {**ANY_SIZE, **POWERS_OF_TWO}.items():
        for size in (1, 2, 4, 8, 16, 32) if name in POWERS_OF_TWO else range(1, 20):
            assert features(build(name, size), 1000.0) == pytest.approx(law(size, 1000.0)), (name, size)


@pytest.mark.parametrize(("many", "each"), [(1, 4), (2, 2), (2, 4), (3, 2), (4, 4)])
def test_the_closed_form_of_hosts(many: int, each: int) -> None:
    size = many * each
    schedule = build("hierarchical_all_reduce", size, hosts=[rank // each for rank in range(size)])
    bytes_ = (size - 1) / size * 1000
    assert features(schedule, 1000.0) == pytest.approx((2 * (each + many - 2), 2 * bytes_, bytes_))


def measurements(model: Model, noise: float) -> list[Sample]:
    chance = random.Random(1)
    return [
        Sample(
            build(name, size), nbytes, model.seconds(build(name, size), nbytes) * chance.uniform(1 - noise, 1 + noise)
        )
        for name in NAMES
        for size in (2, 4)
        for nbytes in (65536, 2**20, 2**23, 2**25)
    ]


@pytest.mark.parametrize("cores", [None, 2])
def test_the_fit_finds_the_costs_that_made_the_measurements(cores: int | None) -> None:
    truth = Model(1.5e-4, 4e-10, 1.5e-10, cores)
    found = fit(measurements(truth, 0.0), cores)
    assert found[:3] == pytest.approx(truth[:3], rel=1e-6)
    assert found.cores == cores


def test_noise_of_twenty_percent_moves_the_fit_by_less() -> None:
    truth = Model(1.5e-4, 4e-10, 1.5e-10, 2)
    found = fit(measurements(truth, 0.2), 2)
    assert found.alpha == pytest.approx(truth.alpha, rel=0.1)
    assert found.beta == pytest.approx(truth.beta, rel=0.1)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(UsageError, match="no measurement to fit"):
        fit([Sample(build("ring_all_reduce", 1), 8, 1.0)])
    with pytest.raises(UsageError, match="not positive"):
        fit([Sample(build("ring_all_reduce", 2), 8, 0.0)])


NETWORK = Model(alpha=50e-6, beta=1e-9, gamma=1e-10)


def fastest(nbytes: int, size: int, result: str, model: Model = NETWORK) -> str:
    schedules = [schedule for name in NAMES if (schedule := build(name, size)).result == result]
    return min(schedules, key=lambda schedule: model.seconds(schedule, nbytes)).name


def test_short_messages_take_the_tree_and_long_ones_few_bytes() -> None:
    assert fastest(8, 6, "broadcast") == "tree_broadcast"
    assert fastest(10**8, 6, "broadcast") == "scatter_all_gather_broadcast"
    assert fastest(8, 6, "all-reduce") in ("tree_all_reduce", "halving_doubling_all_reduce")  # six steps each
    assert fastest(10**8, 6, "all-reduce") == "ring_all_reduce"
    assert fastest(10**8, 8, "all-reduce") == "halving_doubling_all_reduce"  # fewer steps, no more bytes
    assert fastest(10**8, 8, "reduce") == "tree_reduce"


@pytest.mark.parametrize(
    ("result", "size", "cores"),
    [("all-reduce", 8, None), ("all-reduce", 6, 2), ("broadcast", 6, None), ("reduce", 1, 2)],
)
def test_crossovers_are_where_the_choice_changes(result: str, size: int, cores: int | None) -> None:
    model = NETWORK._replace(cores=cores)
    points = crossovers(size, model, result=result)  # type: ignore[arg-type]
    ends = [at for at, _ in points[1:]] + [LARGEST + 1]
    assert points[0][0] == 0
    for (start, name), end in zip(points, ends, strict=True):
        for nbytes in (start, (start + end) // 2, end - 1):
            assert fastest(nbytes, size, result, model) == name
    assert len({name for _, name in points}) == len(points)
