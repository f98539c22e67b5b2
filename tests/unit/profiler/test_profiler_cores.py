"""The verdict where ranks lack cores, where they are all taken, and where too few steps were measured."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.core.processes.world import World
from paceline.profiler.analysis.analyze import report_of, summary
from paceline.profiler.analysis.metrics import Facts
from paceline.profiler.analysis.operator_table import OperatorTable
from paceline.profiler.page import page
from paceline.profiler.recording.host_load import quota
from paceline.profiler.records.core_use import load_of, neighbours
from paceline.profiler.records.rank_file import RankRecord, read_ranks
from paceline.profiler.report.report import Advice, Report
from paceline.profiler.report.report_file import report_from_json
from paceline.tools.profile.terminal_summary import print_summary
from processes import paceline as command
from profile_records import records
from ranks import run_ranks


def verdict(made: list[RankRecord]) -> Report:
    return report_of(Facts(made, OperatorTable()))


def the(kind: str, report: Report) -> Advice:
    return next(one for one in report.advice if one.kind == kind)


def kinds(report: Report) -> list[str]:
    return [one.kind for one in report.advice]


def late_in_turns(rank: int, step: int) -> dict[str, float]:
    late = random.Random(100 * step + rank).expovariate(1 / 0.02)
    return {"forward": 0.01 + late, "delayed": late}


# -- too few steps ----------------------------------------------------------------------------------------------------


def test_a_verdict_on_few_steps_says_that_it_is_provisional_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps of a clean job, of which one had a slow batch, gave «the loop waits for data», as a firm verdict."""
    found = verdict(records(2, 6, lambda *_: {"data": 0.05}))
    assert found.headline.startswith("Provisional, as 3 steps are too few to tell: profile 20. The loop waits for data")
    assert found.advice
    assert not any(one.is_firm for one in found.advice)
    figures = summary(found)
    assert figures["provisional"]
    assert not any(one["firm"] for one in figures["advice"])
    print_summary(found)
    shown = capsys.readouterr().out
    assert "(may save 57%, provisional)" in shown
    assert ", predicted" not in shown
    assert "less time for a sample, provisional: too few steps" in page(found)
    assert report_from_json(json.loads(json.dumps(found.to_json()))).advice == found.advice


@pytest.mark.parametrize(("steps", "is_firm"), [(19, False), (20, True)])
def test_twenty_steps_are_enough(steps: int, is_firm: bool) -> None:
    found = verdict(records(2, 3 + steps, lambda *_: {"data": 0.05}))
    assert found.headline.startswith("The loop waits" if is_firm else "Provisional, as 19 steps are too few to tell")
    assert {one.is_firm for one in found.advice} == {is_firm}
    assert summary(found)["provisional"] is not is_firm


def test_short_steps_are_to_be_profiled_for_as_long_as_a_straggler_takes_to_show() -> None:
    short = {"data": 0.004, "forward": 0.0005, "backward": 0.001, "optimizer": 0.0005}
    assert "4 ms" not in verdict(records(1, 4, lambda *_: short, 0.001)).headline
    assert "1 step is too few to tell: profile 140." in verdict(records(1, 4, lambda *_: short, 0.001)).headline


# -- own competition --------------------------------------------------------------------------------------------------


def shared(ranks: int, cores: int, busy: float, own: float, **fields: Any) -> list[RankRecord]:
    taken: dict[str, Any] = {"cores": cores, "core_numbers": list(range(cores)), "busy_cores": busy, "own_cores": own}
    return records(ranks, 80, late_in_turns, **taken | fields)


def test_ranks_that_compete_with_each_other_are_told_so_with_the_remedy() -> None:
    """They were put down to other programs, or to communication."""
    found = verdict(shared(4, 2, 2.0, 0.49))
    assert found.headline.startswith(
        "The ranks hold each other up: 4 ranks with 1 thread each share 2 cores, and rank "
    )
    assert "other programs" not in found.headline
    assert kinds(found) == ["threads"]
    assert found.advice[0].text == "Start 2 ranks on these cores, with the batches of all 4"
    assert 0 < found.advice[0].gain < 0.1, "two ranks have the same work: only communication and optimizer are spared"
    idle = verdict(shared(4, 2, 1.6, 0.4))
    assert idle.advice[0].gain > found.advice[0].gain


def test_threads_beyond_the_cores_are_own_competition_too() -> None:
    found = verdict(shared(2, 2, 2.0, 0.98, threads=2))
    assert found.headline.startswith("The ranks hold each other up: 2 ranks with 2 threads each share 2 cores")
    assert "OMP_NUM_THREADS=1" in the("threads", found).text


def test_a_rank_alone_may_have_more_threads_than_its_quota() -> None:
    found = verdict(shared(1, 64, 2.0, 1.9, threads=64, quota=2.0))
    assert "a rank with 64 threads has 2 cores" in found.headline
    assert "OMP_NUM_THREADS=2" in the("threads", found).text


