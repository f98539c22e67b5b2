"""Goodput: closed forms compared with their limits and with simulated random failures."""

from __future__ import annotations

import random

import pytest

from insides import DAY_S, best_interval, goodput


@pytest.mark.parametrize(
    ("hosts", "save_s", "restart_s", "rate", "interval_s", "useful"),
    [
        # without failures, only saves cost time
        (1, 100.0, 600.0, 1e-12, 900.0, 0.9),
        # one failure per day: half an interval and the restart
        (1, 0.0, 864.0, 1.0, 1728.0, 1 - 0.01 - 0.01),
        (10, 0.0, 864.0, 0.1, 1728.0, 1 - 0.01 - 0.01),
        # Llama 3: 2,048 hosts
        (2048, 30.0, 600.0, 0.0038, None, 0.8794),
        # saves take as long as the hosts live
        (1, DAY_S, 0.0, 1.0, DAY_S, 1 / (2.718281828**2 - 1)),
        # no host lives long enough
        (2**20, 1e6, 1e6, 10.0, 1e6, 0.0),
    ],
)
def test_useful_share_of_time(
    hosts: int, save_s: float, restart_s: float, rate: float, interval_s: float | None, useful: float
) -> None:
    assert goodput(hosts, save_s, restart_s, rate, interval_s).useful == pytest.approx(useful, abs=5e-4)


@pytest.mark.parametrize(
    ("save_s", "mtbf_s", "interval_s"),
    [
        (2.0, 10_000.0, 198.7),  # Young: 200.0
        (30.0, 11_368.0, 805.9),
        (1800.0, 7200.0, 3962.0),
        (200.0, 100.0, 100.0),  # Daly: a save longer than twice the time between failures
    ],
)
def test_best_interval_follows_daly(save_s: float, mtbf_s: float, interval_s: float) -> None:
    assert best_interval(save_s, mtbf_s) == pytest.approx(interval_s, rel=1e-3)


@pytest.mark.parametrize("hosts", [1, 16, 512, 4096])
@pytest.mark.parametrize("save_s", [0.2, 30.0, 600.0])
def test_best_interval_is_optimal(hosts: int, save_s: float) -> None:
    best = goodput(hosts, save_s)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert goodput(hosts, save_s, interval_s=factor * best.interval_s).useful < best.useful


def test_closed_form_matches_random_failures() -> None:
    draw, mtbf, interval, save, restart = random.Random(0), 5000.0, 900.0, 60.0, 400.0
    useful = time = 0.0
    for _ in range(20_000):
        running = draw.expovariate(1 / mtbf)
        useful += running // (interval + save) * interval
        time += running
        while (until := draw.expovariate(1 / mtbf)) < restart:  # the restart also fails
            time += until
        time += restart
    expected = goodput(1, save, restart, DAY_S / mtbf, interval)
    assert useful / time == pytest.approx(expected.useful, abs=0.005)
