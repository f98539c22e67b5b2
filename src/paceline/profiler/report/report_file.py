"""Reads reports from files. ``report.json`` is checked value by value, because someone may have edited or cut it."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from paceline.core.strict_json import shown, unique
from paceline.errors import UsageError
from paceline.profiler.report import step_parts
from paceline.profiler.report.report import Report

NAME = "report.json"
"""The file in the folder of a profile."""


def read_report(place: str | Path) -> Report:
    """Return the report in `place`: the folder of a profile, or its ``report.json``.

    Raises:
        UsageError: names the file, and the fault.
    """
    file = Path(place)
    file = file / NAME if file.is_dir() else file
    try:
        data = json.loads(file.read_bytes(), object_pairs_hook=unique)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}; give the folder that `paceline profile --out` wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{file} is no JSON: {reason}; profile the run again") from error
    return report_from_json(data, str(file))


def report_from_json(data: Any, file: str = NAME) -> Report:
    """Return the report that `data`, from ``Report.to_json``, describes; keys that no report has are left out.

    Raises:
        UsageError: names `file`, and the first value that cannot be right.
    """
    try:
        report: Report = _value(Report, data, "")
        _check_shapes(report)
    except _Wrong as error:
        raise UsageError(f"{file} is no profile that can be shown: {error}; profile the run again") from error
    return report


class _Wrong(Exception):
    """A value that cannot be right; the message names its place and the fault."""


def _value(kind: Any, found: Any, where: str) -> Any:
    """Return `found` as the type `kind`; `where` is its place in the document."""
    if kind is Any:
        return found
    if dataclasses.is_dataclass(kind):
        return _instance(kind, found, where)
    origin, inside = get_origin(kind), get_args(kind)
    # Before Python 3.14, X | None and Optional[X] differ in their origins.
    if origin in (Union, types.UnionType):
        [other] = [one for one in inside if one is not type(None)]
        return None if found is None else _value(other, found, where)
    if origin is Sequence:
        _expect(isinstance(found, list), found, where, "a list")
        return [_value(inside[0], one, f"{where}[{index}]") for index, one in enumerate(found)]
    if origin is Mapping:
        _expect(isinstance(found, dict), found, where, "an object")
        return {name: _value(inside[1], one, f"{where}.{name}") for name, one in found.items()}
    is_right, description = _PLAIN[kind]
    _expect(is_right(found), found, where, description)
    return kind(found)  # a whole number is a float, too


def _instance(kind: Any, found: Any, where: str) -> Any:
    _expect(isinstance(found, dict), found, where, "an object")
    hints, values = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        place = f"{where}.{field.name}".lstrip(".")
        if field.name in found:
            values[field.name] = _value(hints[field.name], found[field.name], place)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise _Wrong(f"{place!r} is missing")
    return kind(**values)


def _expect(is_right: bool, found: Any, where: str, description: str) -> None:
    if not is_right:
        raise _Wrong(f"{where or 'it'} is {shown(found)}, and has to be {description}")


def _is_number(found: Any) -> bool:
    # JSON's true and false are ints in Python, and its NaN and Infinity are numbers to the parser.
    return isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)


_PLAIN: dict[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda found: isinstance(found, str), "a text"),
    int: (lambda found: isinstance(found, int) and not isinstance(found, bool), "a whole number"),
    bool: (lambda found: isinstance(found, bool), "true or false"),
    float: (_is_number, "a finite number"),
}


def _check_shapes(report: Report) -> None:
    """Raise unless tables have a row for each step and a column for each rank."""
    steps, ranks = len(report.steps), len(report.ranks)
    _table("step_seconds", report.step_seconds, steps, ranks)
    for part in step_parts.ALL:
        if part not in report.parts:
            raise _Wrong(f"'parts.{part}' is missing")
    for part, rows in report.parts.items():
        _table(f"parts.{part}", rows, steps, ranks)
    _table("waited_for", report.waited_for, ranks, ranks)
    for index, slow in enumerate(report.stragglers):
        if slow.rank not in {one.rank for one in report.ranks}:
            raise _Wrong(f"stragglers[{index}].rank is {slow.rank}, which is not among the {ranks} ranks")
    if report.timeline is not None:
        _count("timeline.slices", report.timeline.slices, ranks, "ranks")
        for index, bucket in enumerate(report.timeline.buckets):
            _count(f"timeline.buckets[{index}].launched", bucket.launched, ranks, "ranks")
            _count(f"timeline.buckets[{index}].finished", bucket.finished, ranks, "ranks")


def _table(name: str, rows: Sequence[Sequence[Any]], height: int, width: int) -> None:
    _count(name, rows, height, "ranks" if name == "waited_for" else "steps")
    for index, row in enumerate(rows):
        _count(f"{name}[{index}]", row, width, "ranks")


def _count(name: str, row: Sequence[Any], wanted: int, noun: str) -> None:
    if len(row) != wanted:
        raise _Wrong(f"{name} has {len(row)} entries, and there are {wanted} {noun}")
