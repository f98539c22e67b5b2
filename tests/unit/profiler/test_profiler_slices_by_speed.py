"""What the profiler says of slices by speed: on made records of a slow rank, whose figures can be computed by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.profiler.analysis.analyze import report_of
from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.operator_table import OperatorTable
from paceline.profiler.analysis.rules.slices_by_speed import RankTimes, equal_seconds, ideal_seconds
from paceline.profiler.records.rank_file import RankRecord
from paceline.profiler.report.report import Report
from profile_records import records

times = st.builds(RankTimes, st.floats(1, 100), st.floats(0.001, 1), st.floats(0, 1))


def verdict(made: list[RankRecord]) -> Report:
    return report_of(Facts(made, OperatorTable()))


@given(st.lists(times, min_size=2, max_size=6))
def test_the_ideal_is_never_later_than_the_present_or_equal_slices(ranks: list[RankTimes]) -> None:
    ideal = ideal_seconds(ranks)
    assert ideal <= max(rank.computing + rank.other for rank in ranks) * (1 + 1e-9)
    assert ideal <= equal_seconds(ranks) * (1 + 1e-9)


def test_without_other_work_it_is_the_harmonic_ideal() -> None:
    ranks = [RankTimes(32, 1.0, 0.0), RankTimes(32, 2.0, 0.0)]
    assert ideal_seconds(ranks) == pytest.approx(64 / (32 + 16))
    assert equal_seconds(ranks) == 2.0


def test_work_that_does_not_depend_on_samples_is_not_divided() -> None:
    ranks = [RankTimes(32, 1.0, 0.5), RankTimes(32, 2.0, 0.5)]
    assert ideal_seconds(ranks) == pytest.approx(0.5 + 64 / (32 + 16))


def slow(rank: int, _step: int) -> dict[str, float]:
    """30 ms on rank 0 and 60 ms on rank 1 for 32 samples, 5.5 ms of other work, 3 ms of communication."""
    return {"forward": 0.01 * (1 + rank), "backward": 0.02 * (1 + rank)}


def test_advice_about_a_slow_rank_says_what_slices_by_speed_would_give() -> None:
    advice = verdict(records(2, 60, slow)).advice[0]
    assert advice.kind == "straggler"
    promised = re.search(r'slices by speed, DataLoader\(…, speed="measured"\): ([\d.]+)× expected', advice.text)
    assert promised is not None
    # In slices that end at once: 64 samples by 1067 and 533 samples a second.
    rest = 0.0055 + 0.003
    assert float(promised[1]) == pytest.approx((0.06 + rest) / (64 / (32 / 0.03 + 32 / 0.06) + rest), abs=0.01)


def cut_by_speed(rank: int, _step: int) -> dict[str, float]:
    rows = (43, 21)[rank]
    return {"rows": rows, "forward": rows / 3200 * (1 + rank), "backward": rows / 1600 * (1 + rank)}


def test_what_is_promised_is_what_slices_by_speed_then_take() -> None:
    before, after = (
        sum(value for row in verdict(records(2, 60, timing)).step_seconds for value in row if value) / 2
        for timing in (slow, cut_by_speed)
    )
    text = verdict(records(2, 60, slow)).advice[0].text
    promised = float(text.partition(": ")[2].rpartition("×")[0].rpartition(" ")[2])
    assert before / after == pytest.approx(promised, rel=0.02)


@pytest.mark.parametrize("speed", ["measured", "given"])
def test_a_run_with_slices_by_speed_is_told_what_came_of_them(speed: str) -> None:
    found = verdict(records(2, 60, cut_by_speed, speed=speed))
    assert not found.stragglers
    told = re.search(r"Slices by speed \(43, 21 samples\) make steps ([\d.]+)× as fast as equal ones", found.headline)
    assert told is not None
    rest = 0.0085
    assert float(told[1]) == pytest.approx((0.06 + rest) / (43 / 1066.7 + rest), abs=0.02)
    assert "Slices by speed" not in verdict(records(2, 60, cut_by_speed)).headline, "without the loader's word"


def slow_in_other_code(rank: int, _step: int) -> dict[str, float]:
    return {"gap": 0.03 * rank}


def test_a_rank_that_is_late_by_its_own_code_is_not_told_to_take_fewer_samples() -> None:
    assert not any("slices by speed" in one.text for one in verdict(records(2, 60, slow_in_other_code)).advice)


def test_a_straggler_whose_samples_are_not_known_has_no_expected_slices() -> None:
    made = [replace(record, steps=[replace(step, rows=0) for step in record.steps]) for record in records(2, 60, slow)]
    advice = verdict(made).advice[0]
    assert advice.kind == "straggler"
    assert "slices by speed" not in advice.text
    assert not math.isnan(advice.gain)
