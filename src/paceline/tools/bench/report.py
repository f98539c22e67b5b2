"""Presentation of the results: a table, and values for JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.table import Table

from paceline.core.output.charts import write_chart
from paceline.core.output.files import write_file
from paceline.core.output.tables import new_table, print_table
from paceline.core.output.wording import counted
from paceline.tools.bench.bench_config import BenchConfig
from paceline.tools.bench.plot import plot
from paceline.tools.bench.rows import Row

COLUMNS = ("bytes", "variant", "time µs", "±", "algbw", "busbw", "#wrong")
"""Columns as in nccl-tests. The title contains what all rows have in common."""


def report(rows: Sequence[Row], cores: int, config: BenchConfig) -> None:
    """Print the tables and write the requested files."""
    for op in config.ops:
        print_table(table(op, [row for row in rows if row.op == op], cores), keys=2)
        print()
    write_file("--json", config.json, json.dumps(document(rows, cores), indent=2) + "\n")
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
        result.add_row(
            str(row.nbytes),
            row.variant,
            f"{1e6 * row.seconds:.1f}",
            f"{row.spread:.0%}",
            f"{row.algbw:.3f}",
            f"{row.busbw:.3f}",
            str(row.wrong),
            style="bold" if row.seconds == fastest[row.nbytes] else "",
            end_section=following is not None and following.nbytes != row.nbytes,
        )
    return result


def document(rows: Sequence[Row], cores: int) -> dict[str, object]:
    """Return the values for JSON, in seconds and GB/s."""
    return {
        "ranks": rows[0].ranks,
        "cores": cores,
        "torch": torch.__version__,
        "rows": [
            asdict(row) | {name: getattr(row, name) for name in ("seconds", "quartiles", "algbw", "busbw")}
            for row in rows
        ],
    }
