"""Compares the measured numbers of README.md and ``docs/`` with their data files, in ``make docs`` and in a fast test.

A comment names the data for the text between it and the previous comment or empty line. A table's comment follows on
its own line. Comments contain no spaces and no ``](``, which Markdown would read as a link::

    A save costs 2.8 s.<!--data:2026-11-22-async-save:r.loop_s.waits-->

The file is in ``benchmarks/results``, without ``.json``. The Python expression lists values, which are compared in
order with the printed numbers, to the last printed digit. `d` is the file's content, `r` its ``"results"``; `d1` and
`r1` are those of a second file, after a comma. Expressions look up keys without their spaces::

    r.key  r["key"]         a value
    r["key","ke*"]          a list of values
    rows.key                the value of each object in a list
    rows(kind="a*",n=2)     the objects of a list with these values
    ...                     a number that is not measured, such as a condition

Every number that MEASURED finds needs a value, and every table cell that CELL finds, except in the first column. Other
numbers may have one. ``<!--data:none-->`` says that the text before it has no measured number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from statistics import median
from typing import Any

import numpy as np

from docs_site.links import LINK_OR_CODE
from docs_site.pages import ROOT

RESULTS = ROOT / "benchmarks" / "results"
COMMENT_OR_GAP = re.compile(r"<!--data:(?:none|(?P<file>[^:\s]+):(?P<values>\S+?))-->|\n[ ]*\n")
HIDDEN = re.compile(r"<!--.*?-->|^#+[ ][^\n]*", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])[+−]?\d+(?:,\d{3})*(?:\.\d+)?(?!\d|[A-Za-z]*\d)")
MEASURED = re.compile(
    r"\s?(?:ms|[µμ]s|(?:milli|micro)seconds|[KMG]B/s|×|x\b|%(?!\sinterval)|percent\b|points?|times\b)|-fold|(?:(?<=\.\d)|(?<=\.\d\d)|(?<=\.\d{3}))\ss\b"
)
"""What follows a measured number: a unit of time or of a ratio. Sizes and whole seconds are mostly settings."""
CELL = re.compile(r"[*\s]*[+−]?[\d,]+(?:\.\d+(?:\s[KMG]i?B)?|\s?(?:ms|s|×|%|[KMG]i?B|points))(?:\s\(.*\d\))?[*\s]*")
"""A table cell that is a number with decimals or a unit, perhaps with others in parentheses."""


class Records(list[Any]):
    """A list of JSON objects: ``records.key`` is the list of their values."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)):
            return _wrap(super().__getitem__(key))
        return _wrap([entry[key] for entry in self])

    def __getattr__(self, key: str) -> Any:
        return self[key]

    def __call__(self, **wanted: Any) -> Any:
        entries = [entry for entry in self if all(_matches(entry.get(key), value) for key, value in wanted.items())]
        if not entries:
            raise KeyError(f"no entry has {wanted}")
        return Records(entries)


