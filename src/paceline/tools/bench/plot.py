"""The plot of a benchmark: times relative to Gloo's, with their spread and the fitted model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.core.output.charts import new_figure
from paceline.core.output.wording import counted, duration
from paceline.tools.bench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

REFERENCE = "gloo"
MOST_MARKS = 10
"""Most sizes that are named below the axis without touching each other."""
SHIFT = 0.5
"""Share of the distance between two sizes over which the variants' points are spread, so that error bars do not cover
each other."""
TYPICAL = 0.9
"""Share of the values that count as typical."""
SQUEEZING = 2.0
"""A value that is more than this many times as large as the typical ones would squeeze them."""
SAME = 0.01
"""Two modelled lines coincide if they differ by no more than this share anywhere."""
DASHES = ((5.0, 2.0), (1.5, 1.5), (5.0, 1.5, 1.5, 1.5), (9.0, 3.0), (1.5, 4.0))
"""Lengths of the dashes and gaps of the modelled lines, in widths of a line."""


def plot(rows: Sequence[Row], cores: int) -> Figure:
    """Draw a panel for each collective."""
    ops = list(dict.fromkeys(row.op for row in rows))
    figure = new_figure(6.5, 5.5 * len(ops))
    for number, op in enumerate(ops, 1):
        _panel(figure.add_subplot(len(ops), 1, number), [row for row in rows if row.op == op], cores)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], cores: int) -> None:
    """Draw one collective: sizes on a logarithmic axis, and times relative to the reference's on a linear one."""
    from matplotlib.legend_handler import HandlerTuple

    names = list(dict.fromkeys(row.variant for row in rows))
    reference = REFERENCE if REFERENCE in names else names[0]
    whose = f"{reference.capitalize() if reference == REFERENCE else reference}'s"
    seconds = {row.nbytes: row.seconds for row in rows if row.variant == reference}
    colors = dict(zip(names, [f"C{number}" for number in range(len(names))], strict=True))
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, axis_top(rows, seconds))
    width = _step(sorted(seconds)) * SHIFT
    shifts = {name: width * ((number + 0.5) / len(names) - 0.5) for number, name in enumerate(names)}
    for variant in names:
        points = [row for row in rows if row.variant == variant]
        _draw_variant(axes, points, seconds, shifts[variant], colors[variant])
    handles, labels = axes.get_legend_handles_labels()
    models = _draw_models(axes, rows, seconds, colors)
    marks = _draw_edge(axes, rows, seconds, shifts, colors)
    name, rounds = rows[0].op.replace("_", "-"), len(rows[0].times)
    axes.set_title(
        f"{name}: time relative to {whose} median, {counted(rows[0].ranks, 'rank')} on {counted(cores, 'core')}\n"
        f"lower is faster; points and bars: median and quartiles of {counted(rounds, 'round')}",
        fontsize="medium",
        # Room for the marks above the axis, one on top of the other.
        pad=6 + 11 * marks,
    )
    every = -(-len(seconds) // MOST_MARKS)
    marked = sorted(seconds)[::every]
    axes.set_xticks(marked, [f"{short(size)}\n{duration(seconds[size])}" for size in marked])
    # A logarithmic axis would have some between the sizes, where nothing was measured.
    axes.minorticks_off()
    axes.set_xlabel(f"size of the whole tensor (bytes), and {whose} median time")
    axes.set_ylabel(f"time ÷ {whose} median time")
    axes.legend(
        [*handles, *models.values()],
        [*labels, *models],
        handler_map={tuple: HandlerTuple(ndivide=1)},  # coinciding lines lie on each other in the legend, too
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        ncols=2,
        frameon=False,
        handlelength=4,
    )


def axis_top(rows: Sequence[Row], seconds: dict[int, float]) -> float:
    """Return the end of the axis: above all values but those that would squeeze the typical ones.

    Args:
        rows: the measurements.
        seconds: the reference's time for each size.
    """
    values = sorted(
        value / seconds[row.nbytes]
        for row in rows
        for value in (row.seconds, row.quartiles[1], row.model_seconds or 0.0)
    )
    typical = values[math.ceil(TYPICAL * len(values)) - 1]
    return 1.1 * max(value for value in values if value <= SQUEEZING * typical)


def _step(sizes: Sequence[int]) -> float:
    """Return the smallest distance between two sizes on the axis, in powers of two."""
    return min((math.log2(b / a) for a, b in pairwise(sizes)), default=1.0)


def _draw_variant(axes: Axes, points: Sequence[Row], seconds: dict[int, float], shift: float, color: str) -> None:
    """Draw the medians of a variant as a line, and the quartiles as error bars, `shift` powers of two to the right."""
    medians = [row.seconds / seconds[row.nbytes] for row in points]
    lower = [(row.seconds - row.quartiles[0]) / seconds[row.nbytes] for row in points]
    upper = [(row.quartiles[1] - row.seconds) / seconds[row.nbytes] for row in points]
    axes.errorbar(
        [row.nbytes * 2**shift for row in points],
        medians,
        yerr=[lower, upper],
        fmt="o-",
        color=color,
        markersize=4,
        elinewidth=1,
        capsize=2.5,
        label=points[0].variant,
    )


def _draw_models(
    axes: Axes, rows: Sequence[Row], seconds: dict[int, float], colors: dict[str, str]
) -> dict[str, tuple[Line2D, ...]]:
    """Draw the modelled times as dashed lines; returns the lines of each label for the legend.

    Lines that are apart differ in their dashes. Lines that coincide draw theirs in turn, so that each colour is seen.
    """
    modelled: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.model_seconds:
            modelled.setdefault(row.variant, []).append((row.nbytes, row.model_seconds / seconds[row.nbytes]))
    drawn = {}
    for number, variants in enumerate(coinciding(modelled)):
        lines: list[Line2D] = []
        for place, variant in enumerate(variants):
            style = in_turn(DASHES[number % len(DASHES)], place, len(variants))
            lines += axes.plot(*zip(*modelled[variant], strict=True), linestyle=style, color=colors[variant])
        drawn[f"model of {' and '.join(variants)}"] = tuple(lines)
    return drawn


def coinciding(lines: Mapping[str, Sequence[tuple[float, float]]]) -> list[list[str]]:
    """Return the names of the lines in groups; the lines of a group have nearly the same values."""
    groups: list[list[str]] = []
    for name, line in lines.items():
        for group in groups:
            first = lines[group[0]]
            if all(math.isclose(ours[1], theirs[1], rel_tol=SAME) for ours, theirs in zip(line, first, strict=True)):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def in_turn(dashes: Sequence[float], place: int, lines: int) -> tuple[float, tuple[float, ...]]:
    """Return Matplotlib's style of a line that draws its `dashes` while the others of `lines` leave a gap."""
    period = sum(dashes)
    return -place * period % (lines * period), (*dashes[:-1], dashes[-1] + (lines - 1) * period)


def _draw_edge(
    axes: Axes, rows: Sequence[Row], seconds: dict[int, float], positions: Mapping[str, float], colors: dict[str, str]
) -> int:
    """Mark the values above the axis at its edge, each with its number; returns the most marks above one size."""
    top = axes.get_ylim()[1]
    marks: dict[int, int] = {}
    for row in rows:
        values = {"": row.seconds, "to ": row.quartiles[1], "model ": row.model_seconds or 0.0}
        beyond = {
            word: value / seconds[row.nbytes] for word, value in values.items() if value > top * seconds[row.nbytes]
        }
        if "" in beyond:
            beyond.pop("to ")  # follows from the median
        for word, value in beyond.items():
            x = row.nbytes * 2 ** (0.0 if word == "model " else positions[row.variant])
            # Not clipped, or the edge would cut off the upper half of the mark.
            axes.plot([x], [top], "^", color=colors[row.variant], markersize=5, clip_on=False)
            axes.annotate(
                f"{word}{value:.3g}",
                (x, top),
                (0, 5 + 11 * marks.get(row.nbytes, 0)),
                textcoords="offset points",
                ha="center",
                fontsize="small",
                color=colors[row.variant],
            )
            marks[row.nbytes] = marks.get(row.nbytes, 0) + 1
    return max(marks.values(), default=0)


def short(nbytes: int) -> str:
    """Return such as ``64K``."""
    for unit, size in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g}{unit}"
    return str(nbytes)
