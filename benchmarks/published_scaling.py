"""Predictions of the scaling planner against published results: ``python benchmarks/published_scaling.py FILE.csv``.

Each source is predicted with constants that were fitted to the other sources only.
"""

from __future__ import annotations

import json as json_text
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from harness import parser_of, save
from paceline.core.messages import counted
from paceline.core.output_files import new_figure, write_chart
from paceline.core.tables import new_table, print_table
from paceline.errors import UsageError
from paceline.planner.predictions import RULE_OF_THUMB
from published.rows import Row, read
from published.validation import Checked, by_source, cross_validate, score

WORST = 10
NAMED = 7
"""Number of sources with a separate color."""


def main() -> None:
    parser = parser_of(__doc__ or "", rounds=None)
    parser.add_argument("file", help="CSV file of published results")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    parser.add_argument("--plot", metavar="FILE", help="draw a chart (.svg, .png or .pdf)")
    arguments = parser.parse_args()
    try:
        result = report_validation(arguments.file, arguments.json, arguments.plot)
    except UsageError as error:
        parser.error(str(error))
    if arguments.save:
        save("published-scaling", result, ranks=1)


def report_validation(path: str, json: bool, plot: str | None) -> dict[str, Any]:
    """Print and return how well the planner predicts the rows of a CSV file, and draw them if asked to."""
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
    result = document(checked, skipped)
    if json:
        print(json_text.dumps(result, indent=2))
    else:
        _print(result)
    if plot is not None:
        write_chart("--plot", plot, plot_validation(checked))
    return result


def document(rows: Sequence[Checked], skipped: int) -> dict[str, Any]:
    """Return the validation for JSON."""
    predictors = {
        "planner": [row.predicted for row in rows],
        "rule of thumb": [row.rule for row in rows],
        "median by log2 of the devices": [row.by_size for row in rows if row.by_size is not None],
    }
    sources = by_source(rows)
    return {
        "rows": len(rows),
        "skipped": skipped,
        "errors": {name: asdict(score(rows, made)) for name, made in predictors.items() if len(made) == len(rows)},
        "coverage": {
            "rows": fmean(row.is_covered for row in rows),
            "sources": fmean(entry.covered for entry in sources),
        },
        "rule of thumb": [_compared([row.row for row in rows], *rule) for rule in RULE_OF_THUMB],
        "sources": [asdict(entry) | {"is_best": entry.is_best} for entry in sources],
        "worst": [
            {"row": row.row.title, "source": row.row.source, "predicted": row.predicted, "reported": row.row.efficiency}
            for row in sorted(rows, key=lambda row: -abs(row.error))[:WORST]
        ],
    }


def _compared(rows: Sequence[Row], least: int, most: int | None, low: float, high: float) -> dict[str, Any]:
    """Compare a rule of thumb with the results of plain data parallelism relative to one device."""
    plain = [row for row in rows if row.baseline == 1 and not row.is_sharded]
    found = sorted(row.efficiency for row in plain if least <= row.devices <= (most or row.devices))
    count = len(found)
    shares = {"inside": sum(low <= value <= high for value in found), "below": sum(value < low for value in found)}
    points = {
        name: found[int(share * (count - 1))] for name, share in (("p10", 0.1), ("median", 0.5), ("p90", 0.9)) if found
    }
    return {"devices": [least, most], "low": low, "high": high, "rows": count, **points, **shares}


def _print(result: dict[str, Any]) -> None:
    table = new_table(["predictor", "median", "p90", "median, by source", "p90, by source"], words=("predictor",))
    for name, errors in result["errors"].items():
        table.add_row(name, *(f"{value:.2f}" for value in errors.values()))
    print_table(table)
    skipped, sources = result["skipped"], counted(len(result["sources"]), "source")
    left_out = f"; {skipped} without an efficiency or with flag=suspect left out" if skipped else ""
    best, covered = sum(entry["is_best"] for entry in result["sources"]), result["coverage"]
    notes = (
        f"{counted(result['rows'], 'row')} of {sources}{left_out}. Errors in points of efficiency.",
        f"Better than the trivial predictors on {best} of {sources}.",
        f"The 80 % interval covers {covered['rows']:.1%} of the rows, {covered['sources']:.1%} if all sources weigh "
        "the same.",
    )
    Console().print("", *notes, "", sep="\n", soft_wrap=True, highlight=False, markup=False)
    table = new_table(["source", "rows", "planner", "rule of thumb", "by log2", "bias", "covered"], words=("source",))
    for entry in result["sources"]:
        errors = ["" if entry[name] is None else f"{entry[name]:.1f}" for name in ("model", "rule", "by_size")]
        table.add_row(
            Text(entry["source"]), str(entry["rows"]), *errors, f"{entry['bias']:+.1f}", f"{entry['covered']:.0%}"
        )
    print_table(table)
    print()
    table = new_table(["worst rows", "source", "predicted", "reported"], words=("worst rows", "source"))
    for row in result["worst"]:
        table.add_row(Text(row["row"]), Text(row["source"]), f"{row['predicted']:.0%}", f"{row['reported']:.0%}")
    print_table(table)


def plot_validation(rows: Sequence[Checked]) -> Figure:
    """Draw predicted over reported efficiency, with the intervals."""
    figure = new_figure(7, 8.5)
    axes = figure.add_subplot()
    sources = [source for source, _ in Counter(row.row.source for row in rows).most_common()]
    top = max(1.05, *(row.row.efficiency for row in rows))
    axes.plot([0, top], [0, top], color="gray", linewidth=1)
    for place, source in enumerate(sources):
        own = [row for row in rows if row.row.source == source]
        color = f"C{place}" if place < NAMED else "0.6"
        label = source if place < NAMED else ("other sources" if place == NAMED else None)
        reported = [row.row.efficiency for row in own]
        axes.vlines(reported, [row.low for row in own], [row.high for row in own], color=color, alpha=0.08, linewidth=2)
        axes.plot(reported, [row.predicted for row in own], ".", color=color, markersize=4, label=label)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_aspect("equal")
    axes.set_xlabel("reported efficiency")
    axes.set_ylabel("predicted without the row's source; bars: 80 % interval")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return figure


if __name__ == "__main__":
    main()
