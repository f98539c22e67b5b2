"""The page on JSON output describes every field of real documents, and no others."""

from __future__ import annotations

from insides import (
    JobNote,
    JobView,
    NoiseScale,
    OperatorTable,
    RankStatus,
    Row,
    bench_document,
    compare_document,
    report_Row,
    summary,
)
from json_page import check
from profile_records import records, verdict


def test_summary_of_a_profile_is_described() -> None:
    slow = verdict(records(2, 60, lambda rank, _: {"forward": 0.05 + 0.05 * rank}))
    vars(slow.facts)["noise_scale"] = NoiseScale(96.0, 32.0)
    sends = verdict(records(2, travel=0.06), OperatorTable(device_figures={"utilization": 0.5}))
    check("paceline profile", summary(slow), summary(sends))


def test_measured_tables_are_described() -> None:
    check("paceline bench collectives --json FILE", bench_document([Row("broadcast", "gloo", 2, 8, (0.1,), 0)], 2))
    row = report_Row("ddp", 2, 2, (0.1,), 0.1, 8.0, 80.0, 1.9, 0.95, 10**8, True, 0.0)
    check("paceline compare --json FILE", compare_document([row], "digits", 1))


def test_running_jobs_are_described() -> None:
    fast, slow = (
        RankStatus(rank, "running", timed=9, step_seconds=1.0, waiting_seconds=0.5 - rank / 2) for rank in (0, 1)
    )
    note = JobNote(1, "run", "train.py", 2, 0.0)
    check("paceline top --json", JobView(note, [fast, slow]).to_json())
