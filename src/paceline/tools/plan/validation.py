"""Presentation of a validation: predicted against published efficiencies."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from paceline.core.output.charts import write_chart
from paceline.core.output.tables import new_table, print_table
from paceline.core.output.wording import counted
from paceline.planner.published.rows import read
from paceline.planner.published.validation import Checked, Score, by_source, coverage, cross_validate, score
from paceline.tools.plan.plot import plot_validation

WORST = 10


def report_validation(path: str, json: bool, plot: str | None) -> None:
    """Print how well the planner predicts the rows of a CSV file, and draw them if asked to."""
    rows, skipped = read(path)
    checked: list[Checked] = []
    console = Console(stderr=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads are slower on tensors this small
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("fitting", total=len(rows))
            for source in cross_validate(rows):
                checked += source
                progress.advance(task, len(source))
    finally:
        torch.set_num_threads(threads)
    if json:
        print(json_text.dumps(document(checked, skipped), indent=2))
    else:
        _print(checked, skipped)
    if plot is not None:
        write_chart("--plot", plot, plot_validation(checked))


def scores(rows: Sequence[Checked]) -> dict[str, Score]:
    """Return the errors of the model and of the trivial predictors."""
    result = {
        "planner": score(rows, [row.predicted for row in rows]),
        "rule of thumb": score(rows, [row.rule for row in rows]),
    }
    sizes = [row.by_size for row in rows if row.by_size is not None]
    return result | ({"median by log2 of the devices": score(rows, sizes)} if len(sizes) == len(rows) else {})


def document(rows: Sequence[Checked], skipped: int) -> dict[str, Any]:
    """Return the validation for JSON."""
    covered, covered_by_source = coverage(rows)
    return {
        "rows": len(rows),
        "skipped": skipped,
        "errors": {name: asdict(value) for name, value in scores(rows).items()},
        "coverage": {"rows": covered, "sources": covered_by_source},
        "sources": [asdict(entry) | {"is_best": entry.is_best} for entry in by_source(rows)],
        "worst": [
            {"source": row.row.source, "row": row.row.title, "predicted": row.predicted, "reported": row.row.efficiency}
            for row in worst(rows)
        ],
    }


def worst(rows: Sequence[Checked]) -> Sequence[Checked]:
    """Return the rows with the largest errors."""
    return sorted(rows, key=lambda row: -abs(row.error))[:WORST]


def _print(rows: Sequence[Checked], skipped: int) -> None:
    sources, (covered, by_sources) = by_source(rows), coverage(rows)
    left_out = f"; {skipped} without an efficiency or with flag=suspect left out" if skipped else ""
    best = sum(entry.is_best for entry in sources)
    notes = (
        f"{counted(len(rows), 'row')} of {counted(len(sources), 'source')}{left_out}. Errors in points of efficiency.",
        f"Better than the trivial predictors on {best} of {counted(len(sources), 'source')}.",
        f"The 80 % interval covers {covered:.1%} of the rows, {by_sources:.1%} if all sources weigh the same.",
    )
    table = new_table(["predictor", "median", "p90", "median, by source", "p90, by source"], words=("predictor",))
    for name, error in scores(rows).items():
        table.add_row(name, *(f"{value:.2f}" for value in vars(error).values()))
    print_table(table)
    print()
    for note in notes:
        Console().print(note, soft_wrap=True, highlight=False, markup=False)
    print()
    table = new_table(["source", "rows", "planner", "rule of thumb", "by log2", "bias", "covered"], words=("source",))
    for entry in sources:
        errors = [digits_or_nothing(value) for value in (entry.model, entry.rule, entry.by_size)]
        table.add_row(entry.source, str(entry.rows), *errors, f"{entry.bias:+.1f}", f"{entry.covered:.0%}")
    print_table(table)
    print()
    table = new_table(["worst rows", "source", "predicted", "reported"], words=("worst rows", "source"))
    for row in worst(rows):
        table.add_row(row.row.title, row.row.source, f"{row.predicted:.0%}", f"{row.row.efficiency:.0%}")
    print_table(table)


def digits_or_nothing(value: float | None) -> str:
    """Return a number with one decimal, or an empty string."""
    return "" if value is None else f"{value:.1f}"
