"""Verdicts for ranks that lack cores, for fully used hosts, and for too few steps."""

from __future__ import annotations

import gc
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from insides import (
    Advice,
    CollectorPauses,
    Facts,
    OperatorTable,
    RankRecord,
    Report,
    load_of,
    neighbours,
    page,
    print_summary,
    quota,
    stop_profiled,
    summary,
)
from profile_records import kinds, records, the, verdict


def late_in_turns(rank: int, step: int) -> dict[str, float]:
    late = random.Random(100 * step + rank).expovariate(1 / 0.02)
    return {"forward": 0.01 + late, "delayed": late}


# -- too few steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 19])
def test_too_few_steps_give_times_but_no_share_or_advice(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps of a healthy job, one with a slow batch, gave «the loop waits for data, may save 48 %»."""
    report = verdict(records(2, 3 + steps, lambda *_: {"data": 0.05}))
    few = "1 measured step is" if steps == 1 else f"{steps} measured steps are"
    assert report.headline == f"{few} too few for a verdict: profile 20."
    assert not report.advice
    assert not report.facts.stragglers
    assert summary(report)["provisional"]
    print_summary(report)
    shown = capsys.readouterr().out
    assert re.search(r"data +50\.0 ms", shown), "times are measured"
    assert "%" not in shown
    # Bar widths are CSS percentages.
    assert "%" not in re.sub(r'<(style|script).*?</\1>|style="[^"]*"', "", page(report), flags=re.DOTALL)


def test_recommended_duration_for_short_steps_suffices_to_show_stragglers() -> None:
    short = {"data": 0.004, "forward": 0.0005, "backward": 0.001, "optimizer": 0.0005}
    report = verdict(records(1, 4, lambda *_: short, 0.001))
    assert "1 measured step is too few for a verdict: profile 140." in report.headline


def test_shares_are_at_most_the_whole() -> None:
    """A report said «no core for 105 % of its time», and its advice promised to save 100 %."""

    def starved(rank: int, step: int) -> dict[str, float]:
        return {"forward": 0.1, "delayed": 0.2}

    report = verdict(shared(4, 2, 2.0, 0.2) and records(4, 80, starved, cores=2, core_numbers=[0, 1], busy_cores=2.0))
    percentages = re.findall(r"([\d.]+)%", " ".join([report.headline, *(advice.reason for advice in report.advice)]))
    assert percentages
    assert all(float(number) <= 100 for number in percentages)
    waits = verdict(records(2, 40, lambda *_: {"data": 30.0}))
    assert waits.advice[0].gain <= 0.95


# -- competition between ranks ----------------------------------------------------------------------------------------


def shared(ranks: int, cores: int, busy: float, own: float, **fields: Any) -> list[RankRecord]:
    taken: dict[str, Any] = {"cores": cores, "core_numbers": list(range(cores)), "busy_cores": busy, "own_cores": own}
    return records(ranks, 80, late_in_turns, **taken | fields)


def test_competition_between_ranks_is_reported_with_the_remedy() -> None:
    """The waits were attributed to other programs, or to communication."""
    report = verdict(shared(4, 2, 2.0, 0.49))
    assert report.headline.startswith("The ranks slow each other down: 4 ranks with 1 thread each share 2 cores")
    assert "other programs" not in report.headline
    assert kinds(report) == ["threads"]
    assert report.advice[0].text == "Start 2 ranks on these cores, with the batches of all 4"
    assert report.advice[0].gain < 0.1, "two ranks do the same work"
    idle = verdict(shared(4, 2, 1.6, 0.4))
    assert idle.advice[0].gain > report.advice[0].gain


def test_more_threads_than_cores_count_as_competition_between_ranks() -> None:
    report = verdict(shared(2, 2, 2.0, 0.98, threads=2))
    assert report.headline.startswith("The ranks slow each other down: 2 ranks with 2 threads each share 2 cores")
    assert "OMP_NUM_THREADS=1" in the("threads", report).text
    # 50,000 switches per second, of 8 µs each, waste 0.4 of 2 cores.
    assert the("threads", verdict(shared(2, 2, 2.0, 1.0, threads=2, switches=25_000.0))).gain == pytest.approx(0.2)


@pytest.mark.parametrize(("switches", "expected"), [(25_000.0, ["threads"]), (2_000.0, [])])
def test_thread_switches_are_the_cost_of_too_many_threads(switches: float, expected: list[str]) -> None:
    taken: dict[str, Any] = {"cores": 2, "core_numbers": [0, 1], "busy_cores": 2.0, "own_cores": 1.0, "threads": 8}
    report = verdict(records(2, 80, switches=switches, **taken))
    assert kinds(report) == expected
    named = report.headline == "The ranks slow each other down: 2 ranks with 8 threads each share 2 cores."
    assert named == bool(expected), report.headline


def test_single_rank_may_have_more_threads_than_its_quota() -> None:
    report = verdict(shared(1, 64, 2.0, 1.9, threads=64, quota=2.0))
    assert "a rank with 64 threads has 2 cores" in report.headline
    assert "OMP_NUM_THREADS=2" in the("threads", report).text


def test_other_programs_and_competition_between_ranks_are_both_reported() -> None:
    report = verdict(shared(4, 2, 2.0, 0.25))
    load = Facts(shared(4, 2, 2.0, 0.25), OperatorTable()).load
    assert load is not None
    assert load.others == pytest.approx(1.0)
    assert load.of_ranks + load.of_others == pytest.approx(load.share)
    why = "because 4 ranks with 1 thread each share 2 cores: rank "
    assert report.headline.startswith(f"Other programs slow the ranks down, and the ranks slow each other down, {why}")
    assert kinds(report) == ["threads", "host-load"]


def test_pinned_ranks_do_not_compete() -> None:
    """Threads of ranks on different cores were added up, and the advice was to use fewer."""
    made = records(2, 40, cores=1, busy_cores=0.9, own_cores=0.9)
    for rank, record in enumerate(made):
        record.core_numbers = [rank]
    assert "threads" not in kinds(verdict(made))
    assert [len(neighbours(made, rank).records) for rank in range(2)] == [1, 1]
    load = load_of(made, [0.2, 0.1])
    assert load is not None
    assert load.others == 0
    assert not load.is_by_ranks


def test_quota_counts_as_cores() -> None:
    report = verdict(shared(2, 8, 2.0, 0.9, quota=1.0))
    assert "2 ranks with 1 thread each share 1 core, and rank " in report.headline
    assert the("threads", report).text.startswith("Start 1 rank on these cores")


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"job/cpu.max": "150000 100000\n"}, "0::/job\n", 1.5),
        ({"job/cpu.max": "max 100000\n", "cpu.max": "400000 100000\n"}, "0::/job\n", 4.0),
        ({"cpu.max": "200000 100000\n"}, "0::/hosts/path\n", 2.0),
        ({}, "4:memory:/job\n", None),
    ],
)
def test_cgroup_quotas_are_read(files: dict[str, str], own: str, cores: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert quota(tmp_path, tmp_path / "own") == cores


# -- workers ----------------------------------------------------------------------------------------------------------


def workers(advice: Advice) -> int:
    match = re.search(r"num_workers=(\d+)", advice.text)
    return int(match[1]) if match else 0


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


def test_workers_are_not_advised_for_compute_bound_loading_without_free_cores() -> None:
    """``--try`` gave two ranks four workers each, on two cores that the ranks already used."""
    report = loader(2, 1.0)
    advice = the("data-loading", report)
    assert "num_workers" not in advice.text
    assert "; workers would not help, because loading is computation, and no core is free for it" in advice.text
    assert "cache what it computes" in advice.text
    assert "2 ranks compute on 2 cores" in advice.reason
    assert advice.gain == pytest.approx(report.facts.shares["data"] / 2)


def test_workers_are_advised_for_free_cores_or_disk_bound_loading() -> None:
    free = the("data-loading", loader(8, 1.0))
    assert 2 <= workers(free) <= 3
    assert free.gain > 0.4
    some = the("data-loading", loader(4, 1.0))
    assert 1 <= workers(some) <= 2
    assert 0 < some.gain <= free.gain
    taken = the("data-loading", loader(4, 1.0, busy=4.0))
    assert not workers(taken), "other programs use the remaining cores"
    assert "4 cores, and other programs keep 2.2 of them busy" in taken.reason
    waits = the("data-loading", loader(2, 0.05, busy=0.9, own=0.45))
    assert workers(waits) >= 2
    assert waits.gain > 0.4
    assert workers(the("data-loading", loader(2, 0.05, busy=2.0, own=0.3))) >= 2


@pytest.mark.parametrize(("delayed", "expected"), [(0.0, ["data-loading"]), (0.03, ["host-load"])])
def test_loading_without_a_core_is_not_waiting_for_data(delayed: float, expected: list[str]) -> None:
    """On a busy host, workers were advised for a dataset in memory."""
    made = records(2, 40, lambda *_: {"data": 0.02, "delayed": delayed}, cores=2, busy_cores=2.0, own_cores=0.5)
    assert kinds(verdict(loads(0.02, 0.1)(made))) == expected


def test_more_workers_are_not_advised_if_workers_use_all_cores() -> None:
    taken: dict[str, Any] = {"cores": 2, "busy_cores": 2.0, "own_cores": 1.0, "loop_cores": 0.3, "workers": 2}
    made = records(2, 40, lambda *_: {"data": 0.05, "delayed": 0.045}, **taken)
    advice = the("data-loading", verdict(made))
    assert "more workers would not help" in advice.text
    assert not workers(advice)


def test_signal_during_a_collection_ends_the_program_after_it() -> None:
    """gc ignores exceptions of its callbacks, and a handler runs at the first line of Python after the collection."""
    pauses, previous = CollectorPauses(), signal.signal(signal.SIGALRM, stop_profiled)
    gc.disable()  # else the cycles are freed one by one
    for _ in range(500_000):
        cycle: list[Any] = []
        cycle.append(cycle)
    gc.callbacks.append(pauses)

    def collect() -> None:
        gc.collect()
        time.sleep(5)

    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(SystemExit):
            collect()
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        pauses.detach()
        signal.signal(signal.SIGALRM, previous)
