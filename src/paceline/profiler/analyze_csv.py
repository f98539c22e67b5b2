"""``paceline profile analyze FILE.csv``: the verdict on compute times that any program wrote."""

from __future__ import annotations

import csv
import itertools
import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from paceline.errors import UsageError
from paceline.output_tables import print_table
from paceline.profiler.slow_windows import SHORTEST
from paceline.profiler.stragglers import Straggler, find_stragglers

COLUMNS = ("step", "rank", "seconds")
NAME_COLUMNS = ("name", "host", "hostname", "node")
MISSING = ("", "nan", "na", "null", "none", "-")  # as programs write a time that is missing
MOST_TIMES = 200_000_000
"""More steps times ranks than this are refused, because a wrong column would take all memory."""


@dataclass(frozen=True)
class StepTimes:
    """The compute times of a file."""

    seconds: Tensor
    """Shape (steps, ranks), NaN where the file has no time."""
    steps: list[int]
    """The steps' numbers in the file, ascending; not always 0, 1, 2, …"""
    ranks: list[int]
    """The ranks' numbers, ascending."""
    names: list[str] | None
    """A name for each rank, if the file has such a column."""
    repeated: int
    """Number of lines that gave a time for a step and rank that had one; the last one counts."""


def run_analyze(file: str, *, as_json: bool = False) -> int:
    """Print the verdict on the times in `file`; returns the exit code.

    Raises:
        UsageError: if the file cannot be read, names the line.
    """
    times = read_times(file)
    found = in_numbers_of(times, find_stragglers(times.seconds, times.names))
    if as_json:
        print(json.dumps(as_document(times, found), indent=2))
        return 0
    print(headline(times, found))
    for note in notes(times):
        print(note)
    if found:
        print_table(table_of(found))
    return 0


def read_times(file: str) -> StepTimes:
    """Read the columns step, rank and seconds, in any order and case, and the ranks' names if there is such a column.

    Raises:
        UsageError: if the file is missing, has other columns, or a value cannot be one; names file and line.
    """
    path = Path(file)
    if path.is_dir():
        raise UsageError(f"{file} is a folder; name a CSV file with the columns step, rank and seconds")
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return _collect(file, _rows(file, lines))
    except FileNotFoundError:
        raise UsageError(f"{file} does not exist; name a CSV file with the columns step, rank and seconds") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(
            f"{file} is no text in UTF-8; name a CSV file with the columns step, rank and seconds"
        ) from None
    except csv.Error as error:
        raise UsageError(f"{file} is no CSV file ({error}); write one line for each step and rank") from None


def in_numbers_of(times: StepTimes, found: list[Straggler]) -> list[Straggler]:
    """Return `found` with the file's own numbers of ranks and steps, in place of positions in the table."""
    return [
        replace(
            straggler,
            rank=times.ranks[straggler.rank],
            first_step=times.steps[straggler.first_step],
            last_step=times.steps[straggler.last_step],
        )
        for straggler in found
    ]


def headline(times: StepTimes, found: list[Straggler]) -> str:
    """Return the verdict in one sentence."""
    if found:
        more = f"; {len(found) - 1} more below" if len(found) > 1 else ""
        return f"{found[0]}{more}"
    steps, ranks = times.seconds.shape
    if ranks < 2:
        return (
            f"nothing to compare: the file has times of rank {times.ranks[0]} alone, and slow means slower than others"
        )
    if steps < SHORTEST:
        return f"nothing to conclude from {steps} step{'s' * (steps > 1)}: at least {SHORTEST} are needed"
    return f"no straggler among {ranks} ranks in {steps} steps"


def notes(times: StepTimes) -> list[str]:
    """Return a sentence for each thing about the file that the reader of the verdict has to know."""
    found = []
    absent = times.ranks[-1] + 1 - len(times.ranks)
    if absent:
        there = set(times.ranks)
        first = [
            str(rank) for rank in itertools.islice((r for r in itertools.count() if r not in there), min(absent, 5))
        ]
        more = f" and {absent - len(first)} more" if absent > len(first) else ""
        found.append(f"note: the file has no line of rank{'s' * (absent > 1)} {', '.join(first)}{more}")
    if missing := int(times.seconds.isnan().sum()):
        found.append(
            f"note: {missing} of {times.seconds.numel()} times are missing ({missing / times.seconds.numel():.1%})"
        )
    if times.repeated:
        found.append(f"note: {times.repeated} times are there twice for a step and rank; the last one counts")
    return found


