"""A profile's summary becomes a predictable job; impossible summaries are refused in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from insides import PUBLISHED, Cluster, Link, Profiled, effects, fit, from_profiles, from_summary
from paceline import UsageError

ONE = Profiled(
    ranks=1,
    hosts=1,
    device="cpu",
    cores=4.0,
    busy_cores=1.0,
    samples=16.0,
    micro_batches=1,
    forward_s=0.1,
    layers=[(0.1, 4_000_000), (0.1, 4_000_000)],
    optimizer_s=0.02,
    other_s=0.01,
    communication_s=0.0,
    bubble_s=0.0,
    jitter=0.01,
    bucket_bytes=[],
    all_reduces=[],
    reduces_in_backward=False,
)
"""A step of 0.33 s."""
TWO = replace(
    ONE,
    ranks=2,
    communication_s=0.04,
    bucket_bytes=[4_000_000, 4_000_000],
    all_reduces=[(4_000_000, 0.04), (4_000_000, 0.04)],
)
"""Two ranks with an exposed second all-reduce of 40 ms."""


def measured(profile: Profiled) -> float:
    return profile.workload.compute_s + profile.communication_s


# -- jobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "two",
    [
        TWO,
        replace(TWO, layers=[(0.12, 4_000_000), (0.12, 4_000_000)]),
        replace(TWO, layers=[(0.07, 4_000_000), (0.07, 4_000_000)]),
        replace(TWO, forward_s=0.2, optimizer_s=0.04, other_s=0.02, layers=[(0.2, 4_000_000), (0.2, 4_000_000)]),
        replace(TWO, reduces_in_backward=True),
        replace(TWO, reduces_in_backward=True, communication_s=0.1),
        replace(TWO, cores=1.0, forward_s=0.2, optimizer_s=0.04, other_s=0.02, layers=[(0.2, 4_000_000)] * 2),
    ],
    ids=["plain", "interference", "gradients in buckets", "contention", "memory", "much of it", "one core"],
)
def test_job_from_two_profiles_reproduces_both_step_times(two: Profiled) -> None:
    job = from_profiles([two, replace(ONE, cores=two.cores)])
    assert job.step(1).length_s == pytest.approx(measured(ONE))
    assert job.step(2).length_s == pytest.approx(measured(two), rel=1e-5)


def test_compression_and_sharding_trade_bytes_for_work() -> None:
    """A step takes 0.33 s + 0.04 s. Each 4 MB take 40 ms to reduce, and a core reads or writes 10 MB in 1 ms."""
    savings = effects(from_profiles([ONE, TWO]), 2)
    assert savings["bf16 gradients (Cast)"] == pytest.approx(1 - (0.33 + 2 * 6 * 0.4e-3 + 0.02) / 0.37)
    assert savings["8-bit gradients (Int8)"] == pytest.approx(1 - (0.33 + 2 * 50 * 0.4e-3 + 0.01) / 0.37)
    assert savings["sharded optimizer"] == pytest.approx(1 - (0.33 - 0.01 + 0.04 + 0.04) / 0.37)


def test_two_profiles_with_equal_rank_counts_are_refused() -> None:
    with pytest.raises(UsageError, match="two profiles have the same number of ranks"):
        from_profiles([TWO, replace(TWO, communication_s=0.4)])


def test_profile_noise_does_not_become_an_impossible_slowdown() -> None:
    faster = replace(TWO, forward_s=0.07, layers=[(0.07, 4_000_000)] * 2, optimizer_s=0.014)
    assert from_profiles([ONE, faster]).cluster.stretch(8, 1.0) >= 2, "8 ranks share 4 cores"
    hidden_little = replace(TWO, layers=[(0.2, 4_000_000), (0.0001, 4_000_000)])
    assert from_profiles([ONE, hidden_little]).calibration.interference <= 1


def test_multi_host_times_use_the_links_between_hosts() -> None:
    four = replace(TWO, ranks=4, hosts=2)
    assert from_profiles([ONE, four]).step(4).length_s == pytest.approx(measured(four))


def test_more_ranks_share_the_cores_and_send_more() -> None:
    job = from_profiles([ONE, TWO])
    # In a ring of 4, each rank sends 6/4 of the bytes instead of 2/2.
    assert job.step(4).exposed_s == pytest.approx(0.04 * 1.5)
    assert job.step(4).compute_s == pytest.approx(0.33)
    # 8 ranks on 4 cores: everything takes twice as long, plus 10 % because ranks take turns.
    # For a third of the communication time, another rank computes.
    assert job.step(8).compute_s == pytest.approx(2.2 * 0.33)
    reducing = [step.hidden_s + step.exposed_s for step in (job.step(2), job.step(8))]
    assert reducing[1] == pytest.approx(2.2 * 2 / 3 * 2 * 7 / 8 * reducing[0])


def test_ranks_waiting_for_a_slow_link_share_the_cores_while_they_compute() -> None:
    two = replace(TWO, busy_cores=0.4, layers=[(0.09, 4_000_000)] * 2)
    assert from_profiles([ONE, two]).step(8).compute_s == pytest.approx(2.2 * 0.31)
    crowded = replace(TWO, busy_cores=0.4, ranks=8, layers=[(0.2, 4_000_000)] * 2)
    assert from_profiles([ONE, crowded]).step(4).compute_s == pytest.approx(0.53 / 2.2)


def test_reduction_through_memory_has_a_fixed_time_per_byte() -> None:
    job = from_profiles([ONE, replace(TWO, reduces_in_backward=True, communication_s=0.06)])
    for ranks, factor in ((2, 1), (4, 1), (8, 2.2)):
        step = job.step(ranks)
        assert step.length_s == pytest.approx(factor * (0.33 + 0.06))


def test_bubbles_become_the_jitter_of_more_ranks() -> None:
    job = from_profiles([ONE, replace(TWO, bubble_s=0.01)])
    assert job.step(2).jitter_s == pytest.approx(0.01)
    # Expected maxima of 2 and 4 normal variables: 0.5642 and 1.0294.
    assert job.step(4).jitter_s == pytest.approx(0.01 * 1.0294 / 0.5642, rel=0.03)


def test_single_rank_profile_needs_links_and_uses_its_measured_jitter() -> None:
    with pytest.raises(UsageError, match=r"has 1 rank and no times of all-reduces; add a profile of 2 ranks .* links"):
        from_profiles([ONE])
    link = Link("described", 1e8, 0.001, "measured")
    job = from_profiles([ONE], Cluster(1, link, link))
    step = job.step(2)
    # All gradients share a bucket, whose two messages take 2 · 1 ms + 80 ms after backward.
    assert (step.exposed_s, step.hidden_s) == pytest.approx((0.082, 0.0))
    assert step.jitter_s == pytest.approx(0.01 * 0.33 * 0.5642, rel=0.05)


def test_profile_of_two_ranks_is_used_unchanged() -> None:
    job = from_profiles([TWO])
    assert job.step(2).length_s == pytest.approx(measured(TWO))
    assert job.step(1).length_s == pytest.approx(0.33)
    crowded = replace(TWO, cores=1.0)
    assert from_profiles([crowded]).step(1).length_s == pytest.approx(0.33 / 2.2)


def test_all_reduces_without_bytes_measure_no_link() -> None:
    assert replace(TWO, all_reduces=[(0, 0.0)], reduces_in_backward=True).link() is None


def test_gpus_do_not_share_cores() -> None:
    one, two = (replace(profile, busy_cores=0.0, device="H100") for profile in (ONE, replace(TWO, forward_s=0.12)))
    job = from_profiles([one, two])
    assert job.cluster.stretch(8, 0.0) == 1
    assert job.step(2).length_s == pytest.approx(measured(two)), "lost forward time counts as interference"
    link = Link("described", 1e9, 0.0, "measured")
    assert from_profiles([one], Cluster(8, link, link)).calibration == PUBLISHED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 8.0}, "16 samples per rank on 1 rank, but 8 on 2"),
        ({"micro_batches": 2}, "1 micro-batches per step on 1 rank, but 2 on 2"),
        ({"layers": [(0.1, 4), (0.1, 8)]}, "8000000 bytes of gradients on 1 rank, but 12 on 2"),
    ],
)
def test_profiles_of_different_jobs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(
        UsageError, match=f"the profiles are of different jobs: {message}; profile one job with the same batch per rank"
    ):
        from_profiles([ONE, replace(TWO, **change)])


# -- links --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("message", "byte"), [(0.001, 1e-8), (0.0, 1e-8), (0.002, 0.0)])
def test_measured_link_reproduces_its_all_reduce_times(ranks: int, message: float, byte: float) -> None:
    sizes = [1_000_000, 5_000_000, 9_000_000]
    profile = replace(TWO, ranks=ranks, all_reduces=[(size, message + byte * size) for size in sizes])
    link = profile.link()
    assert link is not None
    for size in sizes:
        seconds = Cluster(8, link, link).all_reduce_seconds(ranks, size, PUBLISHED)
        assert seconds == pytest.approx(message + byte * size, rel=1e-5)
    assert ONE.link() is None


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(1000, 0.002), (5000, 0.006), (9000, 0.010)], (0.001, 1e-6)),
        ([(1000, 0.002)], (0.0, 2e-6)),
        ([(0, 0.002)], (0.0, 0.0)),
        ([(1000, 0.002), (1000, 0.004)], (0.003, 0.0)),
        ([(1000, 0.01), (5000, 0.002)], (0.006, 0.0)),
        ([(1000, 0.001), (9000, 0.029)], (0.0, 3e-6)),
    ],
)
def test_fit_is_nonnegative(times: list[tuple[int, float]], expected: tuple[float, float]) -> None:
    assert fit(times) == pytest.approx(expected)


# -- files --------------------------------------------------------------------------------------------------------


def write(folder: Path, plan: Any, **others: Any) -> Path:
    file = folder / "summary.json"
    file.write_text(json.dumps({"title": "train.py", "plan": plan} | others))
    return file


def test_summary_is_read_from_its_file_or_folder(tmp_path: Path) -> None:
    file = write(tmp_path, asdict(replace(TWO, critical_batch=128.0)) | {"unknown": 1})
    assert from_summary(file) == from_summary(tmp_path)
    assert from_summary(file).plan == replace(TWO, critical_batch=128.0)


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "no ranks": ({"ranks": 0}, "plan.ranks is 0, but must be from 1 to"),
    "many ranks": ({"ranks": 10**9}, "plan.ranks is 1000000000, but must be from 1 to"),
    "more hosts than ranks": ({"hosts": 3}, "plan.hosts is 3, but must be from 1 to 2"),
    "a text": ({"forward_s": "0.1"}, "forward_s is '0.1', but must be float"),
    "boolean": ({"forward_s": True}, "forward_s is True, but must be float"),
    "a fraction": ({"micro_batches": 1.5}, "micro_batches is 1.5, but must be int"),
    "negative": ({"optimizer_s": -1}, "plan.optimizer_s is -1.0, but must be from 0 to"),
    "no cores": ({"cores": 0}, "plan.cores is 0.0, but must be from 1e-09 to"),
    "huge": ({"communication_s": 1e300}, r"communication_s is 1e\+300, but must be float"),
    "infinite": ({"communication_s": math.inf}, "Infinity is not valid JSON"),
    "NaN": ({"samples": math.nan}, "NaN is not valid JSON"),
    "no layers": ({"layers": []}, "plan.layers has no time or no bytes"),
    "invalid layer": ({"layers": [[0.1, 4], 7]}, r"layers\[1\] is 7, but must be"),
    "a negative layer": ({"layers": [[0.1, 4], [0.1, -4]]}, r"plan.layers\[1\] is -4, but must be from 0"),
    "text in an all-reduce": ({"all_reduces": [[4, "a"]]}, r"all_reduces\[0\]\[1\] is 'a'"),
    "device as a list": ({"device": ["cpu"]}, r"device is \['cpu'\], but must be str"),
}


@pytest.mark.parametrize(("change", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_values_are_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = write(tmp_path, asdict(TWO) | change)
    with pytest.raises(UsageError, match=message) as caught:
        from_summary(file)
    assert str(caught.value).startswith(f"{file} is not a profile's summary for planning: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda file: None, "cannot be read: No such file or directory; give the folder of a profile"),
    "not JSON": (lambda file: file.write_text("{"), "is not a profile's summary"),
    "deep": (lambda file: file.write_text("[" * 100_000), "is not a profile's summary"),
    "a list": (lambda file: file.write_text("[]"), "it has no object 'plan'"),
    "no plan": (lambda file: file.write_text('{"plan": null}'), "it has no object 'plan'"),
    "missing key": (lambda file: file.write_text('{"plan": {"ranks": 1}}'), "all_reduces is missing"),
    "twice": (lambda file: file.write_text('{"plan": {}, "plan": {}}'), "'plan' occurs twice"),
    "bytes": (lambda file: file.write_bytes(b"\xff"), "is not a profile's summary"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_invalid_files_are_refused_in_one_line(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "summary.json")
    with pytest.raises(UsageError, match=message) as caught:
        from_summary(tmp_path / "summary.json")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
