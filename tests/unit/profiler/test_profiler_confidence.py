"""A profile names persistently late ranks only, not ranks slowed temporarily by a neighbor's load."""

from __future__ import annotations

import random

import pytest

from paceline.profiler.facts import is_lasting, late_since

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
