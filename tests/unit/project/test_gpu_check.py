"""The script that checks a machine with GPUs, as far as it can be tried without one.

Every check runs here on CPU ranks at tiny sizes, so that no mistake in the script itself is left for the first hour on
a GPU. That a check finds what it is for is shown where it can be: by leaving out a wait, and by checks that fail.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import gpu_check
import pytest
import torch
from gpu_checks import children, screen
from gpu_checks.catalogue import CHECKS, PARTS, Check, Ranks, chosen
from gpu_checks.lateness import Fault
from gpu_checks.models import SMOLLM2_360M, Llama, ResNet
from gpu_checks.rows import NotRun, Place, Row, Verdict, holds, measured, not_run
from gpu_checks.screen import Result
from gpu_checks.stand_in import expected_weights, late_weights
from gpu_checks.wrapping import difference

import gpu_faults
from paceline.core.processes.world import World
from processes import gone_after
from twins import Pools

CPU = children.Setting(on_gpu=False, gpus=0, rounds=1)


def place_of(world: World) -> Place:
    return Place(world.rank, world.size, torch.device("cpu"), rounds=1)


def tried(world: World, path: str) -> list[Row]:
    try:
        return list(check_at(path).run(place_of(world)))
    except NotRun as reason:
        return [not_run(path, str(reason))]


def check_at(path: str) -> Check:
    return next(check for check in CHECKS if check.path == path)


# Each function once: ranks that share a GPU and ranks that have one each run the same.
TIMED = {"smollm2-2k", "smollm2-16k", "resnet-32", "resnet-256", "mlp", "host-bound", "host"}
MEASURED_ONLY = TIMED | {"overlap", "kernels", "peak"}
SEVERAL = [check for check in CHECKS if check.ranks is Ranks.SEVERAL and check.joined and check.name not in TIMED]
ONE = [check for check in CHECKS if check.ranks is Ranks.ONE and check.joined]
ON_TWO = {check.run for check in SEVERAL}
CASES = [(2, check.path) for check in SEVERAL] + [(1, check.path) for check in ONE if check.run not in ON_TWO]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "path"), CASES, ids=[path for _, path in CASES])
def test_every_check_runs_and_holds_on_cpu_ranks(pools: Pools, size: int, path: str) -> None:
    for rows in pools.run(size, tried, path):
        verdicts = {row.verdict for row in rows}
        assert Verdict.FAILED not in verdicts, rows
        is_measured_only = path.rpartition("/")[2] in MEASURED_ONLY
        assert rows
        assert is_measured_only or verdicts & {Verdict.OK, Verdict.NOT_RUN}, f"it judges nothing: {rows}"


def test_the_functions_of_ranks_that_share_a_gpu_are_those_of_several() -> None:
    several = {check.run for check in CHECKS if check.ranks is Ranks.SEVERAL}
    assert {check.run for check in CHECKS if check.ranks is Ranks.SHARED} <= several


def reads_too_early(world: World) -> tuple[float, float]:
    place = place_of(world)
    expected = expected_weights(place, 0.2)
    errors = [
        difference([late_weights(place, 0.1, stand_in=True, side=False, fault=fault)], [expected])
        for fault in (Fault.NONE, Fault.READ)
    ]
    return errors[0], errors[1]


def test_the_stand_in_notices_an_average_that_is_read_without_waiting(pools: Pools) -> None:
    """Negative control of the check that stands for NCCL: it must fail if the reducer does not wait."""
    right, wrong = pools.run(1, reads_too_early)[0]
    assert right < 1e-5
    assert wrong > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seconds", "says"),
    [
        ("crash", 30, "died of SIGABRT"),
        ("hang", 5, "was not at its end after"),
        ("one-rank", 30, "rank 1: ArithmeticError: on rank 1"),
        ("differs", 30, "rank 1: 1"),
    ],
)
def test_a_check_that_goes_wrong_ends_alone_and_says_how(
    monkeypatch: pytest.MonkeyPatch, name: str, seconds: float, says: str
) -> None:
    """Each once took the rest of the run with it: whatever else ran in the same process, and its ranks' peers."""
    rows, log = run_fault(monkeypatch, name, seconds)
    assert rows[0] == Row("a line before", "", Verdict.OK), "what was known before is kept"
    assert [row.verdict for row in rows[1:]] == [Verdict.FAILED]
    assert says in rows[1].value
    assert "gpu_faults.py" in log or name == "differs", "the log has the stack"
    if name == "hang":  # torch.compile starts compilers, which must not be left, with their GPU memory; nor at Ctrl-C
        [started] = re.findall(r"^started (\d+)$", log, re.MULTILINE)
        gone_after([int(started)], 60)


