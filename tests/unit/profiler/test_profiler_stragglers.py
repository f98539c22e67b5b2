"""find_stragglers names slow ranks and when they were slow; a profile names only ranks that are late persistently."""

import random

import numpy
import pytest
import torch

from insides import is_lasting, late_since
from paceline.errors import UsageError
from paceline.profiler import find_stragglers


def times(steps, ranks, noise=0.03, seed=0):
    """Return log-normal times around 0.1 s; shape (steps, ranks)."""
    return 0.1 * numpy.random.default_rng(seed).lognormal(0, noise, (steps, ranks))


def only(seconds, **options):
    """Return the only straggler in `seconds`."""
    (straggler,) = find_stragglers(seconds, **options)
    return straggler


def test_always_slow_rank_is_persistent():
    seconds = times(300, 8)
    seconds[:, 5] *= 1.4
    straggler = only(seconds)
    assert (straggler.rank, straggler.kind) == (5, "persistent")
    assert (straggler.first_step, straggler.last_step, straggler.steps_slow) == (0, 299, 300)
    assert straggler.slowdown == pytest.approx(1.4, rel=0.02)
    assert straggler.seconds_lost == pytest.approx(300 * 0.04, rel=0.05)


@pytest.mark.parametrize("ranks", [2, 16])
def test_rank_that_becomes_slow_is_emerging_from_that_step(ranks):
    seconds = times(400, ranks)
    seconds[310:, 1] *= 1.42
    straggler = only(seconds)
    assert (straggler.rank, straggler.kind, straggler.last_step) == (1, "emerging", 399)
    assert abs(straggler.first_step - 310) <= 2


@pytest.mark.parametrize("first", [0, 120])
def test_recovering_rank_is_slow_until_its_recovery(first):
    seconds = times(400, 8)
    seconds[first:200, 2] *= 1.3
    straggler = only(seconds)
    assert (straggler.rank, straggler.kind) == (2, "recovered")
    assert abs(straggler.first_step - first) <= 2
    assert abs(straggler.last_step - 199) <= 2


