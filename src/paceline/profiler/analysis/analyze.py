"""Builds the report of a profile, and the figures of ``summary.json``, from the records of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from paceline.core.processes.missing_ranks import named_ranks
from paceline.planner.profiles import PLAN
from paceline.profiler.analysis.advice import find_advice, headline
from paceline.profiler.analysis.facts import Facts
from paceline.profiler.analysis.operator_table import operators_in
from paceline.profiler.analysis.plan import plan_of
from paceline.profiler.analysis.step_breakdown import mean_of
from paceline.profiler.records.rank_file import KILLED, MISSING, STOPPED, RankRecord, read_ranks
from paceline.profiler.records.trace_file import read_traces
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import RankInfo, Report, Timeline


def read_facts(folder: Path) -> Facts:
    """Return the figures of the profile in `folder`."""
    records = read_ranks(folder)
    traces = read_traces(folder, records)
    return Facts(records, operators_in(traces, records), traces)


def report_of(facts: Facts) -> Report:
    """Return the report of a run."""
    records, accounts, advice = facts.records, facts.accounts, find_advice(facts)
    first = records[0]
    return Report(
        title=first.title,
        backend=first.backend,
        ranks=[RankInfo(r.rank, r.host, r.device, r.threads, r.cores, r.memory.get("peak")) for r in records],
        steps=accounts.steps,
        step_seconds=[_nones(row) for row in accounts.lengths],
        parts={part: [_nones(row) for row in rows] for part, rows in accounts.parts.items()},
        waited_for=accounts.waited_for,
        headline=headline(facts, advice),
        advice=advice,
        stragglers=facts.stragglers,
        shares=facts.shares | {"allreduce": facts.all_reduce_share()},
        overlap_by_rank={str(rank): share for rank, share in facts.overlap.items()},
        timeline=timeline(facts),
        operators=facts.operators.operators,
        memory=first.memory,
        device_figures=facts.operators.device_figures,
        noise_scale=facts.noise_scale,
        missing=missing(records, facts),
        samples_per_step=facts.rows,
        plan=plan_of(facts),
        collecting=[mean_of([column]) for column in zip(*accounts.figures("collecting"), strict=True)],
    )


def summary(report: Report) -> dict[str, Any]:
    """Return the contents of ``summary.json``, for other programs to read."""
    parts = {str(rank): _in_ms(seconds) for rank, seconds in enumerate(report.rank_parts)}
    # A step takes as long as it does on the slowest rank.
    lengths = [max(value for value in row if value is not None) for row in report.step_seconds if any(row)]
    return {
        "title": report.title,
        "headline": report.headline,
        "ranks": len(report.ranks),
        "steps": len(report.steps),
        "provisional": not report.is_firm,
        "step_ms": round(1e3 * median(lengths), 4) if lengths else None,
        "straggler_rank": report.stragglers[0].rank if report.stragglers else None,
        "stragglers": [asdict(slow) for slow in report.stragglers],
        "bubble_ms_per_step": {rank: row[step_parts.BUBBLE] for rank, row in parts.items()},
        "parts_ms_per_step": parts,
        "compute_share": sum(report.shares[part] for part in step_parts.COMPUTE),
        "exposed_communication_share": report.shares[step_parts.COMMUNICATION],
        "bubble_share": report.shares[step_parts.BUBBLE],
        "data_share": report.shares[step_parts.DATA],
        "allreduce_share": report.shares["allreduce"],
        "overlap": report.overlap,
        "overlap_by_rank": dict(report.overlap_by_rank),
        "samples_per_step": report.samples_per_step,
        "gradient_noise_scale": None if report.noise_scale is None else report.noise_scale.value,
        "device": dict(report.device_figures),
        "memory": dict(report.memory),
        "advice": [
            {"kind": advice.kind, "text": advice.text, "reason": advice.reason, "gain": round(advice.gain, 4)}
            | ({"predictions": dict(advice.predictions)} if advice.predictions else {})
            for advice in report.advice
        ],
        "missing": list(report.missing),
        PLAN: None if report.plan is None else asdict(report.plan),
    }


def timeline(facts: Facts) -> Timeline | None:
    """Return the detailed step of median length, on the clock of rank 0."""
    if facts.typical is None:
        return None
    steps = facts.detailed[facts.typical]
    zero = min(step.start for step in steps)  # one zero for all ranks, so that a late rank appears late
    spans = [
        [span._replace(start=span.start - zero, end=span.end - zero) for span in step.spans if span.end > span.start]
        for step in steps
    ]
    return Timeline(steps[0].number, spans, facts.buckets[facts.typical])


def missing(records: Sequence[RankRecord], facts: Facts) -> list[str]:
    """Return a sentence for each kind of missing data, with the reason."""
    reasons = {
        KILLED: "was killed; its last steps may be missing",
        **dict.fromkeys(STOPPED, "was stopped from outside, by Ctrl-C or SIGTERM"),
    }
    notes = [
        f"rank {record.rank} {reasons.get(record.ended, f'ended with an error: {record.ended}')}"
        for record in records
        if record.ended not in ("", MISSING)
    ]
    if absent := [record.rank for record in records if record.ended == MISSING]:
        notes.append(f"{named_ranks(absent)} left no record in this folder; copy all hosts' files into one folder")
    if torch_ranks := [record.rank for record in records if record.wrapper == "torch"]:
        notes.append(
            f"torch's DistributedDataParallel was used on {named_ranks(torch_ranks)}: only the wait for its "
            "all-reduces at the end of backward is visible, so buckets and their overlap are missing; use "
            "paceline.DistributedDataParallel to see them"
        )
    if any(record.profiles_itself for record in records):
        notes.append(
            "the program itself used torch's profiler, and only one can run: operators are missing, and the program's "
            "profiler slowed some steps"
        )
    # For torch's wrapper, the note above says the same.
    if len(records) > 1 and not facts.overlap and records[0].wrapper == "paceline":
        notes.append("the ends of all-reduces were not recorded, so the overlap is unknown")
    return notes


def _nones(row: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in row]


def _in_ms(seconds: Mapping[str, float] | None) -> dict[str, float]:
    """Return a rank's mean times in milliseconds; zeros if the rank took no step."""
    return {part: round(1e3 * seconds[part], 4) if seconds else 0.0 for part in step_parts.ALL}
