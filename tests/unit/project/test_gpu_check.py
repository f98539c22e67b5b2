"""The GPU machine check, as far as it can be tested without a GPU.

Every check runs here on CPU ranks at tiny sizes, so that bugs in the script itself do not waste time on a GPU. One
check, the stand-in's, is shown to fail if a wait is left out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_checks import children
from gpu_checks.catalogue import CHECKS, Check, Ranks
from gpu_checks.lateness import Fault
from gpu_checks.rows import NotRun, Place, Row, Verdict, holds, not_run
from gpu_checks.stand_in import expected_weights, late_weights
from gpu_checks.wrapping import difference

from paceline import World
from twins import Pools


def place_of(world: World, folder: Path) -> Place:
    return Place(world.rank, world.size, torch.device("cpu"), folder)


def tried(world: World, path: str, folder: Path) -> list[Row]:
    try:
        return list(check_at(path).run(place_of(world, folder)))
    except NotRun as reason:
        return [not_run(path, str(reason))]


def check_at(path: str) -> Check:
    return next(check for check in CHECKS if check.path == path)


# Each function once, because ranks that share a GPU run the same functions as ranks with one GPU each.
TIMED = {"smollm2-2k", "smollm2-16k", "resnet-32", "resnet-256", "mlp", "host-bound", "host"}
MEASURED_ONLY = TIMED | {"overlap", "kernels", "peak"}
SEVERAL = [check for check in CHECKS if check.ranks is Ranks.SEVERAL and check.joined and check.name not in TIMED]
ONE = [check for check in CHECKS if check.ranks is Ranks.ONE and check.joined]
ON_TWO = {check.run for check in SEVERAL}
CASES = [(2, check.path) for check in SEVERAL] + [(1, check.path) for check in ONE if check.run not in ON_TWO]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "path"), CASES, ids=[path for _, path in CASES])
def test_every_check_passes_on_cpu_ranks(pools: Pools, tmp_path: Path, size: int, path: str) -> None:
    for rows in pools.run(size, tried, path, tmp_path):
        verdicts = {row.verdict for row in rows}
        assert Verdict.FAILED not in verdicts, rows
        is_measured_only = path.rpartition("/")[2] in MEASURED_ONLY
        assert rows
        assert is_measured_only or verdicts & {Verdict.OK, Verdict.NOT_RUN}, f"it judges nothing: {rows}"


def reads_too_early(world: World, folder: Path) -> tuple[float, float]:
    place = place_of(world, folder)
    expected = expected_weights(place, 0.2)
    errors = [
        difference([late_weights(place, 0.1, stand_in=True, side=False, fault=fault)], [expected])
        for fault in (Fault.NONE, Fault.READ)
    ]
    return errors[0], errors[1]


def test_the_stand_in_detects_an_average_read_without_waiting(pools: Pools, tmp_path: Path) -> None:
    """Negative control: the check that stands in for NCCL must fail if the reducer does not wait."""
    right, wrong = pools.run(1, reads_too_early, tmp_path)[0]
    assert right < 1e-5
    assert wrong > 1e-3


def test_a_world_starts_and_ends_in_separate_ranks() -> None:
    for path in ("one/start", "several/leave"):
        rows, log = children.run(check_at(path), on_gpu=False)
        assert {row.verdict for row in rows} == {Verdict.OK}, f"{rows}\n{log}"


def test_a_failure_on_another_rank_is_shown() -> None:
    right, wrong = (holds("every rank raises", "", ok) for ok in (True, False))
    process: Any = SimpleNamespace(exitcode=0)
    ranks = [children.RankProcess(process, process, Path(), [row], is_complete=True) for row in (right, wrong)]
    assert children.merged(check_at("share/abort"), ranks, 1.0) == [right, replace(wrong, value="rank 1: ")]
