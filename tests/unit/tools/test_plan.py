"""``paceline plan``: exit codes, JSON, charts, one-line errors, failing hosts, and the global batch size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from insides import (
    Cluster,
    Link,
    Outlook,
    Plan,
    ReplicaMemory,
    document,
    equal_layers,
    goodput,
    look_ahead,
    trainings_table,
)
from insides import predictions_Job as Job
from insides import report_notes as notes
from json_page import check

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
        parts = ("compute_s", "exposed_s", "interference_s", "jitter_s")
        assert math.fsum(entry[part] for part in parts) == pytest.approx(entry["step_s"])
        assert entry["samples_per_s"] == pytest.approx(8 * entry["devices"] / entry["step_s"])


def test_price_and_samples_give_time_and_cost_of_an_epoch(planned: Planned) -> None:
    options = ("--price", "2.5", "--samples", "1M", "--devices", "1,64")
    one, many = planned(*DESCRIBED, *options)["predictions"]
    assert one["epoch_s"] == pytest.approx(1e6 / one["samples_per_s"])
    assert one["cost"] == pytest.approx(2.5 * one["epoch_s"] / 3600)
    assert many["cost"] == pytest.approx(one["cost"] / many["efficiency"])


def test_measured_speed_is_the_speed_of_one_device(planned: Planned) -> None:
    job = ("plan", "--params", "25M", "--samples-per-second", "360", "--device", "v100", "--batch", "128")
    plan = planned(*job, "--devices", "2")  # on one host, without --hosts-of
    one, two = plan["predictions"]
    assert (plan["assumed_speed"], plan["speed_interval"]) == (None, [1, 1])
    assert one["samples_per_s"] == pytest.approx(360)
    assert one["samples_per_s_interval"] == pytest.approx([360, 360])
    assert (two["hosts"], plan["devices_per_host"]) == (1, 2)


def test_assumed_speed_has_an_interval_and_says_so(planned: Planned, run: Any, capfd: Any) -> None:
    plan = planned(*DESCRIBED, "--devices", "8")
    low, high = plan["speed_interval"]
    one, *_, eight = plan["predictions"]
    assert one["samples_per_s_interval"] == pytest.approx([low * one["samples_per_s"], high * one["samples_per_s"]])
    relative = [end / eight["samples_per_s"] for end in eight["samples_per_s_interval"]]
    assert relative[0] < low < high < relative[1], "the efficiency is uncertain, too"
    assert run(*DESCRIBED, "--family", "transformer", "--price", "2EUR", "--samples", "1M", "--devices", "8") == 0
    printed = capfd.readouterr().out
    assert "The speed of a device is assumed: " in printed
    assert "of the peak of h100 in bf16" in printed
    assert "cost of an epoch (EUR)" in printed


def test_interval_without_an_end_says_so(planned: Planned, run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    slow = (*DESCRIBED, "--links", "pcie4", "--batch", "1", "--price", "2", "--devices", "2")
    assert planned(*slow)["predictions"][1]["cost_interval"][1] is None
    assert run(*slow) == 0
    printed = capfd.readouterr().out
    assert " up to " in printed
    assert " at least " in printed


@pytest.mark.parametrize("device", ["v100", "a100"])
def test_saving_of_half_precision_is_that_of_its_own_plan(planned: Planned, device: str) -> None:
    job = ("plan", "--params", "25M", "--flops", "24G", "--batch", "128", "--devices", "8", "--device", device)
    half = {"v100": "fp16", "a100": "bf16"}[device]
    full, lower = planned(*job, "--precision", "fp32"), planned(*job, "--precision", half)
    step, shorter = (plan["predictions"][-1]["step_s"] for plan in (full, lower))
    assert full["effects"]["savings"][f"{half} precision"] == pytest.approx(1 - shorter / step)
    assert f"{half} precision" not in lower["effects"]["savings"]


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--params", "360M"), None),
        (("--params", "6B"), "sharded optimizer"),
        (("--params", "1B", "--memory", "110G"), "2 micro-batches"),
        (("--params", "5B", "--memory", "140G"), "sharded optimizer, 2 micro-batches"),
        (("--params", "2B", "--memory", "900G"), "checkpointed activations"),
        (("--params", "70B"), "needs FSDP2"),
    ],
)
def test_replica_that_does_not_fit_has_a_remedy(planned: Planned, options: tuple[str, ...], remedy: str | None) -> None:
    job = ("plan", *options, "--samples-per-second", "1", "--device", "a100", "--batch", "8", "--devices", "1,8")
    row = planned(*job, "--price", "2", "--samples", "1M")["predictions"][-1]
    assert (row["remedy"], row["fits"]) == (remedy, remedy is None)
    assert (row["cost"] is None) == (remedy == "needs FSDP2"), "what cannot run has no price"


def summary(folder: Path, *advice: dict[str, Any]) -> str:
    """Write the summary of a profile of two ranks."""
    plan = {
        **{"ranks": 2, "hosts": 1, "device": "cpu", "cores": 2, "busy_cores": 1, "samples": 16, "micro_batches": 1},
        **{"forward_s": 0.1, "layers": [[0.1, 4_000_000]] * 2, "optimizer_s": 0.02, "other_s": 0.01, "bubble_s": 0.03},
        **{"communication_s": 0.04, "jitter": 0.2, "bucket_bytes": [4_000_000] * 2, "reduces_in_backward": False},
        "all_reduces": [[4_000_000, 0.04]] * 2,
    }
    text = {"plan": plan, "headline": "Rank 1 is slow.", "advice": advice, "memory": {"peak": 5}}
    (folder / "summary.json").write_text(json.dumps(text))
    return str(folder)


def test_profile_repeats_its_verdict_and_is_certain_where_it_measured(
    planned: Planned, run: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("plan", summary(tmp_path), "--devices", "8") == 0
    assert "Profile of 2 ranks: Rank 1 is slow." in capfd.readouterr().out
    _, two, *_, eight = planned("plan", str(tmp_path), "--devices", "8")["predictions"]
    assert two["interval"][1] - two["interval"][0] < 0.1 < eight["interval"][1] - eight["interval"][0]
    elsewhere = planned("plan", str(tmp_path), "--devices", "2", "--links", "1gbit-tcp", "--hosts-of", "1")
    _, two = elsewhere["predictions"]
    assert two["interval"][1] - two["interval"][0] > 0.1, "other links were not profiled"


LOAD = {"kind": "host-load", "text": "Profile again", "reason": "rank 1 had no core", "gain": 0.8}


def test_profile_with_too_few_steps_is_refused(refusal: Any, tmp_path: Path) -> None:
    file = Path(summary(tmp_path), "summary.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"provisional": True}))
    assert "it has too few steps for a verdict; profile more steps" in refusal("plan", str(tmp_path))


def test_profile_is_not_taken_for_another_device(refusal: Any, tmp_path: Path) -> None:
    options = ("--device", "h100", "--links", "nvlink4,400gbit")
    assert "the job was profiled on cpu, which is not h100" in refusal("plan", summary(tmp_path), *options)


def test_profile_of_a_busy_host_is_refused(refusal: Any, tmp_path: Path) -> None:
    message = "the profile of 2 ranks is unreliable: rank 1 had no core; Profile again"
    assert message in refusal("plan", summary(tmp_path, LOAD), "--devices", "8")


def test_json_of_a_busy_host_has_exit_code_2(run: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("plan", summary(tmp_path, LOAD), "--json") == 2
    assert list(json.loads(capfd.readouterr().out)["unreliable"]) == ["2 ranks"]


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
        ((), "the job: --params, --batch, --device, --samples-per-second (measured on one device) or --flops missing"),
        (("--samples-per-second", "10"), "--samples-per-second has measured what --flops estimates; omit --flops"),
        (("--family", "gan"), "--family must be convnet or transformer, not 'gan'"),
        (("--device", "v100", "--precision", "bf16"), "v100 does not compute in bf16; give fp32 or fp16"),
        (("--price", "2.5Euro"), "--price=2.5Euro is not a price; write it as in 2.5 or 2.5USD"),
        (("--memory", "1G"), "--memory=1G is less than the 2,880,000,000 bytes of weights and gradients"),
        (("--params", ""), "--params= is not a positive number"),
        (("--device", "abacus"), "unknown device 'abacus'; known devices: "),
        (("--params", "many"), "--params=many is not a positive number; write it as in 360M"),
        (("--precision", "int8"), "--precision must be fp32, tf32, bf16 or fp16, not 'int8'"),
        (("--devices", "8", "--hosts-of", "16"), "--devices 8 is less than the 16 devices of one host"),
        (("--devices", "1,x"), "--devices=1,x must be a number from 1 to 1,048,576, or a list"),
        (("--links", "100gbit,nvlink4"), "'100gbit' connects hosts, not devices"),
        (("--links", "nvlink3"), "contradicts --device h100, which has nvlink4"),
        (("--price", "-1"), "--price=-1 is not a price"),
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
    return look_ahead(Plan(job, ReplicaMemory(1, 1, 1)), [1, 8, 64, 512], None, None, partial(goodput, save_s=30.0))


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


def test_json_is_described(planned: Planned, tmp_path: Path) -> None:
    described = planned(*DESCRIBED, "--precision", "fp32", "--price", "2", "--samples", "1M", "--devices", "8")
    profiled = planned("plan", summary(tmp_path), "--devices", "2")
    check("paceline plan --json", described, profiled | {"unreliable": {"2 ranks": "busy"}}, document(outlook()))


def test_plan_without_a_noise_scale_omits_batches() -> None:
    plan = outlook(None)
    assert (document(plan)["critical_batch"], document(plan)["trainings"]) == (None, [])
    assert "knee" not in "\n".join(notes(plan))


@pytest.mark.parametrize("option", ["--failure-rate", "--save-seconds", "--restart-seconds"])
def test_impossible_failure_rates_are_refused(option: str, refusal: Any) -> None:
    job = ["--params", "360M", "--flops", "4.4T", "--device", "h100", "--batch", "8"]
    assert f"{option}=-1 is not a positive number" in refusal("plan", *job, f"{option}=-1")
