"""Predicted steps with averaging between hosts every H steps match calculations by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from insides import PUBLISHED, Calibration, Cluster, Layer, Link, Workload, island_step, outer_steps
from insides import predictions_Job as Job

EXACT = replace(PUBLISHED, contention=0.0, hosts=0.0, jitter_s=0.0, host_bound=0.0, interference=0.0)


def job(between: float = 10.0, devices_per_host: int = 2, calibration: Calibration = EXACT) -> Job:
    """Return a job with 100 bytes in one bucket, 3 s of computing, and links of 1000 and `between` bytes per second."""
    inside, link = Link("inside", 1000.0, 0.0, "measured"), Link("between", between, 0.0, "measured")
    work = Workload(1.0, [Layer(2.0, 100)], 8.0, bucket_bytes=(100,))
    return Job(work, Cluster(devices_per_host, inside, link), calibration)


def test_outer_step_crosses_the_link_between_hosts_once_in_h_steps() -> None:
    # Two hosts of two devices. Inside, a ring: 2 messages of 50 bytes. Between, a ring: 2 messages of 50 bytes.
    step = job().step(4)
    assert (step.compute_s, step.exposed_s) == pytest.approx((3, 0.1 + 10))
    # The exchange between hosts takes 10 s, and the broadcast inside them half of an all-reduce, 0.05 s.
    assert island_step(job(), 4, 20).exposed_s == pytest.approx(0.1 + 10.05 / 20)


def test_island_of_one_device_only_waits_for_outer_steps() -> None:
    assert island_step(job(devices_per_host=1), 2, 5).length_s == pytest.approx(3 + 10 / 5)


def test_saving_is_the_share_of_the_time() -> None:
    (row,) = outer_steps(job(), [1, 2, 3, 4], 20).rows
    assert (row.devices, row.averaged_step_s, row.step_s) == pytest.approx((4, 13.1, 3.6025))
    assert row.saving == pytest.approx(1 - 3.6025 / 13.1)


def test_averaging_in_every_step_is_cheap_from_a_speed_on() -> None:
    size = 10**9
    cluster = Cluster(2, Link("inside", 1e12, 0.0, "measured"), Link("between", 1e6, 0.0, "measured"))
    large = Job(Workload(1.0, [Layer(2.0, size)], 8.0, bucket_bytes=(size,)), cluster, EXACT)
    # 0.95e9 / speed is 5 % of 3.001 + 1e9 / speed at 5.998e9 bytes per second. Neighboring speeds differ by 12 %.
    cheap = outer_steps(large, [4], 20).cheap_from
    assert cheap is not None
    assert 5.99e9 <= cheap <= 5.998e9 * 1.13
    assert outer_steps(job(), [4], 20).cheap_from == pytest.approx(125_000), "the slowest speed of the search"


def test_slow_hosts_remain_slow() -> None:
    noisy = job(calibration=replace(EXACT, hosts=0.1))
    assert island_step(noisy, 4, 20).jitter_s == noisy.step(4).jitter_s > 0
