"""find_stragglers: who was slow, from when to when, and nobody who was not."""

import numpy
import pytest
import torch

from paceline.errors import UsageError
from paceline.profiler import find_stragglers


def times(steps, ranks, noise=0.03, seed=0):
    """Return log-normal times around 0.1 s; shape (steps, ranks)."""
    return 0.1 * numpy.random.default_rng(seed).lognormal(0, noise, (steps, ranks))


def only(seconds, **options):
    """Return the one straggler of `seconds`."""
    (found,) = find_stragglers(seconds, **options)
    return found


def test_a_rank_that_is_always_slow_is_persistent():
    seconds = times(300, 8)
    seconds[:, 5] *= 1.4
    found = only(seconds)
    assert (found.rank, found.kind) == (5, "persistent")
    assert (found.first_step, found.last_step, found.steps_slow) == (0, 299, 300)
    assert found.slowdown == pytest.approx(1.4, rel=0.02)
    assert found.seconds_lost == pytest.approx(300 * 0.04, rel=0.05)


@pytest.mark.parametrize("ranks", [2, 16])
def test_a_rank_that_becomes_slow_is_emerging_from_that_step_on(ranks):
    seconds = times(400, ranks)
    seconds[310:, 1] *= 1.42
    found = only(seconds)
    assert (found.rank, found.kind, found.last_step) == (1, "emerging", 399)
    assert abs(found.first_step - 310) <= 2


@pytest.mark.parametrize("first", [0, 120])
def test_a_rank_that_recovers_is_slow_until_then(first):
    seconds = times(400, 8)
    seconds[first:200, 2] *= 1.3
    found = only(seconds)
    assert (found.rank, found.kind) == (2, "recovered")
    assert abs(found.first_step - first) <= 2
    assert abs(found.last_step - 199) <= 2