def test_other_programs_and_own_competition_are_both_told_with_their_shares() -> None:
    found = verdict(shared(4, 2, 2.0, 0.25))
    load = Facts(shared(4, 2, 2.0, 0.25), OperatorTable()).load
    assert load is not None
    assert load.others == pytest.approx(1.0)
    assert load.of_ranks + load.of_others == pytest.approx(load.share)
    assert found.headline.startswith("Other programs hold the ranks up, and these each other: rank ")
    assert f"for {load.of_others:.0%} of its time because of other programs" in found.headline
    assert f"and for {load.of_ranks:.0%} because 4 ranks with 1 thread each share 2 cores" in found.headline
    assert kinds(found) == ["threads", "host-load"]


def test_two_ranks_on_two_cores_have_nothing_but_other_programs_to_blame() -> None:
    found = verdict(shared(2, 2, 2.0, 0.5))
    assert kinds(found) == ["host-load"]
    assert found.headline.startswith("Other programs hold the ranks up: rank ")


def test_pinned_ranks_have_cores_of_their_own() -> None:
    """Threads of ranks on different cores were added up, and advised to be fewer."""
    made = records(2, 40, cores=1, busy_cores=0.9, own_cores=0.9)
    for rank, record in enumerate(made):
        record.core_numbers = [rank]
    assert "threads" not in kinds(verdict(made))
    assert [len(neighbours(made, rank).records) for rank in range(2)] == [1, 1]
    load = load_of(made, [0.2, 0.1])
    assert load is not None
    assert load.others == 0
    assert not load.is_by_ranks()


