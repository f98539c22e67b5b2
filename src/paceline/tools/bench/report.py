"""Presentation of the results: a table, and values for JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from paceline.comm.algorithms.cost import Model, crossovers
from paceline.core.output.charts import write_chart
from paceline.core.output.files import write_file
from paceline.core.output.tables import new_table, print_table
from paceline.core.output.wording import counted
from paceline.tools.bench.bench_config import BenchConfig
from paceline.tools.bench.plot import plot
from paceline.tools.bench.rows import Row

COLUMNS = ("bytes", "variant", "time µs", "±", "algbw", "busbw", "#wrong", "model µs")
"""Columns as in nccl-tests. The title contains what all rows have in common."""
CLOSE = 0.2
"""Maximum relative error for a modeled time to count as accurate."""


def report(rows: Sequence[Row], model: Model | None, cores: int, config: BenchConfig) -> None:
    """Print the tables and write the requested files."""
    for op in config.ops:
        print_table(table(op, [row for row in rows if row.op == op], cores), keys=2)
        print()
    if model is not None:
        Console().print(describe(model, rows), highlight=False)
    write_file("--json", config.json, json.dumps(document(rows, model, cores), indent=2) + "\n")
    if config.plot is not None:
        write_chart("--plot", config.plot, plot(rows, cores))


def table(op: str, rows: Sequence[Row], cores: int) -> Table:
    """Return a table in the style of nccl-tests, with a line for each variant and size."""
    kind = "float32, sum" if "reduce" in op else "float32"
    title = f"{op} ({kind}), {counted(rows[0].ranks, 'rank')} on {counted(cores, 'core')}; bandwidths in GB/s"
    caption = f"time: median of {counted(len(rows[0].times), 'round')}; ±: half the distance between its quartiles"
    result = new_table(COLUMNS, title=title, caption=caption, words=("variant",), space=0)
    fastest = {size: min(row.seconds for row in rows if row.nbytes == size) for size in {row.nbytes for row in rows}}
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        modelled = row.model_seconds
        result.add_row(
            str(row.nbytes),
            row.variant,
            f"{1e6 * row.seconds:.1f}",
            f"{row.spread:.0%}",
            f"{row.algbw:.3f}",
            f"{row.busbw:.3f}",
            str(row.wrong),
            "" if modelled is None else f"{1e6 * modelled:.1f}",
            style="bold" if row.seconds == fastest[row.nbytes] else "",
            end_section=following is not None and following.nbytes != row.nbytes,
        )
    return result


def describe(model: Model, rows: Sequence[Row]) -> str:
    """Describe the fitted model, its accuracy, and the best all-reduce for each range of sizes."""
    best = [f"{name} from {size:,} bytes" for size, name in crossovers(rows[0].ranks, model)]
    errors = [abs(row.model_seconds / row.seconds - 1) for row in rows if row.model_seconds is not None]
    close = sum(error <= CLOSE for error in errors)
    return (
        f"model fitted to our algorithms: {1e6 * model.alpha:.1f} µs per message, "
        f"{1e9 * model.beta:.3f} ns per byte sent, {1e9 * model.gamma:.3f} ns per byte reduced\n"
        f"within {CLOSE:.0%} of the measured time in {close} of {len(errors)} cases\n"
        f"its best all-reduce: {', '.join(best)}"
    )


def document(rows: Sequence[Row], model: Model | None, cores: int) -> dict[str, object]:
    """Return the values for JSON, in seconds and GB/s."""
    return {
        "ranks": rows[0].ranks,
        "cores": cores,
        "torch": torch.__version__,
        "model": None if model is None else model._asdict(),
        "rows": [
            asdict(row) | {name: getattr(row, name) for name in ("seconds", "quartiles", "algbw", "busbw")}
            for row in rows
        ],
    }
