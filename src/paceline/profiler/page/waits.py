"""The heat map of waiting, with a cell for each pair of ranks, and the ranks that cost the others most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.profiler.analysis.facts import Facts
from paceline.profiler.report.formatting import ms

SHADES = 8
GUTTER = 44.0
"""Space for the rank numbers, at the left and at the top."""
SPELLED_OUT = 10
"""Maximum number of ranks for cells that are large enough to show their figures."""
FIRST = 6
"""Maximum number of ranks in the table of the costliest ranks."""


def picture(facts: Facts) -> dict[str, Any] | None:
    """Return the contents of the section; None if no rank could wait for another."""
    rows = facts.accounts.waited_for
    if len(rows) < 2:
        return None
    cell = min(72.0, max(8.0, 520 / len(rows)))
    every = next(number for number in (1, 2, 4, 8, 16, 32, 64, 128, 10**9) if number * cell >= 22)  # legible numbers
    middles = [GUTTER + cell * (at + 0.5) for at in range(len(rows))]
    figures = []
    if len(rows) <= SPELLED_OUT:
        figures = [
            (middles[other], middles[at], ms(seconds).removesuffix(" ms") if seconds > 0 else "0")
            for at, row in enumerate(rows)
            for other, seconds in enumerate(row)
            if at != other
        ]
    return {
        "late": _late_ranks(rows),
        "size": GUTTER + cell * len(rows),
        "gutter": GUTTER,
        "cell": cell,
        "shades": _shades(rows, cell),
        "figures": figures,
        "numbers": [(middle, rank) for rank, middle in enumerate(middles)][::every],
        "data": [[float(f"{1e3 * value:.3g}") for value in row] for row in rows],
    }


def _late_ranks(rows: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Return the ranks that others wait for, costliest first, each with the rank that waits for it longest."""
    entries = []
    for rank in range(len(rows)):
        if caused := sum(row[rank] for row in rows) / (len(rows) - 1):
            waiting = max(range(len(rows)), key=lambda other: rows[other][rank])
            entries.append({"rank": rank, "caused": caused, "longest": rows[waiting][rank], "waiting": waiting})
    return sorted(entries, key=lambda entry: -entry["caused"])[:FIRST]


def _shades(rows: Sequence[Sequence[float]], cell: float) -> list[tuple[int, str]]:
    """Return one SVG path per shade, because separate elements would be too many: 512 ranks have 262,144 cells."""
    longest, shades = max(map(max, rows)), dict[int, list[str]]()
    for at, row in enumerate(rows):
        for other, seconds in enumerate(row):
            if seconds and (shade := round(SHADES * seconds / longest)) > 0:
                x, y = GUTTER + cell * other, GUTTER + cell * at
                shades.setdefault(shade, []).append(f"M{x:g} {y:g}h{cell:g}v{cell:g}h-{cell:g}z")
    return [(shade, "".join(paths)) for shade, paths in sorted(shades.items())]
