"""Writes the results of a profile beside the records of its ranks."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.errors import UsageError
from paceline.profiler.chrome_trace import write_trace
from paceline.profiler.hta_traces import write_hta_traces
from paceline.profiler.page import page
from paceline.profiler.rank_file import read_ranks
from paceline.profiler.report import Report
from paceline.profiler.verdict import read_facts, report_of, summary


def write_results(folder: Path) -> Report:
    """Write the results into `folder`, and return the report.

    They are ``summary.json``, ``report.json``, ``trace.json``, ``report.html``, and in ``hta`` a trace of each rank.

    Raises:
        UsageError: if no step was measured, with the reason, or a file cannot be written.
    """
    facts = read_facts(folder)
    report = report_of(facts)
    try:
        (folder / "summary.json").write_text(json.dumps(summary(report), indent=1) + "\n", "utf-8")
        (folder / "report.json").write_text(json.dumps(report.to_json()) + "\n", "utf-8")
        write_trace(folder)
        write_hta_traces(folder, facts)
        (folder / "report.html").write_text(page(report), "utf-8")
    except OSError as error:
        raise UsageError(f"the results cannot be written to {folder}: {error.strerror}; make room there") from error
    if not report.steps:
        raise UsageError(_why_nothing(folder))
    return report


def _why_nothing(folder: Path) -> str:
    records = read_ranks(folder)
    taken = max(len(record.steps) for record in records)
    if not any(record.wrapper for record in records):
        return (
            f"the program trained no model in DistributedDataParallel ({taken} optimizer steps without one), so there "
            "is no step of data parallelism to show; wrap it: model = paceline.DistributedDataParallel(model)"
        )
    return f"no step was measured: the program took {taken}, and the first 3 only warm up; let it train longer"
