"""``paceline plan``: exit codes, JSON, charts, one-line errors, failing hosts, and the global batch size."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from insides import Cluster, Link, Outlook, document, equal_layers, goodput, look_ahead, plot_outlook, trainings_table
from insides import predictions_Job as Job
from insides import report_notes as notes

DESCRIBED = ("plan", "--params", "360M", "--flops", "4.4T", "--device", "h100", "--batch", "8")
Planned = Callable[..., dict[str, Any]]


@pytest.fixture
def planned(run: Any, capfd: pytest.CaptureFixture[str]) -> Planned:
    """Run the command with the given arguments and return its JSON."""

    def planned(*arguments: str) -> dict[str, Any]:
        assert run(*arguments, "--json") == 0
        return json.loads(capfd.readouterr().out)  # type: ignore[no-any-return]

    return planned


def test_described_job_is_predicted_up_to_4096_devices(planned: Planned) -> None:
    predictions = planned(*DESCRIBED)["predictions"]
    assert [entry["devices"] for entry in predictions] == [2**power for power in range(13)]
    assert [entry["hosts"] for entry in predictions][:5] == [1, 1, 1, 1, 2]
    efficiencies = [entry["efficiency"] for entry in predictions]
    assert efficiencies[0] == 1
    assert efficiencies == sorted(efficiencies, reverse=True)
    for entry in predictions:
        low, high = entry["interval"]
        assert low <= entry["efficiency"] <= high
        assert entry["samples_per_s"] == pytest.approx(8 * entry["devices"] / entry["step_s"])


def test_price_and_samples_give_time_and_cost_of_an_epoch(planned: Planned) -> None:
    options = ("--price", "2.5", "--samples", "1M", "--devices", "1,64")
    one, many = planned(*DESCRIBED, *options)["predictions"]
    assert one["epoch_s"] == pytest.approx(1e6 / one["samples_per_s"])
    assert one["cost"] == pytest.approx(2.5 * one["epoch_s"] / 3600)
    assert many["cost"] == pytest.approx(one["cost"] / many["efficiency"])


def test_slower_network_and_smaller_hosts_cost_efficiency(planned: Planned) -> None:
    def efficiency(*options: str) -> float:
        plan = planned(*DESCRIBED, "--devices", "64", *options)
        return float(plan["predictions"][-1]["efficiency"])

    assert efficiency() > efficiency("--links", "100gbit") > efficiency("--links", "100gbit-tcp")
    assert efficiency() > efficiency("--links", "pcie4")
    assert efficiency("--links", "25gbit") > efficiency("--links", "25gbit", "--hosts-of", "1")


def test_count_that_stops_paying_is_marked(planned: Planned, run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    slow = ("--links", "nvlink4,1gbit")
    plan = planned(*DESCRIBED, *slow)
    assert plan["stops_paying"] == 8
    assert plan["effects"]["devices"] == 16
    assert plan["effects"]["savings"]["accumulate 4 batches"] > 0
    assert run(*DESCRIBED, *slow) == 0
    assert "Stops paying at 8 devices" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a profile, or describe the job: --params, --flops, --batch, --device missing"),
        (("--device", "abacus"), "unknown device 'abacus'; known devices: "),
        (("--params", "many"), "--params=many is not a positive number; write it as in 360M"),
        (("--precision", "int8"), "--precision must be fp32, tf32, bf16 or fp16, not 'int8'"),
        (("--devices", "8", "--hosts-of", "16"), "--devices 8 is less than the 16 devices of one host"),
        (("--devices", "1,x"), "--devices=1,x must be a number from 1 to 1,048,576, or a list"),
        (("--links", "100gbit,nvlink4"), "'100gbit' connects hosts, not devices"),
        (("--links", "nvlink3"), "contradicts --device h100, which has nvlink4"),
        (("--price", "-1"), "--price=-1 is not a positive number"),
        (("--params", "1e308"), "--params=1e308 is out of range; give a value from 1000 to 1e+20"),
        (("--devices", "9" * 5000), "must be a number from 1 to 1,048,576"),
        (("--links", "nvlink4,0gbit"), "'0gbit' is unknown"),
        (("--links", "nvlink4,0x100gbit"), "'0x100gbit' is unknown"),
        (("--device", "0tflops"), "unknown device '0tflops'"),
    ],
)
def test_bad_arguments_are_one_line_with_exit_code_2(arguments: tuple[str, ...], message: str, refusal: Any) -> None:
    assert message in refusal(*(DESCRIBED if arguments else ("plan",)), *arguments)


def test_small_rates_accept_an_exponent(planned: Planned) -> None:
    options = ("--failure-rate", "1e-3", "--devices", "8")
    goodput = planned(*DESCRIBED, *options)["predictions"][-1]["goodput"]
    assert goodput["mtbf_s"] == pytest.approx(86_400_000)


def test_invalid_profile_folder_is_one_line_with_exit_code_2(tmp_path: Path, refusal: Any) -> None:
    assert "give the folder of a profile" in refusal("plan", str(tmp_path))
    assert "--params cannot be combined with a profile" in refusal("plan", str(tmp_path), "--params", "1M")


# -- failing hosts and the global batch size ---------------------------------------------------------------------------


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
