"""Reads ``report.json``, which is checked value by value, because someone may have edited or cut it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Report
from paceline.profiler.report.typed_json import WrongValue, parse, read_text, value_of

NAME = "report.json"
"""The file in the folder of a profile."""


def read_report(place: str | Path) -> Report:
    """Return the report in `place`: the folder of a profile, or its ``report.json``."""
    file = Path(place)
    file = file / NAME if file.is_dir() else file
    try:
        data = parse(read_text(file))
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}; give the folder that `paceline profile --out` wrote"
        ) from error
    except ValueError as error:
        raise UsageError(f"{file} is no JSON: {error}; profile the run again") from error
    return report_from_json(data, str(file))


def report_from_json(data: Any, file: str = NAME) -> Report:
    """Return the report that `data`, from ``Report.to_json``, describes; keys that no report has are left out."""
    try:
        report: Report = value_of(Report, data)
        _check_shapes(report)
    except WrongValue as error:
        raise UsageError(f"{file} is no profile that can be shown: {error}; profile the run again") from error
    return report


def _check_shapes(report: Report) -> None:
    """Raise unless tables have a row for each step and a column for each rank."""
    steps, ranks = len(report.steps), len(report.ranks)
    if absent := [part for part in step_parts.ALL if part not in report.parts]:
        raise WrongValue(f"'parts.{absent[0]}' is missing")
    tables = {"step_seconds": report.step_seconds} | {f"parts.{part}": rows for part, rows in report.parts.items()}
    for name, rows in tables.items():
        _table(name, rows, steps, "steps", ranks)
    _table("waited_for", report.waited_for, ranks, "ranks", ranks)
    for index, slow in enumerate(report.stragglers):
        if slow.rank not in {one.rank for one in report.ranks}:
            raise WrongValue(f"stragglers[{index}].rank is {slow.rank}, which is not among the {ranks} ranks")
    if report.timeline is not None:
        _count("timeline.slices", report.timeline.slices, ranks, "ranks")
        for index, bucket in enumerate(report.timeline.buckets):
            _count(f"timeline.buckets[{index}].launched", bucket.launched, ranks, "ranks")
            _count(f"timeline.buckets[{index}].finished", bucket.finished, ranks, "ranks")


def _table(name: str, rows: Sequence[Sequence[Any]], height: int, noun: str, width: int) -> None:
    _count(name, rows, height, noun)
    for index, row in enumerate(rows):
        _count(f"{name}[{index}]", row, width, "ranks")


def _count(name: str, row: Sequence[Any], wanted: int, noun: str) -> None:
    if len(row) != wanted:
        raise WrongValue(f"{name} has {len(row)} entries, and there are {wanted} {noun}")
