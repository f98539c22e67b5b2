"""Reports of runs with known figures: the verdict, the advice with its predictions, and the code that it shows."""

from __future__ import annotations

import ast
import inspect
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
import paceline.data
from insides import (
    Facts,
    GradientNorms,
    NoiseScale,
    OperatorTable,
    Report,
    advice,
    step_breakdown,
    step_parts,
    summary,
    tabulate,
)
from paceline.optim import DiLoCo
from profile_records import Timing, kinds, records, the, usual, verdict

JITTER = random.Random(0)


def jittered(timing: Timing = usual) -> Timing:
    def timed(rank: int, step: int) -> dict[str, float]:
        return {name: value * JITTER.gauss(1, 0.02) for name, value in (usual(rank, step) | timing(rank, step)).items()}

    return timed


def report(operators: OperatorTable | None = None, **options: Any) -> Report:
    options["timing"] = jittered(options.get("timing", usual))
    return verdict(records(**options), operators)


def test_sleeping_rank_is_named_with_its_phase_and_the_wait_of_the_others() -> None:
    result = report(ranks=4, timing=lambda rank, _: {"forward": 0.04 if rank == 2 else 0.01})
    figures = summary(result)
    assert figures["straggler_rank"] == 2
    assert result.facts.stragglers[0].phase == "forward"
    assert result.facts.stragglers[0].seconds == pytest.approx(0.03, rel=0.1)
    assert figures["bubble_ms_per_step"]["0"] == pytest.approx(30, abs=3)
    assert figures["bubble_ms_per_step"]["2"] == pytest.approx(0, abs=1)
    assert figures["advice"][0]["kind"] == "straggler"
    assert "Rank 2 slows the others down: its forward" in result.headline


def test_rank_with_fewer_cores_is_reported() -> None:
    made = records(2, timing=jittered(lambda rank, _: {"backward": 0.02 + 0.02 * rank}))
    made[1] = replace(made[1], cores=1)
    result = verdict(made)
    assert result.advice[0].kind == "straggler"
    assert "it has 1 cores and the others 2: give it the same number" in result.advice[0].text


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_clean_run_has_no_straggler(ranks: int) -> None:
    assert summary(report(ranks=ranks))["straggler_rank"] is None


def test_rank_that_causes_all_waiting_is_probably_slow() -> None:
    """With few steps, the text contradicted itself: «no rank is always the last: rank 1 causes most, 100 % of it»."""
    short = {"data": 0.0, "backward": 0.002, "optimizer": 0.0004}
    result = report(steps=40, timing=lambda rank, _: short | {"forward": 0.008 if rank == 1 else 0.002})
    assert not result.facts.stragglers, "slow for less than a second"
    assert "Rank 1 is probably slow; profile longer to make sure: others wait for " in result.headline
    balance = the("balance", result)
    assert "and is probably slow" in balance.reason
    assert "always the last" not in balance.reason


def test_short_operators_lead_to_larger_batches() -> None:
    short = OperatorTable(calls=1000, seconds=0.004)
    result = report(operators=short, timing=lambda *_: {"forward": 0.002, "backward": 0.004, "optimizer": 0.0005})
    assert result.advice[0].kind == "larger-batch"
    assert "64 rows per rank, not 32" in result.advice[0].text
    long = OperatorTable(calls=100, seconds=0.02)
    assert "larger-batch" not in kinds(report(operators=long))


@pytest.mark.parametrize(
    ("kind", "part", "headline"),
    [("checkpoints", "checkpoint", "Saving checkpoints takes "), ("own-code", "gap", "Rank 0 slows the others down: ")],
)
def test_advice_that_preserves_the_training_precedes_larger_batches(kind: str, part: str, headline: str) -> None:
    """A manual save on rank 0 was listed after «take larger batches», which save more but change the training."""

    def timing(rank: int, step: int) -> dict[str, float]:
        saved = 0.05 * (step % 5 == 0 and (rank == 0 or part == "checkpoint"))
        return {"forward": 0.008, "backward": 0.016, "optimizer": 0.001, part: saved}

    short = OperatorTable(calls=1000, seconds=0.003)
    made = records(timing=jittered(timing), steps=150, travel=0.001)
    if kind == "own-code":
        made[0].own_code = {"save() (train.py:8)": 100}
    result = verdict(made, short)
    first, larger = the(kind, result), the("larger-batch", result)
    assert result.advice[0] is first, [(advice.kind, advice.gain) for advice in result.advice]
    assert first.gain < larger.gain
    assert result.headline.startswith(headline)


def test_accumulation_reduces_the_all_reduce_share_as_predicted() -> None:
    first = Facts(records(2, travel=0.04), OperatorTable())
    predicted = first.all_reduce_share(2)

    def doubled(_rank: int, _step: int) -> dict[str, float]:
        return {"forward": 0.02, "backward": 0.04, "data": 0.002}

    second = Facts(records(2, travel=0.04, timing=doubled), OperatorTable())
    assert second.all_reduce_share() == pytest.approx(predicted, rel=0.01)
    assert predicted < first.all_reduce_share()


def test_buckets_run_from_launch_to_completion_and_backward_hides_early_ones() -> None:
    made = records(2, buckets=[100, 200, 300, 400], travel=0.004)
    steps = step_breakdown.detailed_steps(made)[0]
    times = step_breakdown.bucket_times(steps, made[0].buckets)
    assert [bucket.nbytes for bucket in times] == [100, 200, 300, 400]
    for bucket in times:
        assert bucket.finished == pytest.approx([launched + 0.001 for launched in bucket.launched])
    assert step_breakdown.reduced_and_hidden(steps, times) == [pytest.approx((0.004, 0.003))] * 2
    assert Facts(made, OperatorTable()).shares[step_parts.COMMUNICATION] * step_breakdown.mean_of(
        step_breakdown.account(made).lengths
    ) == pytest.approx(0.001)


