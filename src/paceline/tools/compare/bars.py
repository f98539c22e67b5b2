"""The plot of a comparison: a bar for each mode's throughput relative to one device, with what of it waits."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.tools.compare.comparison import Row
from paceline.tools.explain.pictures.scene import Scene, box, text
from paceline.tools.explain.pictures.sheet import sheet

LEFT, WIDE, ROW, BAR = 130.0, 460.0, 46.0, 22.0
"""Room for the modes' names, the longest bar, the distance of two bars, and a bar's height."""
BESIDE = 250.0
"""Room for the figures at the ends of bars."""


def draw(rows: Sequence[Row], target: str) -> str:
    """Draw time per batch of every mode as SVG; shorter is faster."""
    longest = max(row.seconds_per_batch for row in rows)
    parts = []
    for number, row in enumerate(rows):
        y = 10 + ROW * number
        length = WIDE * row.seconds_per_batch / longest
        waiting = length * (row.waiting_share or 0.0)
        parts.append(text(LEFT - 10, y + 16, row.mode, "heading", "end"))
        hint = f"{row.mode}: {1e3 * row.seconds_per_batch:,.1f} ms per batch, {row.waiting_share or 0:.1%} waiting"
        parts.append(f"<g><title>{escape(hint)}</title>{box(LEFT, y, length, BAR, 'k0')}")
        if waiting:
            parts.append(box(LEFT + length - waiting, y, waiting, BAR, "k1"))
        parts.append("</g>")
        parts.append(text(LEFT + length + 8, y + 10, f"{1e3 * row.seconds_per_batch:,.1f} ms"))
        if row.speedup is not None and row.efficiency is not None:
            parts.append(
                text(LEFT + length + 8, y + 24, f"{row.speedup:.2f} × one device, efficiency {row.efficiency:.2f}")
            )
    scene = Scene(
        f"{target}: time per global batch",
        "Shorter is faster. The end of a bar in the other colour is waiting for communication.",
        f"Devices: {max(row.devices for row in rows)}, but for single.",
        LEFT + WIDE + BESIDE,
        20 + ROW * len(rows),
        (),
        still="".join(parts),
    )
    return sheet([scene])