def table_of(found: list[Straggler]) -> Table:
    """Return a table with a row for each straggler."""
    table = Table()
    for title in ("rank", "name", "kind", "first step", "last step", "slow steps", "slowdown", "seconds lost"):
        table.add_column(title, justify="left" if title in ("name", "kind") else "right", no_wrap=True)
    for one in found:
        table.add_row(
            str(one.rank),
            Text(one.name or "–"),  # a name is no markup
            one.kind,
            str(one.first_step),
            str(one.last_step),
            str(one.steps_slow),
            f"{one.slowdown:.2f}x",
            f"{one.seconds_lost:.3g}",
        )
    return table


def as_document(times: StepTimes, found: list[Straggler]) -> dict[str, Any]:
    """Return the verdict as a document for programs."""
    return {
        "headline": headline(times, found),
        "steps": len(times.steps),
        "ranks": len(times.ranks),
        "straggler_rank": found[0].rank if found else None,
        "stragglers": [asdict(straggler) for straggler in found],
        "notes": notes(times),
    }


def _collect(file: str, rows: Iterator[tuple[int, int, float, str]]) -> StepTimes:
    """Return the table of `rows`, each a step, a rank, a time and a name."""
    step_column, rank_column, time_column = array("q"), array("q"), array("d")
    names: dict[int, str] = {}
    for step, rank, seconds, name in rows:
        step_column.append(step)
        rank_column.append(rank)
        time_column.append(seconds)
        if name:
            names[rank] = name
    if not step_column:
        raise UsageError(f"{file} has no times; write one line for each step and rank below the names of the columns")
    steps, row = torch.frombuffer(step_column, dtype=torch.int64).unique(return_inverse=True)
    ranks, column = torch.frombuffer(rank_column, dtype=torch.int64).unique(return_inverse=True)
    if (size := len(steps) * len(ranks)) > MOST_TIMES:
        raise UsageError(
            f"{file} has {len(steps)} different steps and {len(ranks)} different ranks, which is more than can be "
            f"compared; is the column 'step' a number that the ranks share?"
        )
    place = row * len(ranks) + column
    order = place.argsort(stable=True)
    last = torch.cat([place[order].diff() != 0, torch.tensor([True])])
    table = torch.full((size,), torch.nan, dtype=torch.float64)
    table[place[order][last]] = torch.frombuffer(time_column, dtype=torch.float64)[order][last]
    numbers = ranks.tolist()
    return StepTimes(
        seconds=table.reshape(len(steps), len(ranks)),
        steps=steps.tolist(),
        ranks=numbers,
        names=[names.get(rank, "") for rank in numbers] if names else None,
        repeated=int((~last).sum()),
    )


def _rows(file: str, lines: TextIO) -> Iterator[tuple[int, int, float, str]]:
    """Read the lines below the names of the columns."""
    header = lines.readline()
    if not header.strip():
        raise UsageError(f"{file} is empty; write the columns step, rank and seconds")
    delimiter = max(",;\t", key=header.count)
    titles = [title.strip().lower() for title in next(csv.reader([header], delimiter=delimiter))]
    places = [_place_of(file, name, titles) for name in COLUMNS]
    named = next((titles.index(name) for name in NAME_COLUMNS if name in titles), None)
    step, rank, seconds = places
    reader = csv.reader(lines, delimiter=delimiter)
    for row in reader:
        if not any(row):
            continue
        line = f"{file}, line {reader.line_num + 1}"
        if len(row) <= max(places):
            raise UsageError(
                f"{line} has {len(row)} of {len(titles)} columns; give step, rank and seconds in each line"
            )
        name = row[named].strip() if named is not None and named < len(row) else ""
        yield _count(line, "step", row[step]), _count(line, "rank", row[rank]), _seconds(line, row[seconds]), name


def _place_of(file: str, name: str, titles: list[str]) -> int:
    if titles.count(name) != 1:
        there = f"the column {name!r} {titles.count(name)} times" if name in titles else f"no column {name!r}"
        shown = ", ".join(title or "''" for title in titles[:8])
        raise UsageError(f"{file} has {there} (its first line is: {shown:.120}); name the columns step, rank, seconds")
    return titles.index(name)


def _count(line: str, column: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        try:  # 3.0, as programs write a column that had missing values
            whole = float(text)
            number = int(whole) if whole.is_integer() else -1
        except (ValueError, OverflowError):
            number = -1
    if not 0 <= number < 2**63:
        raise UsageError(f"{line}: {column} is {text.strip()[:40]!r}; give a whole number from 0 on")
    return number


def _seconds(line: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        if text.strip().lower() in MISSING:
            return math.nan
        raise UsageError(
            f"{line}: seconds is {text.strip()[:40]!r}; give a number, or nothing if it is missing"
        ) from None
    if number < 0 or math.isinf(number):
        raise UsageError(
            f"{line}: seconds is {text.strip()[:40]}; give a finite number >= 0, or nothing if it is missing"
        )
    return number