@pytest.mark.parametrize("slow_in", ["40 % at random", "every other", "20 on, 20 off", "two intervals"])
def test_intermittently_slow_rank_is_fluctuating(slow_in):
    step = numpy.arange(400)
    slow = {
        "40 % at random": numpy.random.default_rng(1).random(400) < 0.4,
        "every other": step % 2 == 0,
        "20 on, 20 off": step // 20 % 2 == 0,
        "two intervals": (step // 80 == 1) | (step // 80 == 3),
    }[slow_in]
    seconds = times(400, 8)
    seconds[slow, 3] *= 1.5
    straggler = only(seconds)
    assert (straggler.rank, straggler.kind) == (3, "fluctuating")
    assert abs(straggler.steps_slow - slow.sum()) <= 8
    assert straggler.slowdown == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize(("slow", "ranks"), [(1, 2), (15, 32), (5, 8), (11, 16)])
def test_many_ranks_can_be_named_at_once_even_a_majority(slow, ranks):
    """Often a whole host is slow. The reference is the fastest quarter, because a median would include slow ranks."""
    seconds = times(300, ranks, 0.05)
    seconds[:, :slow] *= 1.4
    stragglers = find_stragglers(seconds)
    assert sorted(straggler.rank for straggler in stragglers) == list(range(slow))
    assert all(straggler.kind == "persistent" for straggler in stragglers)
    assert all(straggler.slowdown == pytest.approx(1.4, rel=0.05) for straggler in stragglers)
    assert [s.seconds_lost for s in stragglers] == sorted((s.seconds_lost for s in stragglers), reverse=True)


def test_mild_straggler_is_found_over_many_steps():
    seconds = times(1000, 16, 0.02)
    seconds[:, 9] *= 1.04
    assert find_stragglers(seconds) == []
    straggler = only(seconds, min_slowdown=1.025)
    assert (straggler.rank, straggler.kind) == (9, "persistent")
    assert straggler.slowdown == pytest.approx(1.04, abs=0.005)


def clean_jobs():
    """Return jobs without a straggler, each with a feature that resembles one."""
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
def test_no_alarm_for_balanced_ranks(name, seconds):
    assert find_stragglers(seconds) == []


def test_constant_differences_do_not_hide_a_rank_that_becomes_slow():
    """The median over a half-slow job was taken for the rank's usual time."""
    for seed in range(3):
        seconds = times(400, 8, 0.1, seed) * [1, 1.1, 1, 1.1, 1, 1, 1.1, 1]
        seconds[190:, 2] *= 1.25
        straggler = only(seconds)
        assert (straggler.rank, straggler.kind) == (2, "emerging")
        assert abs(straggler.first_step - 190) <= 20


def test_gradually_slowing_rank_is_emerging():
    seconds = times(1000, 8, 0.1)
    seconds[300:, 3] *= numpy.linspace(1, 3, 700)
    straggler = only(seconds)
    assert (straggler.rank, straggler.kind) == (3, "emerging")
    assert 300 < straggler.first_step < 460


@pytest.mark.parametrize("slow", [slice(5, 15), slice(0, 9)])
def test_much_slower_rank_is_found_despite_drift_of_the_others(slow):
    seconds = 0.003 * numpy.cumprod(numpy.random.default_rng(0).uniform(0.9, 1.35, (15, 1)), axis=0) * numpy.ones(2)
    seconds[slow, 1] += 0.15
    straggler = only(seconds, min_slowdown=1.15)
    assert (straggler.rank, straggler.first_step, straggler.last_step) == (1, slow.start, slow.stop - 1)


@pytest.mark.parametrize("ranks", [2, 8])
def test_no_alarm_for_persistent_noise(ranks):
    """Each step keeps 60 % of the previous noise; neighboring steps alone underestimated its duration."""
    for seed in range(2):
        draw = numpy.random.default_rng(seed)
        noise = draw.standard_normal((300, ranks))
        for step in range(1, 300):
            noise[step] = 0.6 * noise[step - 1] + 0.8 * noise[step]
        assert find_stragglers(0.1 * numpy.exp(0.2 * noise)) == []


def test_persistent_straggler_does_not_emerge_after_warm_up():
    """In the first steps compilation takes equally long on all ranks, but the slow rank is slow from the start."""
    seconds = times(300, 8)
    seconds[:, 6] *= 1.3
    seconds[:6] = 5.0
    assert (only(seconds).kind, only(seconds).first_step) == ("persistent", 0)


def test_missing_times_are_ignored():
    """A restarting rank leaves a gap, and a late joiner is judged from its first step."""
    seconds = times(400, 8)
    seconds[:, 1] *= 1.3
    seconds[:50, 1] = seconds[100:150, 1] = seconds[200:260, 4] = seconds[:, 7] = numpy.nan
    straggler = only(seconds)
    assert (straggler.rank, straggler.kind, straggler.first_step, straggler.last_step) == (1, "persistent", 50, 399)
    assert straggler.steps_slow == 300


def test_times_below_the_clock_resolution_are_ignored():
    assert find_stragglers(numpy.zeros((50, 4))) == []
    seconds = numpy.full((50, 4), 0.1)
    seconds[10, 2] = 0.0
    assert find_stragglers(seconds) == []


@pytest.mark.parametrize("seconds", [[[1.0]] * 30, [[numpy.nan, numpy.nan]] * 30, [[1, numpy.nan, 3.0]] * 4])
def test_no_stragglers_without_enough_data(seconds):
    assert find_stragglers(seconds) == []


def test_every_table_type_gives_the_same_answer():
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
def test_invalid_times_are_refused(seconds, message):
    with pytest.raises(UsageError, match=message):
        find_stragglers(seconds)


def test_limit_is_validated():
    for limit in (1.0, 0.5, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="min_slowdown"):
            find_stragglers([[1.0, 2.0]], min_slowdown=limit)


# -- ranks that a profile names ----------------------------------------------------------------------------------------


Busy = list[list[float]]


def run(steps: int, seconds: float, slow: dict[int, float], seed: int = 0) -> tuple[Busy, list[float]]:
    """Make steps of 2 ranks; rank 1 takes `slow[step]` times as long."""
    jitter = random.Random(seed)
    busy = [[seconds * abs(jitter.gauss(1, 0.1)) for _ in range(2)] for _ in range(steps)]
    for step, factor in slow.items():
        busy[step][1] *= factor
    return busy, [max(row) for row in busy]


def test_rank_far_behind_in_every_step_of_a_second_is_persistently_late() -> None:
    busy, lengths = run(33, 0.03, dict.fromkeys(range(33), 2.0))
    assert is_lasting(busy, lengths, 1)
    assert not is_lasting(busy, lengths, 0)


def test_load_of_a_few_seconds_is_not_a_straggler() -> None:
    """As measured on a busy host, where healthy ranks were 15 to 37 % late for a second or two, step after step."""
    busy, lengths = run(300, 0.01, dict.fromkeys(range(300), 1.35))
    assert not is_lasting(busy, lengths, 1)


def test_rank_a_fifth_behind_for_many_seconds_is_persistently_late() -> None:
    busy, lengths = run(200, 0.1, dict.fromkeys(range(200), 1.2))
    assert is_lasting(busy, lengths, 1)
    now_and_then = dict.fromkeys(range(0, 200, 3), 2.0)
    assert is_lasting(*run(200, 0.1, now_and_then), 1)


def test_intermittent_load_blames_no_rank() -> None:
    """In any order, both ranks equally often take half as long again for 2 seconds."""
    for seed in range(30):
        slow = [0, 0, 0, 1, 1, 1, None, None, None, None]
        random.Random(seed).shuffle(slow)
        busy, lengths = run(200, 0.1, {}, seed)
        for step, row in enumerate(busy):
            if (rank := slow[step // 20]) is not None:
                row[rank] *= 1.5
        assert not is_lasting(busy, lengths, 0)
        assert not is_lasting(busy, lengths, 1)


@pytest.mark.parametrize(
    ("late", "since"),
    [
        (range(50, 100), 50),
        (range(90, 100), 90),
        (range(100), None),  # from the start
        (range(0), None),
        (range(4, 100, 5), None),  # intermittent
        (range(30, 60), None),  # recovers
    ],
)
def test_onset_of_lateness_is_found_despite_spikes(late: range, since: int | None) -> None:
    jitter = random.Random(1)
    differences = [jitter.gauss(0, 0.001) + (0.02 if step in late else 0.0) for step in range(100)]
    differences[20], differences[95] = 0.3, -0.3
    assert late_since(differences) == since
    assert late_since([]) is None


def test_missing_times_give_no_verdict() -> None:
    missing = float("nan")
    assert not is_lasting([[missing, 1.0]] * 20, [1.0] * 20, 1)
    assert not is_lasting([[1.0, missing]] * 20, [1.0] * 20, 1)
    assert not is_lasting([[0.0, 1.0]] * 20, [1.0] * 20, 1)
    assert not is_lasting([], [], 0)
    assert is_lasting([[1.0, 2.0], [missing, 2.0]] * 20, [2.0] * 40, 1)