def test_a_quota_counts_as_cores() -> None:
    found = verdict(shared(2, 8, 2.0, 0.9, quota=1.0))
    assert "2 ranks with 1 thread each share 1 core, and rank " in found.headline
    assert the("threads", found).text.startswith("Start 1 rank on these cores")


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"job/cpu.max": "150000 100000\n"}, "0::/job\n", 1.5),
        ({"job/cpu.max": "max 100000\n", "cpu.max": "400000 100000\n"}, "0::/job\n", 4.0),
        ({"cpu.max": "200000 100000\n"}, "0::/hosts/path\n", 2.0),
        ({"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/job\n", 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu:/\n0::/\n", None),
        ({}, "4:memory:/job\n", None),
    ],
)
def test_quotas_of_control_groups_are_read(
    files: dict[str, str], own: str, cores: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert quota(tmp_path, tmp_path / "own") == cores


# -- workers ----------------------------------------------------------------------------------------------------------


def loads(seconds: float, on_a_core: float) -> Callable[[list[RankRecord]], list[RankRecord]]:
    def change(made: list[RankRecord]) -> list[RankRecord]:
        for record in made:
            for step in record.steps:
                step.loading = on_a_core * seconds
        return made

    return change


def loader(cores: int, on_a_core: float, busy: float = 1.8, own: float = 0.9, data: float = 0.05) -> Report:
    made = records(2, 40, lambda *_: {"data": data}, cores=cores, busy_cores=busy, own_cores=own)
    return verdict(loads(data, on_a_core)(made))


def test_workers_are_not_advised_where_loading_computes_and_no_core_is_free() -> None:
    """``--try`` gave two ranks four workers each, on two cores that the ranks had taken."""
    advice = the("data-loading", loader(2, 1.0))
    assert "num_workers" not in advice.text
    assert "; workers would not help, because loading computes, and no core is free for it" in advice.text
    assert "cache what loading computes" in advice.text
    assert "2 ranks compute on 2 cores" in advice.reason
    assert not advice.trial
    assert advice.gain == pytest.approx(loader(2, 1.0).shares["data"] / 2)


def test_workers_are_advised_where_cores_are_free_and_no_more_than_these() -> None:
    free = the("data-loading", loader(8, 1.0))
    workers = int(free.trial["num_workers"])
    assert 2 <= workers <= 3
    assert free.gain > 0.4
    some = the("data-loading", loader(4, 1.0))
    assert 1 <= some.trial["num_workers"] <= 2
    assert 0 < some.gain <= free.gain
    taken = the("data-loading", loader(4, 1.0, busy=4.0))
    assert not taken.trial, "others keep the rest busy"
    assert "4 cores, and other programs keep 2.2 of them busy" in taken.reason


def test_workers_that_wait_for_a_disk_need_no_free_core() -> None:
    advice = the("data-loading", loader(2, 0.05, busy=0.9, own=0.45))
    assert advice.trial["num_workers"] >= 2
    assert advice.gain > 0.4
    beside_others = the("data-loading", loader(2, 0.05, busy=2.0, own=0.3))
    assert beside_others.trial["num_workers"] >= 2


def test_more_workers_than_cores_are_explained() -> None:
    advice = the("data-loading", loader(2, 0.02, busy=0.5, own=0.2, data=0.2))
    assert advice.trial["num_workers"] > 2
    assert "more than there are cores, because they wait most of the time" in advice.text


def test_more_workers_do_not_help_those_that_have_taken_all_cores() -> None:
    taken: dict[str, Any] = {"cores": 2, "busy_cores": 2.0, "own_cores": 1.0, "loop_cores": 0.3, "workers": 2}
    made = records(2, 40, lambda *_: {"data": 0.05, "delayed": 0.045}, **taken)
    advice = the("data-loading", verdict(made))
    assert "more workers would not help" in advice.text
    assert not advice.trial


# -- sparse gradients -------------------------------------------------------------------------------------------------

TABLE: dict[str, Any] = {
    "parameters": [("table.weight", 9_000_000), ("out.weight", 1000)],
    "embeddings": ["table.weight"],
}


def test_a_table_whose_rows_were_seen_to_be_zeros_is_told_under_load() -> None:
    """It was left to the load, because communication under load is mostly waiting."""

    def timing(rank: int, step: int) -> dict[str, float]:
        return late_in_turns(rank, step) | {"launch": 0.01}

    taken: dict[str, Any] = {"busy_cores": 2.0, "own_cores": 0.5, "optimizer": "AdamW"}
    made = records(2, 80, timing, 0.01, touched={"table.weight": (0.01, 0.002)}, **TABLE, **taken)
    found = verdict(made)
    assert kinds(found) == ["sparse-gradients", "host-load"]
    advice = found.advice[0]
    assert "99.0% of its rows are zeros" in advice.reason
    assert "SparseAdam or SGD" in advice.text
    assert "if a batch uses few" not in advice.text
    launches = (0.01 * 0.98 - 3 * 0.0003) / Facts(made, OperatorTable()).length  # three messages take its place
    assert advice.parts["communication"] == pytest.approx(launches, rel=0.02), "the ranks' own work, without waiting"
    filling = 0.002 * 0.99 / Facts(made, OperatorTable()).length
    assert advice.parts["backward"] == pytest.approx(filling, rel=0.02), "a dense gradient is filled with zeros"
    unseen = verdict(records(2, 80, timing, 0.01, **TABLE, **taken))
    assert kinds(unseen) == ["host-load"]


@pytest.mark.parametrize(("touched", "is_told"), [(0.01, True), (0.2, True), (0.3, False), (1.0, False)])
def test_a_table_of_which_batches_use_much_is_not_told(touched: float, is_told: bool) -> None:
    found = verdict(records(2, 40, travel=0.1, touched={"table.weight": (touched, 0.0)}, **TABLE))
    assert ("sparse-gradients" in kinds(found)) is is_told


def test_what_sparse_gradients_cost_themselves_is_not_saved() -> None:
    """Rows are made unique, exchanged in three messages, and added up: 78 % were promised and 57 % saved."""

    def saved(*seen: float, **fields: Any) -> float:
        made = records(2, 40, travel=0.1, touched={"table.weight": seen}, **TABLE | fields)
        advice = the("sparse-gradients", verdict(made))
        return advice.parts["communication"] * Facts(made, OperatorTable()).length

    all_of_it = saved(0.01, 0.002)
    assert saved(0.01, 0.002, 0.03) == pytest.approx(all_of_it - 0.03, rel=1e-3)
    assert saved(0.01, 0.002, 1.0) == 0
    # Two equal buckets, each of which takes 50 ms: so do messages, as far as is known, and three are no less.
    assert saved(0.01, 0.002, buckets=[4_500_000] * 2) == 0 < all_of_it


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.table(rows))
        return found


def train_rows(world: World, folder: Path) -> None:
    model = paceline.DistributedDataParallel(Rows())
    torch.set_num_threads(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.profiler.profile(folder, operators=False):
        for _ in range(6):
            rows = torch.arange(10) + 10 * world.rank
            model(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.set_num_threads(1)


def test_rows_threads_and_cores_are_recorded(tmp_path: Path) -> None:
    run_ranks(2, train_rows, tmp_path)
    for record in read_ranks(tmp_path):
        [(name, (touched, to_fill, to_average))] = record.touched.items()
        assert (name, touched) == ("table.weight", pytest.approx(0.02)), "of both ranks"
        assert to_fill > 0
        assert to_average > 0
        assert record.threads == 1, "as it is at the end, and not when the profile began"
        assert len(record.core_numbers) in (0, record.cores)
        assert 0 <= record.loop_cores <= 1.05


SCRIPT = """
import torch, paceline
paceline.init()
model = paceline.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(64, 256)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_the_command_says_that_three_steps_are_too_few(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = command(tmp_path, "profile", "--nproc", "1", "--no-operators", "train.py")
    assert result.returncode == 0, result.stderr
    assert "Provisional, as 3 steps are too few to tell: profile " in result.stdout
    figures = json.loads((tmp_path / "profile" / "summary.json").read_text())
    assert figures["provisional"]
    assert "Provisional, as 3 steps" in figures["headline"]
    assert "Provisional, as 3 steps" in (tmp_path / "profile" / "report.html").read_text()
