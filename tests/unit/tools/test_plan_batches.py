"""Plans for failing hosts and for the global batch size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.planner.goodput import goodput
from paceline.planner.hardware import Cluster, Link
from paceline.planner.predictions import Job, equal_layers
from paceline.tools.plan.report import Outlook, document, look_ahead, notes, plot_outlook, trainings_table

JOB = Job(equal_layers(0.1, 4e8, 8), Cluster(8, Link("nvlink", 3e11, 1e-6, "peer"), Link("net", 5e10, 1e-5, "rdma")))


def outlook(critical_batch: float | None = 512.0) -> Outlook:
    job = replace(JOB, critical_batch=critical_batch)
    return look_ahead(job, [1, 8, 64, 512], None, None, None, partial(goodput, save_s=30.0))


def test_plan_includes_the_goodput_of_its_hosts() -> None:
    predictions = document(outlook())["predictions"]
    assert [entry["goodput"]["hosts"] for entry in predictions] == [1, 1, 8, 64]
    assert predictions[-1]["goodput"]["useful"] == goodput(64, 30.0).useful
    assert "On 64 hosts, a failure stops the job every 4 days 2 h" in "\n".join(notes(outlook()))


def test_time_cost_curve_has_its_knee_at_the_critical_batch_size() -> None:
    plan = outlook()
    trainings = document(plan)["trainings"]
    assert [row["batch"] for row in trainings] == [8, 64, 512, 4096]
    assert (trainings[2]["steps"], trainings[2]["samples"]) == (2, 2)
    assert [row["cost"] for row in trainings] == sorted(row["cost"] for row in trainings)
    assert [row["time"] for row in trainings] == sorted((row["time"] for row in trainings), reverse=True)
    assert [row.style for row in trainings_table(plan).rows] == ["", "", "bold", ""]
    assert notes(plan)[-1].endswith("a global batch of 512 samples, the critical batch size: about 64 devices.")
    assert len(plot_outlook(plan).axes) == 3


def test_plan_without_a_noise_scale_omits_batches() -> None:
    plan = outlook(None)
    assert (document(plan)["critical_batch"], document(plan)["trainings"]) == (None, [])
    assert "knee" not in "\n".join(notes(plan))
    assert len(plot_outlook(plan).axes) == 2


@pytest.mark.parametrize("option", ["--failure-rate", "--save-seconds", "--restart-seconds"])
def test_impossible_failure_rates_are_refused(option: str, refusal: Any) -> None:
    job = ["--params", "360M", "--flops", "4.4T", "--device", "h100", "--batch", "8"]
    assert f"{option}=-1 is not a positive number" in refusal("plan", *job, f"{option}=-1")