class Record(dict[str, Any]):
    """A JSON object, whose keys are looked up without their spaces and may have wildcards."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return _wrap([self[name] for name in key])
        values = [value for name, value in self.items() if _matches(name, key)]
        if not values:
            raise KeyError(f"{key} is not one of {', '.join(self)}")
        return _wrap(values if len(values) > 1 else values[0])

    def __getattr__(self, key: str) -> Any:
        return self[key]


def _wrap(value: Any) -> Any:
    """Return a JSON value with these lookups: numbers as an array, for arithmetic, and lists of lists as one list."""
    if isinstance(value, dict):
        return Record(value)
    if not isinstance(value, list):
        return value
    entries = [_wrap(entry) for entry in value]
    if entries and all(isinstance(entry, Records) for entry in entries):
        return Records(record for records in entries for record in records)
    is_numeric = all(isinstance(entry, (int, float, np.ndarray)) for entry in entries)
    return np.array(entries) if is_numeric and len({np.shape(entry) for entry in entries}) == 1 else Records(entries)


def _matches(value: Any, wanted: Any) -> bool:
    return fnmatchcase(value.replace(" ", ""), wanted) if isinstance(value, str) else bool(value == wanted)


@cache
def _load(name: str) -> Record:
    return Record(json.loads((RESULTS / f"{name}.json").read_text("utf-8")))


def evaluate(files: str, expression: str) -> list[Any]:
    """Return the values of an expression about data files."""
    names: dict[str, Any] = {function.__name__: function for function in (abs, len, max, median, min, sum, zip)}
    names |= {"__builtins__": {}, "np": np}
    for index, file in enumerate(files.split(",")):
        data = _load(file)
        names[f"d{index or ''}"], names[f"r{index or ''}"] = data, _wrap(data.get("results"))
    values = eval(expression, names)

    def flat(value: Any) -> Iterator[Any]:
        if isinstance(value, (tuple, list, zip, np.ndarray)):
            for entry in value:
                yield from flat(entry)
        else:
            yield value

    return list(flat(values))


@dataclass(frozen=True)
class PrintedNumber:
    """A number on a page."""

    text: str
    line: int
    is_measured: bool

    def agrees(self, value: Any) -> bool:
        """Return whether the number is `value`, rounded to the printed digits."""
        tolerance = 0.5 * 10.0 ** -len(self.text.partition(".")[2])
        number = float(self.text.replace(",", "").replace("−", "-"))
        return value is ... or abs(number - value) <= tolerance * (1 + 1e-6)


def printed_in(page: str, start: int, end: int) -> Iterator[PrintedNumber]:
    """Yield the numbers of a part of a page."""
    is_table = page[start:end].lstrip().startswith("|")
    for match in NUMBER.finditer(page, start, end):
        is_measured = MEASURED.match(page, match.end()) is not None
        if is_table:
            row = page.rfind("\n", 0, match.start()) + 1
            before, _, cell = page[row : match.start()].rpartition("|")
            cell += page[match.start() : page.find("|", match.start())]
            is_measured = bool(before.strip()) and (is_measured or CELL.fullmatch(cell) is not None)
        yield PrintedNumber(match[0], page.count("\n", 0, match.start()) + 1, is_measured)


def faults(numbers: Sequence[PrintedNumber], values: Sequence[tuple[str, Any]], line: int) -> list[tuple[int, str]]:
    """Pair numbers and values (with their files) in order, and return the line and text of the fewest faults.

    Values that no number has are reported for `line`.
    """

    @cache
    def best(i: int, j: int) -> tuple[tuple[int, str], ...]:
        if i == len(numbers):
            return tuple((line, f"the page lacks {file}: {value}") for file, value in values[j:])
        number = numbers[i]
        without = ((number.line, f"{number.text} names no data"),) * number.is_measured + best(i + 1, j)
        if j == len(values):
            return without
        file, value = values[j]
        wrong = () if number.agrees(value) else ((number.line, f"{number.text} is {value:.6g} in {file}"),)
        return min(wrong + best(i + 1, j + 1), without, key=len)

    return list(best(0, 0))


def check_text(text: str) -> list[tuple[int, str]]:
    """Return the line and text of each fault of a page."""
    shown = text
    for hidden in (HIDDEN, LINK_OR_CODE):
        shown = hidden.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), shown)
    parts: list[tuple[int, int, list[re.Match[str]]]] = []
    start = 0
    for match in [*COMMENT_OR_GAP.finditer(text), None]:
        end = match.start() if match else len(text)
        if shown[start:end].strip():
            parts.append((start, end, []))
        if match and match[0].strip() and parts:
            parts[-1][2].append(match)
        start = match.end() if match else end
    problems: list[tuple[int, str]] = []
    for start, end, comments in parts:
        if any(comment["file"] is None for comment in comments):
            continue
        try:
            values = [
                (comment["file"], value)
                for comment in comments
                for value in evaluate(comment["file"], comment["values"])
            ]
            problems += faults(list(printed_in(shown, start, end)), values, text.count("\n", 0, end) + 1)
        except Exception as error:  # of an expression
            line = text.count("\n", 0, comments[0].start()) + 1
            problems.append((line, f"{', '.join(comment[0] for comment in comments)} raises {error!r}"))
    return problems


def check_pages() -> list[str]:
    """Return a line for each number of README.md and ``docs/`` that names no data or differs from it."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        f"{page.relative_to(ROOT)}:{line}: {fault}"
        for page in pages
        for line, fault in check_text(page.read_text("utf-8"))
    ]
