"""Writes the results of a profile beside the records of its ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from paceline.core.processes.missing_ranks import named_ranks
from paceline.errors import UsageError
from paceline.profiler.analysis.analyze import read_facts, report_of, summary
from paceline.profiler.page import page
from paceline.profiler.records.rank_file import KILLED, RankRecord
from paceline.profiler.records.steps import FLUSH_S
from paceline.profiler.report.report import Report
from paceline.profiler.traces.chrome_trace import write_trace
from paceline.profiler.traces.hta_traces import write_hta_traces


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
        write_trace(folder, facts)
        write_hta_traces(folder, facts)
        (folder / "report.html").write_text(page(report), "utf-8")
    except OSError as error:
        raise UsageError(f"the results cannot be written to {folder}: {error.strerror}; make room there") from error
    # After the files are written: the trace shows what there was, also where nothing was measured.
    if not report.steps or not any(record.wrapper for record in facts.records):
        raise UsageError(_why_nothing(facts.records))
    return report


def _why_nothing(records: Sequence[RankRecord]) -> str:
    taken = max(len(record.steps) for record in records)
    if killed := [record.rank for record in records if record.ended == KILLED]:
        return (
            f"no step was measured: {named_ranks(killed)} ended before the record did, of which a part reaches the "
            f"file every {FLUSH_S:g} s; let the program train longer, or end by itself"
        )
    if not any(record.wrapper for record in records):
        return (
            "this process trained no model in DistributedDataParallel, so there is no step of data parallelism to "
            "show; wrap it: model = paceline.DistributedDataParallel(model). A program that starts its own ranks is "
            "profiled in these: with paceline.profiler.profile(folder)"
        )
    if not taken:
        return (
            "no step was measured: a step ends with an optimizer's of torch.optim after a backward, and none was seen; "
            "let one update the parameters"
        )
    return f"no step was measured: the program took {taken}, and the first 3 only warm up; let it train longer"
