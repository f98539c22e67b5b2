"""The section on waiting: a picture with a cell for each pair of ranks, and the ranks that cost others most."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.core.output.html import data_block
from paceline.profiler.page.elements import Section, metered, table
from paceline.profiler.report.formatting import ms
from paceline.profiler.report.report import Report

SHADES = 8
GUTTER = 44.0
"""Space for the ranks' numbers, left and above."""
SPELLED_OUT = 10
"""Most ranks for which a cell has room for its figure."""
FIRST = 6
"""Most ranks in the table, which has the costliest."""


def section(report: Report) -> Section | None:
    """Draw the picture, unless there is no one to wait for."""
    rows = report.waited_for
    if len(report.ranks) < 2 or not rows:
        return None
    numbers = [one.rank for one in report.ranks]
    caused = [sum(row[at] for row in rows) / (len(rows) - 1) for at in range(len(rows))]
    if not any(map(any, rows)):
        return Section("waits", "Who waits for whom", "Waits", "<p>No rank waited for another.</p>")
    order = sorted(range(len(rows)), key=lambda at: -caused[at])
    most = caused[order[0]]
    cells = [
        [f"rank {numbers[at]}", metered(ms(caused[at]), caused[at] / most, "bubble"), _longest(rows, numbers, at)]
        for at in order[:FIRST]
        if caused[at] > 0
    ]
    heads = ["late rank", "each other one waits", "longest"]
    values = {"ranks": numbers, "rows": [[float(f"{1e3 * one:.3g}") for one in row] for row in rows]}
    body = (
        '<p class="reading">A row waits for a column: the stronger the colour, the longer, in a mean step.</p>'
        f'<div class="beside"><div>{_picture(rows, numbers)}</div>'
        f"{table(heads, cells, 'Ranks that others wait for')}</div>{data_block('waits-data', values)}"
    )
    return Section("waits", "Who waits for whom", "Waits", body)


def _longest(rows: Sequence[Sequence[float]], numbers: Sequence[int], late: int) -> str:
    waiting = max(range(len(rows)), key=lambda at: rows[at][late])
    return f"{ms(rows[waiting][late])}, rank {numbers[waiting]}"


def _picture(rows: Sequence[Sequence[float]], numbers: Sequence[int]) -> str:
    count = len(rows)
    cell = min(72.0, max(8.0, 520 / count))
    size, most = GUTTER + cell * count, max(map(max, rows))
    shades: dict[int, list[str]] = {}
    figures = []
    for at, row in enumerate(rows):
        for other, seconds in enumerate(row):
            x, y = GUTTER + cell * other, GUTTER + cell * at
            # One path for all cells of a shade, because 512 ranks have 262,144 cells.
            if (shade := round(SHADES * seconds / most)) > 0:
                shades.setdefault(shade, []).append(f"M{x:g} {y:g}h{cell:g}v{cell:g}h-{cell:g}z")
            if count <= SPELLED_OUT and at != other:
                said = ms(seconds).removesuffix(" ms") if seconds > 0 else "0"
                figures.append(f'<text x="{x + cell / 2:g}" y="{y + cell / 2 + 5:g}" class="in">{said}</text>')
    paths = "".join(f'<path class="heat-{shade}" d="{"".join(parts)}"/>' for shade, parts in sorted(shades.items()))
    kind = "heat own-tip small" if size > 400 else "heat own-tip"  # small: on a phone it shrinks, its numbers do not
    return (
        f'<svg class="{kind}" viewBox="0 0 {size:g} {size:g}" width="{size:g}" role="img" '
        f'data-width="{size:g}" data-gutter="{GUTTER:g}" data-cell="{cell:g}" '
        f'aria-label="{escape("Seconds that each rank waits for each other one; the table has the largest")}">'
        f'<rect class="empty" x="{GUTTER:g}" y="{GUTTER:g}" width="{cell * count:g}" height="{cell * count:g}"/>'
        f"{paths}{_numbers(numbers, cell)}{''.join(figures)}</svg>"
    )


def _numbers(numbers: Sequence[int], cell: float) -> str:
    """Write the ranks' numbers at the edges, as many as can be read."""
    every = next(one for one in (1, 2, 4, 8, 16, 32, 64, 128, 10**9) if one * cell >= 22)
    said = []
    for at in range(0, len(numbers), every):
        middle = GUTTER + cell * (at + 0.5)
        said.append(f'<text x="{middle:g}" y="{GUTTER - 6:g}" text-anchor="middle">{numbers[at]}</text>')
        said.append(f'<text x="{GUTTER - 6:g}" y="{middle + 4:g}" text-anchor="end">{numbers[at]}</text>')
    said.append(f'<text x="{GUTTER:g}" y="14">late rank →</text>')
    return "".join(said)