def test_gradient_norms_are_of_the_mean_gradient_per_sample() -> None:
    norms = GradientNorms()
    assert norms.squared() is None
    norms.launched(torch.tensor([3.0]), 2.0)
    norms.averaged(torch.tensor([1.0]))
    assert norms.squared() == (2.25, 1.0)


def test_noise_scale_uses_steps_with_norms_from_all_ranks() -> None:
    made = records(3, 12)
    for step in (step for record in made for step in record.steps):
        step.norms = (3.0, 2.0)
    made[0].steps[5].norms, made[1].steps[5].norms = None, (1000.0, 1.0)
    assert Facts(made, OperatorTable()).noise_scale == NoiseScale(96.0, 32.0)


def event(name: str, ts: float, dur: float, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1}


def test_operators_are_counted_without_nested_calls() -> None:
    table = tabulate([([event("linear", 0, 10), event("addmm", 2, 6), event("relu", 20, 4)], 2)])
    assert {operator.name: (operator.calls, round(operator.seconds * 1e6, 6)) for operator in table.operators} == {
        "addmm": (0.5, 3.0),
        "linear": (0.5, 2.0),
        "relu": (0.5, 2.0),
    }
    assert table.device_figures == {}
    kernel = {"est. achieved occupancy %": 50, "blocks per SM": 0.5}
    gpu = tabulate(
        [
            (
                [
                    event("sm90_gemm", 0, 10, "kernel") | {"args": kernel},
                    event("relu_kernel", 30, 10, "kernel") | {"args": kernel},
                    event("aten::mm", -50, 55),  # before the first kernel, and overlapping it
                    event("aten::relu", 8, 14),
                    event("cudaLaunchKernel", 20, 6, "cuda_runtime"),
                ],
                1,
            )
        ]
    )
    assert gpu.device_figures == pytest.approx(
        {"utilization": 0.5, "host": 0.4, "sm_efficiency": 0.25, "occupancy": 0.5, "tensor_cores": 0.5}
    )
    assert [operator.name for operator in gpu.operators] == ["sm90_gemm", "relu_kernel"]


def test_dataset_operators_do_not_count_for_the_model() -> None:
    """A dataset that makes a tensor per sample caused the advice «take larger batches» for a compute-bound model."""

    phases = [event("data wait", 0, 100), event("forward", 100, 50), event("backward", 170, 80)]
    phases = [phase | {"cat": "user_annotation"} for phase in phases]
    samples = [event("aten::full", at, 1) for at in range(100)]
    model = [event("aten::addmm", 105, 30), event("aten::mul", 155, 3), event("aten::mm", 180, 60)]
    table = tabulate([([*phases, *samples, *model, event("aten::_fused_adamw_", 260, 90)], 1)])
    assert table.calls == 3
    assert table.seconds == pytest.approx(93e-6)
    assert table.computing == 1, "31 µs each"
    assert {operator.name: operator.calls for operator in table.operators}["aten::full"] == 100, "included in the table"
    without = tabulate([([*samples, *model], 1)])
    assert without.calls == 103, "scripts with unrecorded forwards"
    assert without.computing == pytest.approx(193 / 103 / 15)


def test_summary_without_steps_is_valid_json() -> None:
    for steps in (0, 3, 4, 40):
        text = json.dumps(summary(report(steps=steps)), allow_nan=False)
        assert json.loads(text)["steps"] == max(0, steps - 3)


# -- code shown in advice uses existing parameters of the called functions ---------------------------------------------


MODEL = paceline.DistributedDataParallel
NAMES = {"paceline": paceline, "torch": torch, "model": MODEL, "Checkpointer": paceline.Checkpointer, "DiLoCo": DiLoCo}
CALL, SETTING = re.compile(r"([A-Za-z][\w.]*)\(([^()]*)\)"), re.compile(r"\b([a-z_]+)=")
SETTABLE: Any = (MODEL, paceline.data.DataLoader, torch.utils.data.DataLoader, paceline.Checkpointer, DiLoCo)


def texts() -> Iterator[str]:
    """Yield the text of each piece of advice, with 1 for each value."""
    for node in ast.walk(ast.parse(Path(advice.__file__).read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def check(name: str, arguments: str) -> None:
    """Raise if the function does not accept these arguments; an ellipsis stands for others."""
    first, *attributes = name.split(".")
    function: Any = NAMES[first]
    for attribute in attributes:
        function = getattr(function, attribute)
    call = ast.parse(f"f({arguments.replace('…', 'None')})", mode="eval").body
    assert isinstance(call, ast.Call)
    bound = [MODEL] if first == "model" else []  # bound to the method's self
    signature = inspect.signature(function)
    signature.bind_partial(*bound, *call.args, **{word.arg or "": word.value for word in call.keywords})
    variables = {word.id for word in call.args if isinstance(word, ast.Name)} - {"model"}
    assert variables <= signature.parameters.keys(), f"{name}({arguments})"


def test_code_in_advice_matches_the_signatures_it_calls() -> None:
    """Advice showed ``paceline.accumulate(model, batches, steps)``, but the parameter is called ``every``."""
    calls = [match for text in texts() for match in CALL.findall(text) if match[0].split(".")[0] in NAMES]
    for name, arguments in calls:
        check(name, arguments)
    assert {name for name, _ in calls} >= {"paceline.accumulate", "model.no_sync", "Checkpointer", "torch.autocast"}
    known = {name for function in SETTABLE for name in inspect.signature(function).parameters}
    settings = {name for text in texts() for name in SETTING.findall(CALL.sub("", text))}
    assert {"num_workers", "bucket_cap_mb"} <= settings <= known, settings - known
