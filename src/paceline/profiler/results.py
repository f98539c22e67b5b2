"""Writes the results of a profile, next to the records of its ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from paceline.core.processes.missing_ranks import named_ranks
from paceline.core.strict_json import shown
from paceline.core.untrusted_files import new_file
from paceline.errors import UsageError
from paceline.profiler.analysis.analyze import Report, read_facts, report_of, summary
from paceline.profiler.page.layout import page
from paceline.profiler.records.rank_file import KILLED, RankRecord
from paceline.profiler.records.steps import FLUSH_S, WARM_UP
from paceline.profiler.traces.chrome_trace import write_trace

RESULTS = ("summary.json", "trace.json", "report.html")
"""Files that :func:`write_results` writes."""


def write_results(folder: Path) -> Report:
    """Write the results into `folder`, and return the report."""
    try:
        facts = read_facts(folder)
        report = report_of(facts)
        write_trace(folder, facts)
        texts = {
            "summary.json": json.dumps(summary(report), indent=1, allow_nan=False),
            "report.html": page(report),
        }
        for name, text in texts.items():
            with new_file(folder / name) as file:
                file.write(text + "\n")
    except OSError as error:
        raise UsageError(f"the results cannot be written to {folder}: {error.strerror}; make room there") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        # Each record is valid by itself, but they do not fit together, for example because one was edited.
        raise UsageError(f"the records in {folder} contradict each other ({shown(error)}); profile again") from error
    # Raise only after writing the files, because the trace is useful even if no step was measured.
    if not facts.accounts.steps or not any(record.wrapper for record in facts.records):
        raise UsageError(_why_nothing(facts.records))
    return report


def _why_nothing(records: Sequence[RankRecord]) -> str:
    if killed := [record.rank for record in records if record.ended == KILLED]:
        return (
            f"no step was measured: {named_ranks(killed)} ended before its record was first written, "
            f"which happens every {FLUSH_S:g} s; train longer, or let the program end by itself"
        )
    if not any(record.wrapper for record in records):
        return (
            "this process trained no model in DistributedDataParallel; wrap it: model = "
            "paceline.DistributedDataParallel(model). If the program starts its own ranks, use "
            "paceline.profiler.profile(folder) in them"
        )
    steps = max(len(record.steps) for record in records)
    return (
        f"no step was measured: the program took {steps}, and the first {WARM_UP} are only warm-up; train longer (a "
        "step ends when an optimizer of torch.optim steps after a backward)"
    )
