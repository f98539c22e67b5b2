"""The verdict where ranks lack cores, where they are all taken, and where too few steps were measured."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.profiler.analyze import Report, summary
from paceline.profiler.facts import Facts
from paceline.profiler.host_load import load_of, neighbours, quota
from paceline.profiler.operator_table import OperatorTable
from paceline.profiler.page import page
from paceline.profiler.rank_file import RankRecord
from paceline.profiler.rules import Advice
from paceline.tools.profile_command import print_summary
from profile_records import kinds, records, the, verdict


def late_in_turns(rank: int, step: int) -> dict[str, float]:
    late = random.Random(100 * step + rank).expovariate(1 / 0.02)
    return {"forward": 0.01 + late, "delayed": late}


# -- too few steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 19])
def test_too_few_steps_have_times_but_no_share_and_no_advice(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps of a clean job, of which one had a slow batch, gave «the loop waits for data, may save 48 %»."""
    found = verdict(records(2, 3 + steps, lambda *_: {"data": 0.05}))
    few = "1 measured step is" if steps == 1 else f"{steps} measured steps are"
    assert found.headline == f"{few} too few for a verdict: profile 20."
    assert not found.advice
    assert not found.facts.stragglers
    assert summary(found)["provisional"]
    print_summary(found)
    shown = capsys.readouterr().out
    assert re.search(r"data +50\.0 ms", shown), "times are measured"
    assert "%" not in shown
    # Widths of bars are percentages of CSS.
    assert "%" not in re.sub(r'<(style|script).*?</\1>|style="[^"]*"', "", page(found), flags=re.DOTALL)


def test_short_steps_are_to_be_profiled_for_as_long_as_a_straggler_takes_to_show() -> None:
    short = {"data": 0.004, "forward": 0.0005, "backward": 0.001, "optimizer": 0.0005}
    assert (
        "1 measured step is too few for a verdict: profile 140."
        in verdict(records(1, 4, lambda *_: short, 0.001)).headline
    )


def test_no_share_exceeds_the_whole() -> None:
    """A rank was said to have «no core for 105 % of its time», and advice to save 100 %."""

    def starved(rank: int, step: int) -> dict[str, float]:
        return {"forward": 0.1, "delayed": 0.2}

    found = verdict(shared(4, 2, 2.0, 0.2) and records(4, 80, starved, cores=2, core_numbers=[0, 1], busy_cores=2.0))
    percentages = re.findall(r"([\d.]+)%", " ".join([found.headline, *(one.reason for one in found.advice)]))
    assert percentages
    assert all(float(number) <= 100 for number in percentages)
    waits = verdict(records(2, 40, lambda *_: {"data": 30.0}))
    assert waits.advice[0].gain <= 0.95


# -- own competition --------------------------------------------------------------------------------------------------


def shared(ranks: int, cores: int, busy: float, own: float, **fields: Any) -> list[RankRecord]:
    taken: dict[str, Any] = {"cores": cores, "core_numbers": list(range(cores)), "busy_cores": busy, "own_cores": own}
    return records(ranks, 80, late_in_turns, **taken | fields)


def test_ranks_that_compete_with_each_other_are_told_so_with_the_remedy() -> None:
    """They were put down to other programs, or to communication."""
    found = verdict(shared(4, 2, 2.0, 0.49))
    assert found.headline.startswith(
        "The ranks slow each other down: 4 ranks with 1 thread each share 2 cores, and rank "
    )
    assert "other programs" not in found.headline
    assert kinds(found) == ["threads"]
    assert found.advice[0].text == "Start 2 ranks on these cores, with the batches of all 4"
    assert found.advice[0].gain < 0.1, "two ranks have the same work"
    idle = verdict(shared(4, 2, 1.6, 0.4))
    assert idle.advice[0].gain > found.advice[0].gain


def test_threads_beyond_the_cores_are_own_competition_too() -> None:
    found = verdict(shared(2, 2, 2.0, 0.98, threads=2))
    assert found.headline.startswith("The ranks slow each other down: 2 ranks with 2 threads each share 2 cores")
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
    crowd = "because 4 ranks with 1 thread each share 2 cores: rank "
    assert found.headline.startswith(f"Other programs slow the ranks down, and the ranks slow each other down, {crowd}")
    assert kinds(found) == ["threads", "host-load"]


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
    assert not load.is_by_ranks


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


def workers(advice: Advice) -> int:
    found = re.search(r"num_workers=(\d+)", advice.text)
    return int(found[1]) if found else 0


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
    found = loader(2, 1.0)
    advice = the("data-loading", found)
    assert "num_workers" not in advice.text
    assert "; workers would not help, because loading is computation, and no core is free for it" in advice.text
    assert "cache what it computes" in advice.text
    assert "2 ranks compute on 2 cores" in advice.reason
    assert advice.gain == pytest.approx(found.facts.shares["data"] / 2)


def test_workers_are_advised_where_cores_are_free_or_loading_waits_for_a_disk() -> None:
    free = the("data-loading", loader(8, 1.0))
    assert 2 <= workers(free) <= 3
    assert free.gain > 0.4
    some = the("data-loading", loader(4, 1.0))
    assert 1 <= workers(some) <= 2
    assert 0 < some.gain <= free.gain
    taken = the("data-loading", loader(4, 1.0, busy=4.0))
    assert not workers(taken), "others keep the rest busy"
    assert "4 cores, and other programs keep 2.2 of them busy" in taken.reason
    waits = the("data-loading", loader(2, 0.05, busy=0.9, own=0.45))
    assert workers(waits) >= 2
    assert waits.gain > 0.4
    assert workers(the("data-loading", loader(2, 0.05, busy=2.0, own=0.3))) >= 2


@pytest.mark.parametrize(("delayed", "expected"), [(0.0, ["data-loading"]), (0.03, ["host-load"])])
def test_loading_that_lacks_a_core_is_not_waiting_for_data(delayed: float, expected: list[str]) -> None:
    """For a dataset in memory, workers were advised beside other programs."""
    made = records(2, 40, lambda *_: {"data": 0.02, "delayed": delayed}, cores=2, busy_cores=2.0, own_cores=0.5)
    assert kinds(verdict(loads(0.02, 0.1)(made))) == expected


def test_more_workers_do_not_help_those_that_have_taken_all_cores() -> None:
    taken: dict[str, Any] = {"cores": 2, "busy_cores": 2.0, "own_cores": 1.0, "loop_cores": 0.3, "workers": 2}
    made = records(2, 40, lambda *_: {"data": 0.05, "delayed": 0.045}, **taken)
    advice = the("data-loading", verdict(made))
    assert "more workers would not help" in advice.text
    assert not workers(advice)
