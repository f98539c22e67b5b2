"""The outcome of ``--sweep batch``: accuracy against the global batch, with and without the linear rule."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from paceline.explain.scene import Scene, counted, text
from paceline.explain.sheet import sheet

LEFT, WIDE, HIGH, TOP = 60.0, 560.0, 300.0, 14.0
"""Where the axes are, and how long."""
BELOW, NAMES = 54.0, 180.0
"""Room for the axis of batches with its title, and for the lines' names."""
RULES = {False: "the same rate", True: "linear rule, warm-up"}


@dataclass(frozen=True)
class Point:
    """One run of the sweep."""

    batch: int
    """Global batch, in samples."""
    is_scaled: bool
    """Whether the learning rate followed the linear rule, with warm-up."""
    lr: float
    """Its highest learning rate."""
    accuracy: float | None
    """On the held-out images; None if the gradient was no number."""
    steps: int
    """Optimizer steps."""
    seconds: float
    """Time spent training."""


def sweep_table(points: Sequence[Point], ranks: int) -> Table:
    """Lay the points out, a line for each batch."""
    table = Table(title=f"mnist: accuracy by global batch, {counted(ranks, 'rank')}")
    for name in ("global batch", "steps", *(f"accuracy, {rule}" for rule in RULES.values()), "rate of the rule", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for batch in dict.fromkeys(point.batch for point in points):
        pair = {point.is_scaled: point for point in points if point.batch == batch}
        shown = ["diverged" if (value := pair[rule].accuracy) is None else f"{value:.4f}" for rule in RULES]
        seconds = sum(point.seconds for point in pair.values()) / len(pair)
        steps = max(each.steps for each in pair.values())
        table.add_row(f"{batch:,}", f"{steps:,}", *shown, f"{pair[True].lr:g}", f"{seconds:.1f}")
    return table


def sweep_json(points: Sequence[Point], ranks: int) -> str:
    """Return the points as JSON."""
    return json.dumps({"world_size": ranks, "runs": [asdict(point) for point in points]}, indent=2) + "\n"


def draw(points: Sequence[Point]) -> str:
    """Draw accuracy against the logarithm of the batch as SVG; runs that diverged lie on the axis."""
    batches = sorted({point.batch for point in points})
    low = min(0.9, math.floor(10 * min(point.accuracy or 0.0 for point in points)) / 10)
    first, last = math.log2(batches[0]), math.log2(batches[-1])

    def x(batch: int) -> float:
        return LEFT + (WIDE * (math.log2(batch) - first) / (last - first) if last > first else WIDE / 2)

    def y(accuracy: float | None) -> float:
        return TOP + HIGH * (1 - ((accuracy or low) - low) / (1 - low))

    parts = []
    for mark in range(6):
        value = low + (1 - low) * mark / 5
        parts.append(f'<path d="M{LEFT:g},{y(value):g} H{LEFT + WIDE:g}" class="axis"/>')
        parts.append(text(LEFT - 6, y(value) + 4, f"{value:.2f}", anchor="end"))
    for batch in batches:
        parts.append(text(x(batch), TOP + HIGH + 18, f"{batch:,}", anchor="middle"))
    parts.append(text(LEFT + WIDE / 2, TOP + HIGH + 40, "global batch", "heading", "middle"))
    ends = []
    for number, (rule, name) in enumerate(RULES.items()):
        line = [point for point in points if point.is_scaled is rule]
        way = " ".join(f"{x(point.batch):.1f},{y(point.accuracy):.1f}" for point in line)
        parts.append(f'<polyline points="{way}" class="s{number} line"/>')
        for point in line:
            said = "diverged" if point.accuracy is None else f"accuracy {point.accuracy:.4f}"
            hint = f"<title>{name}: batch {point.batch:,}, {said}</title>"
            place = f'cx="{x(point.batch):.1f}" cy="{y(point.accuracy):.1f}"'
            parts.append(f'<circle {place} r="3.5" class="s{number} dot">{hint}</circle>')
        ends.append((y(line[-1].accuracy), number, name))
    parts += _names(ends)
    scene = Scene(
        "Accuracy by global batch",
        "The same epochs for all: a larger batch takes fewer steps. Higher is better.",
        "The linear rule multiplies the learning rate by batch / 32, and rises to it (Goyal et al. 2017).",
        LEFT + WIDE + NAMES,
        TOP + HIGH + BELOW,
        (),
        still="".join(parts),
    )
    return sheet([scene])


def _names(ends: Sequence[tuple[float, int, str]]) -> list[str]:
    """Write the lines' names at their ends, without touching each other."""
    parts, above = [], -math.inf
    for height, number, name in sorted(ends):
        above = max(height, above + 16)
        parts.append(f'<path d="M{LEFT + WIDE + 8:g},{above:g} h14" class="s{number} line"/>')
        parts.append(text(LEFT + WIDE + 28, above + 4, name))
    return parts