def run_fault(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float = 30) -> tuple[list[Row], str]:
    monkeypatch.setattr(children, "GRACE_S", 0.5)
    monkeypatch.setattr(children, "KILL_AFTER_S", 5.0)
    check = next(check for check in gpu_faults.CHECKS if check.name == name)
    began = time.monotonic()
    answer = children.run(check, children.Setting(False, 0, 1, "gpu_faults"), seconds)
    assert time.monotonic() - began < seconds + 60
    return answer


def test_a_check_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, log = run_fault(monkeypatch, "unable")
    assert rows[1] == Row("unable", "because triton is not installed", Verdict.NOT_RUN)
    assert log == ""


def test_a_world_starts_and_ends_in_ranks_of_its_own() -> None:
    for path in ("one/start", "several/leave"):
        rows, log = children.run(check_at(path), CPU, 60)
        assert {row.verdict for row in rows} == {Verdict.OK}, f"{rows}\n{log}"


def test_ctrl_c_prints_what_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(check: Check, setting: children.Setting, seconds: float) -> tuple[list[Row], str]:
        if check.name == "checkpoint":
            raise KeyboardInterrupt
        return [holds(check.name, "", True)], ""

    monkeypatch.setattr(children, "run", run)
    file = tmp_path / "result.json"
    assert gpu_check.main(["--cpu", "--part", "one/check-finite", "one/checkpoint", "--json", str(file)]) == 130
    out, err = capsys.readouterr()
    assert "one/check-finite" in err
    assert "ok       check-finite" in out
    assert "because the run was interrupted" in out
    verdicts = [result["rows"][0]["verdict"] for result in json.loads(file.read_text())["results"]]
    assert verdicts == ["ok", "not run"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no CUDA GPU" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--part", "nonsense"], "no part or check is named nonsense"),
        (["--part", "one/nonsense"], "no part or check is named one/nonsense"),
        (["--rounds", "0"], "--rounds 0"),
        (["--json", "/no/such/folder/result.json"], "there is no folder"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        gpu_check.main(["--cpu", *arguments])
    assert refused.value.code == 2
    assert says in capsys.readouterr().err


def test_list_shows_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(check.path in out for check in CHECKS)
    assert all(f"{part}: {title}" in out for part, title in PARTS.items())


def test_parts_are_chosen_by_their_names_and_by_those_of_single_checks() -> None:
    assert [check.path for check in chosen(["memory", "share/abort"])] == ["share/abort", "memory/peak"]
    assert chosen([]) == list(CHECKS)
    assert len({check.path for check in CHECKS}) == len(CHECKS)


def test_several_gpus_are_asked_for_where_there_is_one() -> None:
    rows, _ = children.run(check_at("several/equality"), children.Setting(on_gpu=True, gpus=1, rounds=1), 10)
    assert [row.verdict for row in rows] == [Verdict.NOT_RUN]
    assert "one GPU" in rows[0].value


def test_the_screen_has_versions_verdicts_ratios_and_remedies() -> None:
    results = [
        Result(check_at("one/equality"), [holds("weights differ by", "1.0e+00", False)], 3.0),
        Result(
            check_at("speed/mlp"), [measured("MLP: paceline", "1.00 ms; torch views / this = 1.100", ratio=1.1)], 4.0
        ),
    ]
    text = screen.report(results, screen.facts(on_gpu=False), 7.0)
    for part in (torch.__version__, "NCCL", "driver", "1 FAILED", "torch views / this = 1.100", "--part one/equality"):
        assert str(part) in text
    assert check_at("one/equality").remedy in text
    assert max(map(len, text.splitlines())) <= 140
    written = json.loads(json.dumps([result.as_json() for result in results]))
    assert written[1]["rows"][0]["numbers"] == {"ratio": 1.1}
    assert [row["remedy"] == "" for result in written for row in result["rows"]] == [False, True]


def test_the_models_have_the_parameters_of_the_published_ones() -> None:
    with torch.device("meta"):
        sizes = [[p.numel() for p in model.parameters()] for model in (Llama(SMOLLM2_360M), ResNet())]
    assert [sum(size) for size in sizes] == [361_821_120, 25_557_032]
    assert [len(size) for size in sizes] == [290, 161]
