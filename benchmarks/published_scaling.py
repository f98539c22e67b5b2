"""Predictions of the scaling planner against published results: ``python benchmarks/published_scaling.py FILE.csv``.

Each source is predicted with constants that were fitted to the other sources only.
"""

from __future__ import annotations

import json as json_text
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
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
from paceline.planner.calibration import SPEEDS, interval_of
from published.fit import Fits, growths, profiled_intervals
from published.rows import Row, read
from published.speeds import fitted_speeds, of_family, read_pairs, shares_inside
from published.validation import RULE_OF_THUMB, Checked, by_source, covered, cross_validate, score

WORST = 10
FRESH = Path(__file__).parent / "published" / "scaling.csv"
"""Results of sources that were never fitted."""
NAMED = 7
"""Number of sources with a separate color."""


def main() -> None:
    parser = parser_of(__doc__ or "", rounds=None)
    parser.add_argument("file", help="CSV file of published results")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    parser.add_argument("--plot", metavar="FILE", help="draw a chart (.svg, .png or .pdf)")
    parser.add_argument("--fit", action="store_true", help="print the constants of paceline.planner.calibration")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more threads are slower on tensors this small
    try:
        if arguments.fit:
            print_fit(arguments.file)
            return
        result = report_validation(arguments.file, arguments.json, arguments.plot)
    except UsageError as error:
        parser.error(str(error))
    if arguments.save:
        save("published-scaling", result, ranks=1)


def print_fit(path: str) -> None:
    """Print the constants fitted to the rows of a file, and to the speeds of one device."""
    rows, _ = read(path)
    fits = Fits(rows)
    print(fits.without())
    for speed in ("measured", "assumed"):
        print(f"{speed.upper()} = {fits.intervals(speed)}")
    print(f"PROFILED = {profiled_intervals(growths(rows, fits.without()))}")
    print(f"SPEEDS = {fitted_speeds(read_pairs())}")


def report_validation(path: str, json: bool, plot: str | None) -> dict[str, Any]:
    """Print and return how well the planner predicts the rows of a CSV file, and draw them if asked to."""
    rows, skipped = read(path)
    fresh = [row for row in read(str(FRESH))[0] if row.is_timed]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("fitting", total=len(rows) + len(fresh))

        def checked(rows: Sequence[Row]) -> tuple[list[Checked], list[Checked]]:
            found: tuple[list[Checked], list[Checked]] = ([], [])
            for of_source in cross_validate(rows):
                for all_of_speed, of_speed in zip(found, of_source, strict=True):
                    all_of_speed += of_speed
                progress.advance(task, len(of_source[0]))
            return found

        measured, assumed = checked(rows)
        pairs = read_pairs()
        result = document(measured, assumed) | {
            "skipped": skipped,
            "growth": growth(rows),
            "fresh": document(*checked(fresh)),
            "speeds": {
                str(name): {"pairs": len(of_family(pairs, name)), **shares_inside(pairs, name)} for name in SPEEDS
            },
        }
    if json:
        print(json_text.dumps(result, indent=2))
    else:
        _print(result)
    if plot is not None:
        write_chart("--plot", plot, plot_validation(measured))
    return result


def growth(rows: Sequence[Row]) -> dict[str, float]:
    """Return how well results on more devices follow from a smaller result of the same job."""
    pairs = growths(rows)
    shares = []
    for source in {pair.source for pair in pairs}:
        others = [pair for pair in pairs if pair.source != source]
        if not others:
            return {}
        intervals, own = profiled_intervals(others), [pair for pair in pairs if pair.source == source]
        ends = [interval_of(intervals, 2, pair.made.efficiency) for pair in own]
        relative = [pair.reported / pair.made.efficiency for pair in own]
        shares.append(fmean(low <= value <= high for value, (low, high) in zip(relative, ends, strict=True)))
    errors = [100 * abs(pair.made.efficiency - pair.reported) for pair in pairs]
    if not errors:
        return {}
    return {
        "pairs": len(pairs),
        "median": median(errors),
        "held_out_inside": fmean(shares),
        "width": 100 * median(pair.made.high - pair.made.low for pair in pairs),
    }


def document(rows: Sequence[Checked], assumed: Sequence[Checked]) -> dict[str, Any]:
    """Return the validation for JSON, with the published and with the assumed speed of one device."""
    predictors = {
        "planner": [row.made.efficiency for row in rows],
        "shipped constants": [row.shipped.efficiency for row in rows],
        "assumed speed": [row.made.efficiency for row in assumed],
        "rule of thumb": [row.rule for row in rows],
        "median by log2 of the devices": [row.by_size for row in rows if row.by_size is not None],
    }
    sources, from_flags = by_source(rows), by_source(assumed)
    return {
        "rows": len(rows),
        "errors": {name: asdict(score(rows, made)) for name, made in predictors.items() if len(made) == len(rows)},
        "coverage": covered(rows),
        "coverage_assumed": covered(assumed),
        "coverage_rows": fmean(row.is_covered for row in rows),
        "better_than_both": sum(entry.is_best for entry in sources),
        "assumed_better_than_rule": sum(entry.model < entry.rule for entry in from_flags),
        "rule of thumb": [_compared([row.row for row in rows], *rule) for rule in RULE_OF_THUMB],
        "sources": [asdict(entry) | {"is_best": entry.is_best} for entry in sources],
        "worst": [
            {
                "row": row.row.title,
                "source": row.row.source,
                "predicted": row.made.efficiency,
                "reported": row.row.efficiency,
            }
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
    skipped = result["skipped"]
    left_out = f"; {skipped} without an efficiency or a device, or with flag=suspect, left out" if skipped else ""
    for title, part in ((f"The file{left_out}", result), ("Sources that were never fitted", result["fresh"])):
        table = new_table(["predictor", "median", "p90", "median, by source", "p90, by source"], words=("predictor",))
        for name, errors in part["errors"].items():
            table.add_row(name, *(f"{value:.2f}" for value in errors.values()))
        sources = counted(len(part["sources"]), "source")
        inside = ", ".join(f"{name} {share:.0%}" for name, share in part["coverage"].items() if share is not None)
        notes = (
            f"{title}: {counted(part['rows'], 'row')} of {sources}. Errors in points of efficiency.",
            f"Better than both trivial predictors on {part['better_than_both']} of {sources}; with the assumed speed "
            f"of one device, better than the rule of thumb on {part['assumed_better_than_rule']}.",
            f"The 80 % interval covers {part['coverage_rows']:.0%} of the rows; by source and devices: {inside}.",
        )
        Console().print(*notes, "", sep="\n", soft_wrap=True, highlight=False, markup=False)
        print_table(table)
        print()
    for name, share in result["speeds"].items():
        print(
            f"speed of one device, {name}: {share['pairs']} pairs, {share['shipped']:.0%} inside the interval; "
            f"{share['held_out']:.0%} if their source is held out"
        )
    print()
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
        axes.vlines(
            reported,
            [row.made.low for row in own],
            [row.made.high for row in own],
            color=color,
            alpha=0.08,
            linewidth=2,
        )
        axes.plot(reported, [row.made.efficiency for row in own], ".", color=color, markersize=4, label=label)
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
