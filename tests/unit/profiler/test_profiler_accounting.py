"""Accounting in a profile: parts add up, bubbles have a cause, clocks are aligned, and ``paceline plan`` can use it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insides import (
    BACKWARD,
    COLLECTIVE,
    FORWARD,
    GRADIENT,
    LAUNCH,
    MEETING,
    OPTIMIZER,
    REDUCE,
    WAIT,
    Span,
    Step,
    account,
    bound_offset,
    find_bubbles,
    from_profiles,
    from_summary,
    gradient_times,
    mean_of,
    offset_at,
    plan_of,
    step_parts,
    summary,
)
from profile_records import GROUP, cut, records, usual, verdict

LABELS = [FORWARD, BACKWARD, LAUNCH, WAIT, COLLECTIVE, REDUCE, OPTIMIZER, "unknown"]


@given(st.lists(st.tuples(st.sampled_from(LABELS), st.floats(-1, 11), st.floats(0, 5)), max_size=12))
def test_parts_add_up_to_the_step_for_any_spans(drawn: list[tuple[str, float, float]]) -> None:
    spans = [Span(label, start, start + seconds) for label, start, seconds in drawn]
    seconds, meetings = cut(spans, 0.0, 10.0)
    assert math.isclose(math.fsum(seconds.values()), 10.0, abs_tol=1e-9)
    assert all(value >= 0 for value in seconds.values())
    assert all(0 <= meeting.came <= meeting.left <= 10 for meeting in meetings)


def test_time_belongs_to_the_innermost_span_and_collectives_include_nested_spans() -> None:
    spans = [
        Span(FORWARD, 1, 3),
        Span(BACKWARD, 3, 9),
        Span(LAUNCH, 4, 5),
        Span(WAIT, 7, 9, None, "g"),
        Span(REDUCE, 7.5, 8),
        Span(COLLECTIVE, 8, 8.5, None, "h"),
        Span(OPTIMIZER, 9, 9.5),
    ]
    seconds, meetings = cut(spans, 0, 10)
    assert seconds == {
        "forward": 2,
        "backward": 3,
        step_parts.COMMUNICATION: 1,
        MEETING: 2,
        "optimizer": 0.5,
        step_parts.OTHER: 1.5,
    }
    assert [(meeting.group, meeting.came, meeting.left) for meeting in meetings] == [("g", 7, 9)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_bubbles_are_waits_for_the_last_rank_and_the_rest_is_communication(ranks: int) -> None:
    def late(rank: int, step: int) -> dict[str, float]:
        return {"forward": 0.01 + (0.03 if rank == ranks - 1 else 0)}

    accounts = account(records(ranks, timing=late))
    for at in range(len(accounts.steps)):
        for rank in range(ranks):
            parts = {part: accounts.parts[part][at][rank] for part in step_parts.ALL}
            assert math.isclose(math.fsum(parts.values()), accounts.lengths[at][rank])
            assert math.isclose(parts[step_parts.BUBBLE], 0.03 if rank < ranks - 1 else 0.0, abs_tol=1e-9)
            assert math.isclose(parts[step_parts.COMMUNICATION], 0.003, abs_tol=1e-9)
    for rank in range(ranks - 1):
        assert accounts.waited_for[rank] == pytest.approx([0.0] * (ranks - 1) + [0.03])
    assert accounts.steps == list(range(3, 40)), "warm-up steps are excluded"


def test_known_clock_offsets_change_nothing() -> None:
    def late(rank: int, step: int) -> dict[str, float]:
        return {"data": 0.02 if rank == 0 else 0.001}

    same = account(records(3, timing=late))
    moved = account(records(3, timing=late, ahead=[0.0, 1234.5, -77.25]))
    for part in step_parts.ALL:
        for one, other in zip(same.parts[part], moved.parts[part], strict=True):
            assert one == pytest.approx(other, abs=1e-9)
    unknown = [replace(record, offsets=[]) for record in records(3, timing=late, ahead=[0.0, 1234.5, -77.25])]
    assert account(unknown).mean(step_parts.BUBBLE) != pytest.approx(same.mean(step_parts.BUBBLE), rel=0.2)


def test_rank_that_ends_early_has_no_value_and_affects_no_other() -> None:
    made = records(2, steps=20)
    made[1].steps = made[1].steps[:10]
    accounts = account(made)
    assert [math.isnan(row[1]) for row in accounts.lengths] == [False] * 7 + [True] * 10
    assert not math.isnan(mean_of(accounts.lengths))
    assert accounts.parts[step_parts.BUBBLE][-1][0] == 0.0, "without a known late rank, all waiting is communication"


def test_ranks_with_different_numbers_of_collectives_are_not_matched() -> None:
    made = records(2, steps=5)
    step, made[0].groups = made[0].steps[4], {made[0].steps[4].meetings[0].group: [0, 1]}
    odd = replace(step, meetings=[*step.meetings, *step.meetings])
    assert find_bubbles([odd, made[1].steps[4]], made) + find_bubbles([step], made[:1]) == [{}, {}, {}]


def test_collectives_of_some_ranks_are_matched_among_them() -> None:
    def late(rank: int, step: int) -> dict[str, float]:
        return {"forward": 0.01 * (rank + 1)}

    made = records(4, timing=late, groups={GROUP: [0, 1, 2, 3], "pair": [1, 2]})
    step = [record.steps[5] for record in made]
    paired = [
        replace(entry, meetings=[entry.meetings[0]._replace(group="pair")] if rank in (1, 2) else [])
        for rank, entry in enumerate(step)
    ]
    bubbles = find_bubbles(paired, made)
    assert bubbles[0] == bubbles[2] == bubbles[3] == {}
    assert bubbles[1] == pytest.approx({2: 0.01})


@given(st.integers(0, 1000), st.floats(-1e4, 1e4))
def test_clock_offset_lies_within_its_error(seed: int, ahead: float) -> None:
    draw = random.Random(seed)
    now, mine, theirs = 0.0, [], []
    for _ in range(12):
        begins = [now + draw.random() * 0.01 for _ in range(2)]
        ends = [max(begins) + draw.random() * 0.001 for _ in range(2)]
        mine.append((begins[0] + ahead, ends[0] + ahead))
        theirs.append((begins[1], ends[1]))
        now = max(ends)
    offset, error = bound_offset(mine, theirs)
    assert abs(offset - ahead) <= error + 1e-9
    assert error < 0.01


def test_offset_between_two_measurements_is_interpolated() -> None:
    assert offset_at(5.0, []) == 0.0
    assert offset_at(5.0, [(1.0, 0.25, 0.1)]) == 0.25
    assert offset_at(15.0, [(10.0, 1.0, 0.1), (20.0, 3.0, 0.1)]) == 2.0


# -- information for ``paceline plan`` ---------------------------------------------------------------------------------


def test_plan_has_the_seconds_and_bytes_of_a_step() -> None:
    """Backward takes 20 ms for 4 layers, each its own bucket, and each all-reduce 10 ms."""
    plan = plan_of(verdict(records(2, 40, travel=0.04, buckets=[4_000_000] * 4, own_cores=0.9)).facts)
    assert plan is not None
    assert (plan.ranks, plan.hosts, plan.cores, plan.samples, plan.micro_batches) == (2, 1, 2, 32, 1)
    assert plan.busy_cores == pytest.approx(0.9)
    assert plan.forward_s == pytest.approx(0.01)
    assert [nbytes for _, nbytes in plan.layers] == plan.bucket_bytes == [4_000_000] * 4
    assert [seconds for seconds, _ in plan.layers] == pytest.approx([0.005] * 4)
    assert plan.optimizer_s == pytest.approx(0.004)
    assert plan.other_s == pytest.approx(0.001 + 0.0005)
    assert [seconds for _, seconds in plan.all_reduces] == pytest.approx([0.01] * 4)
    assert plan.communication_s == pytest.approx(0.04 - 0.015)
    assert plan.spread == pytest.approx(0.0)
    assert plan.bubble_s == pytest.approx(0, abs=1e-6)
    assert not plan.reduces_in_backward


def test_planned_step_time_matches_the_profile(tmp_path: Path) -> None:
    report = verdict(records(2, 40, travel=0.04, buckets=[4_000_000] * 4, own_cores=0.9))
    (tmp_path / "summary.json").write_text(json.dumps(summary(report)))
    job = from_profiles([from_summary(tmp_path).plan])
    assert job.step(2).length_s == pytest.approx(0.0355 + 0.025, rel=1e-3)


def test_slow_drift_widens_the_spread_of_a_plan() -> None:
    """Blocks of 20 steps have medians of 90 to 110 ms; the steps' deviation promises a quarter of the error."""
    made = records(1, 103, lambda _, step: {"forward": 0.0645 + 0.005 * ((step - 3) // 20)}, travel=0.0)
    plan = plan_of(verdict(made).facts)
    assert plan is not None
    assert plan.spread == pytest.approx(0.005 * 2.5**0.5 / 5**0.5 / 0.1)


def test_accumulated_batches_are_counted_separately() -> None:
    made = records(2, 40)
    for record in made:
        record.steps = [replace(step, batches=2) for step in record.steps]
    plan = plan_of(verdict(made).facts)
    assert plan is not None
    assert (plan.micro_batches, plan.forward_s) == (2, pytest.approx(usual(0, 0)["forward"] / 2))


def test_layer_times_are_proportional_to_bytes_without_arrivals() -> None:
    """For example with torch's wrapper, or with an unused parameter."""
    made = records(2, 40, buckets=[1_000_000, 3_000_000])
    for record in made:
        for step in record.steps:
            step.spans = [span for span in step.spans if (span.label, span.bucket) != (GRADIENT, 1)]
    plan = plan_of(verdict(made).facts)
    assert plan is not None
    assert plan.layers == [(pytest.approx(0.015), 3_000_000), (pytest.approx(0.005), 1_000_000)]
    assert plan_of(verdict(records(2, 3)).facts) is None, "no measured step"


def test_bucket_launch_time_is_not_part_of_the_layer() -> None:
    marks = [Span(GRADIENT, when, when, number) for number, when in enumerate((1.0, 3.0, 3.0, 6.0))]
    spans = [Span(BACKWARD, 0.5, 7.0), Span(LAUNCH, 1.0, 2.0, 0), *marks, Span(GRADIENT, 4.0, 4.0, 2)]
    step = Step(5, "detailed", 0.0, 8.0, {}, [], spans=spans)
    # The last of two arrivals counts, as with reentrant checkpointing.
    assert gradient_times(step) == [(0, 0.5), (1, 1.0), (2, 1.0), (3, 2.0)]
