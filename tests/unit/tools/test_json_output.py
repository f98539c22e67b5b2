"""The page on JSON output describes every field of real documents, and no others."""

from __future__ import annotations

import insides
from json_page import check
from profile_records import records, verdict


def test_summary_of_a_profile_is_described() -> None:
    slow = verdict(records(2, 60, lambda rank, _: {"forward": 0.05 + 0.05 * rank}))
    vars(slow.facts)["noise_scale"] = insides.NoiseScale(96.0, 32.0)
    sends = verdict(records(2, travel=0.06), insides.OperatorTable(device_figures={"utilization": 0.5}))
    apart = verdict(records(2, timing=lambda _, step: {"outer": 0.1 * (step % 8 == 0)}))
    check("paceline profile", *map(insides.summary, (slow, sends, apart)))


def test_measured_tables_are_described() -> None:
    row = insides.Row("broadcast", "gloo", 2, 8, (0.1,), 0)
    check("paceline bench collectives --json FILE", insides.bench_document([row], 2))
    row = insides.report_Row("ddp", 2, 2, (0.1,), 0.1, 8.0, 80.0, 1.9, 0.95, 10**8, True, 0.0)
    check("paceline compare --json FILE", insides.compare_document([row], "digits", 1))


def test_running_job_is_described() -> None:
    times = {"timed": 9, "step_seconds": 1.0}
    ranks = [insides.RankStatus(rank, "running", waiting_seconds=0.5 - rank / 2, **times) for rank in (0, 1)]
    view = insides.JobView(insides.JobNote(1, "run", "train.py", 2, 0.0), ranks)
    check("paceline top --json", view.to_json())
