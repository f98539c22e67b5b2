"""Information for ``paceline plan`` in the summary of a profile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.spans import BACKWARD, GRADIENT, LAUNCH, Span
from paceline.planner.profiles import from_profiles, from_summary
from paceline.profiler.analyze import summary
from paceline.profiler.facts import plan_of
from paceline.profiler.step_breakdown import gradient_times
from paceline.profiler.steps import Step
from profile_records import records, usual, verdict


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
    assert plan.bubble_s == pytest.approx(0, abs=1e-6)
    assert not plan.reduces_in_backward


def test_planned_step_time_matches_the_profile(tmp_path: Path) -> None:
    report = verdict(records(2, 40, travel=0.04, buckets=[4_000_000] * 4, own_cores=0.9))
    (tmp_path / "summary.json").write_text(json.dumps(summary(report)))
    job = from_profiles([from_summary(tmp_path)])
    assert job.step(2).length_s == pytest.approx(0.0355 + 0.025, rel=1e-3)


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
