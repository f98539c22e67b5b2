"""Profiles of LocalSGD and DiLoCo, whose ranks wait for outer steps in one of many steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from insides import Islands, page, plan_of, read_facts
from paceline import DistributedDataParallel, World
from paceline.optim import LocalSGD
from paceline.profiler import profile
from profile_records import Timing, kinds, records, the, verdict
from ranks import Pools


def outer_step(every: int, seconds: float, late: float = 0.0) -> Timing:
    """Return steps of 38.5 ms, with outer steps at regular intervals; rank 1 arrives `late` at each outer step."""

    def timing(rank: int, step: int) -> dict[str, float]:
        is_outer = (step + 1) % every == 0
        return {"outer": seconds, "optimizer": 0.004 + late * rank} if is_outer else {}

    return timing


def test_rare_wait_is_reported_with_its_mean_cost() -> None:
    report = verdict(records(2, 43, outer_step(8, 0.077)))  # 40 measured steps
    outer = report.facts.outer_steps
    assert (outer.every, outer.wait_s, outer.exchange_s) == pytest.approx((8, 0.077 / 8, 0.077 / 8))
    assert report.facts.outer_note.startswith(
        "Outer step: a wait of 77.0 ms every 8 steps, which is 9.6 ms per step on average (20%)"
    )
    assert report.headline == "The wait for outer steps takes 20% of the time."
    assert kinds(report) == ["outer-steps"], "accumulating batches would not make it rarer"
    advice = the("outer-steps", report)
    assert "DiLoCo(…, delay=2)" in advice.text, "two steps of 38.5 ms hide 77 ms"
    assert "the sync_every, which saves 10%" in advice.text
    assert "77.0 ms every 8 steps, which is 9.6 ms per step on average" in advice.reason
    assert advice.gain == pytest.approx(0.0770 / 8 / (0.0385 + 0.077 / 8))


def test_wait_for_an_outer_step_in_every_step_cannot_be_hidden() -> None:
    report = verdict(records(2, 43, outer_step(1, 0.0385)))
    assert the("outer-steps", report).text.startswith('Send less: compress="int8", or twice the sync_every')
    assert the("outer-steps", report).gain == pytest.approx(1 / 4)


def test_late_rank_is_not_blamed_on_the_network() -> None:
    report = verdict(records(2, 43, outer_step(8, 0.001, late=0.1)))
    outer = report.facts.outer_steps
    assert (outer.wait_s, outer.exchange_s) == pytest.approx(((0.101 + 0.001) / 2 / 8, 0.001 / 8))
    assert report.facts.accounts.waited_for[0][1] == pytest.approx(0.1 / 8)
    assert "outer-steps" not in kinds(report)


def test_page_draws_a_step_with_an_outer_step_and_plans_ignore_the_profile() -> None:
    report = verdict(records(2, 43, outer_step(32, 0.077)))  # after the steps that are recorded in detail
    text = page(report)
    assert "Step 31, one with an outer step." in text
    assert '"outer step",' in text
    assert report.facts.outer_note in text
    assert plan_of(report.facts) is None
    usual = verdict(records(2, 43))
    assert (usual.facts.outer_steps, usual.facts.outer_note) == (None, "")
    assert "the median of the steps recorded in detail" in page(usual)


def apart(world: World, folder: Path) -> None:
    net = nn.Linear(64, 64)
    inside = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("between", "inside"))["inside"]
    model = DistributedDataParallel(net, device_mesh=inside)
    optimizer = LocalSGD(model, torch.optim.SGD(net.parameters(), lr=0.01), 4)
    mean = Islands._mean

    def slow_mean(*args: Any) -> Any:
        time.sleep(0.05)
        return mean(*args)

    with pytest.MonkeyPatch.context() as patch, profile(folder, operators=False):
        patch.setattr(Islands, "_mean", slow_mean)
        for _ in range(27):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_of_an_island_wait_in_the_outer_step(pools: Pools, tmp_path: Path, ranks: int) -> None:
    pools.run(ranks, apart, tmp_path)
    facts = read_facts(tmp_path)
    assert len(facts.records) == ranks
    for record in facts.records:
        waits = [step.outer_wait for step in record.steps]
        assert [number for number, seconds in enumerate(waits) if seconds > 0.02] == [3, 7, 11, 15, 19, 23]
        assert len([seconds for seconds in waits if seconds]) == 6
    assert json.loads((tmp_path / "summary.json").read_text())["outer_steps"]["every"] == 4
    assert facts.outer_steps.exchange_s > 0.05 / 4 / 2