@pytest.mark.parametrize("slow_in", ["40 % at random", "every other", "20 on, 20 off", "two intervals"])
def test_a_rank_that_is_slow_now_and_then_is_fluctuating(slow_in):
    step = numpy.arange(400)
    slow = {
        "40 % at random": numpy.random.default_rng(1).random(400) < 0.4,
        "every other": step % 2 == 0,
        "20 on, 20 off": step // 20 % 2 == 0,
        "two intervals": (step // 80 == 1) | (step // 80 == 3),
    }[slow_in]
    seconds = times(400, 8)
    seconds[slow, 3] *= 1.5
    found = only(seconds)
    assert (found.rank, found.kind) == (3, "fluctuating")
    assert abs(found.steps_slow - slow.sum()) <= 8
    assert found.slowdown == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize(("slow", "ranks"), [(1, 2), (15, 32)])
def test_up_to_half_of_the_ranks_are_named_at_once(slow, ranks):
    """A whole host is often slow, so the median of the others must hold until half of them are."""
    seconds = times(300, ranks, 0.05)
    seconds[:, :slow] *= 1.3
    found = find_stragglers(seconds)
    assert sorted(straggler.rank for straggler in found) == list(range(slow))
    assert all(straggler.kind == "persistent" for straggler in found)
    assert [s.seconds_lost for s in found] == sorted((s.seconds_lost for s in found), reverse=True)


def test_a_mild_straggler_is_found_over_many_steps():
    seconds = times(1000, 16, 0.02)
    seconds[:, 9] *= 1.04
    assert find_stragglers(seconds) == []
    found = only(seconds, min_slowdown=1.025)
    assert (found.rank, found.kind) == (9, "persistent")
    assert found.slowdown == pytest.approx(1.04, abs=0.005)


def clean_jobs():
    """Make jobs without a straggler, each with something that looks like one."""
    random = numpy.random.default_rng(3)
    yield "three spikes in a row", _with(lambda x: x.__setitem__((slice(300, 303), 2), 50.0))
    yield "rank 0 saves every 50 steps", _with(lambda x: x.__setitem__((slice(None, None, 50), 0), 2.0))
    yield "collections every 10 steps", _with(lambda x: x.__setitem__((slice(None, None, 10), 0), 0.5))
    yield "all ranks drift", times(600, 8) * numpy.linspace(1, 3, 600)[:, None]
    yield "steps of different length", times(600, 8) * random.lognormal(0, 0.8, (600, 1))
    yield "ranks differ by 1 %", times(600, 64, 0.01) * random.lognormal(0, 0.01, (1, 64))
    yield "a mixed fleet", times(600, 8, 0.01) * numpy.linspace(0.9, 1.1, 8)
    yield "one fast rank", times(600, 3) * [1, 0.7, 1]
    yield "all ranks slow but a quarter", times(600, 8) * [1, 1, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3]
    yield "one noisy rank", _with(lambda x: x.__setitem__((slice(None), 4), x[:, 4] * random.lognormal(0, 0.3, 600)))
    yield "a coarse clock", numpy.round(times(600, 8, 0.1) * 50) / 50
    warm_up = numpy.ones((600, 8))
    warm_up[:5] = numpy.array([100, 50, 20, 10, 5])[:, None] * random.lognormal(0, 0.5, (5, 8))
    yield "a warm-up", times(600, 8) * warm_up
    yield "times without noise", numpy.full((600, 8), 0.1)
    yield "heavy tails", 0.1 * numpy.exp(0.1 * random.standard_t(3, (600, 8)))


def _with(change):
    seconds = times(600, 8)
    change(seconds)
    return seconds


@pytest.mark.parametrize(
    ("name", "seconds"), list(clean_jobs()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_no_straggler_raises_no_alarm(name, seconds):
    assert find_stragglers(seconds) == []


def test_steady_differences_hide_nobody_who_becomes_slow():
    """A median over the whole job, half of it slow, was taken for the rank's usual time."""
    for seed in range(3):
        seconds = times(400, 8, 0.1, seed) * [1, 1.1, 1, 1.1, 1, 1, 1.1, 1]
        seconds[190:, 2] *= 1.25
        found = only(seconds)
        assert (found.rank, found.kind) == (2, "emerging")
        assert abs(found.first_step - 190) <= 20


def test_more_than_half_of_the_ranks_are_named_if_they_are_slow_from_the_start():
    """They are compared with the fastest quarter, as a median would call the slow ones usual."""
    for ranks, slow in ((8, 5), (16, 11)):
        seconds = times(300, ranks, 0.1)
        seconds[:, :slow] *= 1.4
        found = find_stragglers(seconds)
        assert sorted(straggler.rank for straggler in found) == list(range(slow))
        assert all(straggler.kind == "persistent" for straggler in found)
        assert all(straggler.slowdown == pytest.approx(1.4, rel=0.05) for straggler in found)


def test_a_rank_that_gets_slower_bit_by_bit_is_emerging():
    seconds = times(1000, 8, 0.1)
    seconds[300:, 3] *= numpy.linspace(1, 3, 700)
    found = only(seconds)
    assert (found.rank, found.kind) == (3, "emerging")
    assert 300 < found.first_step < 460


@pytest.mark.parametrize("slow", [slice(5, 15), slice(0, 9)])
def test_a_rank_that_takes_many_times_as_long_is_found_although_the_others_time_drifts(slow):
    seconds = 0.003 * numpy.cumprod(numpy.random.default_rng(0).uniform(0.9, 1.35, (15, 1)), axis=0) * numpy.ones(2)
    seconds[slow, 1] += 0.15
    found = only(seconds, min_slowdown=1.15)
    assert (found.rank, found.first_step, found.last_step) == (1, slow.start, slow.stop - 1)


@pytest.mark.parametrize("ranks", [2, 8])
def test_noise_that_lasts_raises_no_alarm(ranks):
    """Each step keeps 60 % of the noise of the one before; neighbours alone told little of how long noise lasts."""
    for seed in range(2):
        draw = numpy.random.default_rng(seed)
        noise = draw.standard_normal((300, ranks))
        for step in range(1, 300):
            noise[step] = 0.6 * noise[step - 1] + 0.8 * noise[step]
        assert find_stragglers(0.1 * numpy.exp(0.2 * noise)) == []


def test_the_warm_up_does_not_make_a_persistent_straggler_emerge():
    """In the first steps all ranks take as long, because they compile; the slow rank is slow from the start."""
    seconds = times(300, 8)
    seconds[:, 6] *= 1.3
    seconds[:6] = 5.0
    assert (only(seconds).kind, only(seconds).first_step) == ("persistent", 0)


def test_missing_times_are_left_out():
    """A rank that restarts leaves a gap, and one that joins late is judged from then on."""
    seconds = times(400, 8)
    seconds[:, 1] *= 1.3
    seconds[:50, 1] = seconds[100:150, 1] = seconds[200:260, 4] = seconds[:, 7] = numpy.nan
    found = only(seconds)
    assert (found.rank, found.kind, found.first_step, found.last_step) == (1, "persistent", 50, 399)
    assert found.steps_slow == 300


def test_times_below_the_clock_decide_nothing():
    assert find_stragglers(numpy.zeros((50, 4))) == []
    seconds = numpy.full((50, 4), 0.1)
    seconds[10, 2] = 0.0
    assert find_stragglers(seconds) == []


@pytest.mark.parametrize("seconds", [[[1.0]] * 30, [[numpy.nan, numpy.nan]] * 30, [[1, numpy.nan, 3.0]] * 4])
def test_too_little_to_compare_has_no_stragglers(seconds):
    assert find_stragglers(seconds) == []


def test_every_kind_of_table_gives_the_same_answer():
    seconds = times(100, 4)
    seconds[:, 2] *= 1.5
    tensor = torch.tensor(seconds)
    kinds = [seconds.tolist(), tensor, list(tensor), list(seconds), seconds[::-1, ::-1].copy()[::-1, ::-1]]
    assert [find_stragglers(kind) for kind in kinds] == [find_stragglers(seconds)] * len(kinds)
    assert only(torch.tensor(seconds, requires_grad=True).float()).rank == 2


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ([[1.0, 2.0], [1.0, -2.0]], "the time of rank 1 in step 1 is -2"),
        ([[float("inf"), 2.0]], "the time of rank 0 in step 0 is inf"),
        ([[1.0, 2.0], [1.0]], "shape"),
        ([["fast", 1.0]], "numbers of shape"),
        ([[None, 1.0]], "give NaN for a missing time"),
        ([1.0, 2.0], "one row for each step"),
        ("text", "numbers of shape"),
        (1.0, "numbers of shape"),
        ([[10**400, 1.0]], "numbers of shape"),
        (torch.ones(2, 2).to_sparse(), "a dense table"),
        ([torch.ones(2).to_sparse()], "a dense table"),
        (torch.ones(2, 2) * 1j, "of real numbers"),
        (numpy.ones((2, 2)) * 1j, "of real numbers"),
    ],
)
def test_bad_times_are_refused(seconds, message):
    with pytest.raises(UsageError, match=message):
        find_stragglers(seconds)


def test_the_limit_is_checked():
    for limit in (1.0, 0.5, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="min_slowdown"):
            find_stragglers([[1.0, 2.0]], min_slowdown=limit)
