"""Builds the report of a profile, and the figures of ``summary.json``, from the records of all ranks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline.core.missing_ranks import named_ranks
from paceline.planner.profiles import PLAN
from paceline.profiler import step_parts
from paceline.profiler.advice import Advice, find_advice, headline
from paceline.profiler.facts import Facts, plan_of
from paceline.profiler.operator_table import operators_in, read_trace
from paceline.profiler.rank_file import KILLED, MISSING, STOPPED, read_ranks, trace_of


def read_facts(folder: Path) -> Facts:
    """Return the figures of the profile in `folder`."""
    records = read_ranks(folder)
    traces = [read_trace(trace_of(folder, record.rank)) for record in records]
    return Facts(records, operators_in(traces, records), traces)


@dataclass(frozen=True)
class Report:
    """The figures of a run, and what they mean."""

    facts: Facts
    advice: list[Advice]
    """Advice, most valuable first."""
    headline: str
    """Verdict in one sentence."""
    missing: list[str]
    """A sentence for each kind of missing data, with the reason."""


def report_of(facts: Facts) -> Report:
    """Return the report of a run."""
    advice = find_advice(facts)
    return Report(facts, advice, headline(facts, advice), missing(facts))


def summary(report: Report) -> dict[str, Any]:
    """Return the contents of ``summary.json``, for other programs to read."""
    facts, shares = report.facts, report.facts.shares
    no_step = dict.fromkeys(step_parts.ALL, 0.0)
    parts = {
        str(rank): {part: round(1e3 * seconds, 4) for part, seconds in (mean or no_step).items()}
        for rank, mean in enumerate(facts.rank_parts)
    }
    # A step takes as long as it does on the slowest rank.
    lengths = [max(seconds for seconds in row if not math.isnan(seconds)) for row in facts.accounts.lengths]
    plan = plan_of(facts)
    return {
        "version": 1,
        "title": facts.records[0].title,
        "headline": report.headline,
        "ranks": len(facts.records),
        "steps": len(facts.accounts.steps),
        "provisional": not facts.is_firm,
        "step_ms": round(1e3 * median(lengths), 4) if lengths else None,
        "straggler_rank": facts.stragglers[0].rank if facts.stragglers else None,
        "stragglers": [asdict(slow) for slow in facts.stragglers],
        "bubble_ms_per_step": {rank: row[step_parts.BUBBLE] for rank, row in parts.items()},
        "parts_ms_per_step": parts,
        "compute_share": sum(shares[part] for part in step_parts.COMPUTE),
        "exposed_communication_share": shares[step_parts.COMMUNICATION],
        "bubble_share": shares[step_parts.BUBBLE],
        "data_share": shares[step_parts.DATA],
        "allreduce_share": facts.all_reduce_share(),
        "overlap": facts.mean_overlap,
        "overlap_by_rank": facts.overlap,
        "samples_per_step": facts.rows,
        "gradient_noise_scale": None if facts.noise_scale is None else facts.noise_scale.value,
        "outer_steps": facts.outer_steps and asdict(facts.outer_steps),
        "device": facts.operators.device_figures,
        "memory": facts.records[0].memory,
        "advice": [
            {"kind": advice.kind, "text": advice.text, "reason": advice.reason, "gain": round(advice.gain, 4)}
            | ({"predictions": advice.predictions} if advice.predictions else {})
            for advice in report.advice
        ],
        "missing": report.missing,
        PLAN: None if plan is None else asdict(plan),
    }


def missing(facts: Facts) -> list[str]:
    """Return a sentence for each kind of missing data, with the reason."""
    records = facts.records
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
