"""Virtual ranks: one tree of sums over the slices of a batch, computed on different numbers of ranks.

Each column is a slice, with sums below it. The tree is the same on any number of ranks. Only the colors, which
show the rank that computes each sum, differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from paceline.core.messages import counted
from paceline.core.tables import new_table
from paceline.core.virtual_ranks import slices_of_rank
from paceline.tools.explain.scene import Drawing, Frame, Scene, box, text

SLICES = 8
"""Minimum number of slices in a picture; with more ranks, there are as many slices as ranks."""
LEFT, TOP, COLUMN, ROW, WIDE, HIGH = 44.0, 22.0, 44.0, 36.0, 36.0, 18.0
"""Position of the first slice, spacing of columns and rows, width and height of a box."""
ABOUT = "virtual_ranks={0}: the gradients of a batch's {0} slices are added in the same tree on any number of ranks."
HINT = "the tree: boxes and lines are the same as on one rank, so the result has the same bits. Only colors differ."
ALONE = "the sums that rank 0 keeps: at most {}, because they merge like the carries of a binary counter."
READING = (
    "Top: slices, in the color of their rank. Below: sums, in the color of the rank that adds; gray: between ranks."
)


@dataclass(frozen=True)
class Sum:
    """The gradient of one slice, or the sum over neighboring slices. If `rank` is None, several ranks compute it."""

    first: int
    size: int
    rank: int | None

    @property
    def name(self) -> str:
        """The range of slices: ``0–3``."""
        return str(self.first) if self.size == 1 else f"{self.first}–{self.first + self.size - 1}"


@dataclass(frozen=True)
class Step:
    """The new sums after every rank computes a slice or adds between ranks, and the sums that rank 0 keeps."""

    made: tuple[Sum, ...]
    waiting: tuple[Sum, ...]


def steps(slices: int, ranks: int) -> list[Step]:
    """Return the steps of adding `slices` on `ranks`: first on each rank, like a binary counter, then between ranks."""
    waiting: list[list[Sum]] = [[] for _ in range(ranks)]
    result = []
    for number in range(slices // ranks):
        computed = []
        for rank, sums in enumerate(waiting):
            new = Sum(slices_of_rank(slices, rank, ranks)[number], 1, rank)
            computed.append(new)
            # The carry of a binary counter: two sums of equal size become one of twice the size.
            while sums and sums[-1].size == new.size:
                new = replace(sums.pop(), size=2 * new.size)
                computed.append(new)
            sums.append(new)
        result.append(Step(tuple(computed), tuple(waiting[0])))
    size = slices // ranks
    while size < slices:
        size *= 2
        computed = [Sum(first, size, None) for first in range(0, slices, size)]
        result.append(Step(tuple(computed), (computed[0],)))
    return result


def expression(first: int, size: int) -> str:
    """Return the sum of `size` slices from `first` on, with parentheses."""
    if size == 1:
        return str(first)
    left, right = (expression(first + at, size // 2) for at in (0, size // 2))
    return f"({left} + {right})"


def scenes(limit: int) -> list[Scene]:
    """Draw the tree on 1, 2, 4, … ranks, up to `limit`."""
    numbers = [2**power for power in range(limit.bit_length())]
    slices = max(SLICES, numbers[-1])
    drawn = [_scene(slices, ranks) for ranks in numbers]
    return [replace(drawn[0], table=_table(slices, numbers)), *drawn[1:]]


def _scene(slices: int, ranks: int) -> Scene:
    tree, computed = steps(slices, ranks), set[Sum]()
    frames = [Frame("start", "no slice has been computed", _draw(slices, ranks, tree, computed, ()))]
    for number, step in enumerate(tree, start=1):
        computed |= set(step.made)
        frames.append(Frame(*_words(number, len(tree), step, slices), _draw(slices, ranks, tree, computed, step.made)))
    share, rounds = counted(slices // ranks, "slice"), counted(ranks.bit_length() - 1, "round")
    outcome = f"Each rank computes and adds {share}; additions between ranks then complete the tree in {rounds}."
    if ranks == 1:
        outcome = f"The rank computes all {slices} slices one after another and adds up their gradients."
    hint = HINT if ranks > 1 else ALONE.format(slices.bit_length() - 1)
    title = f"the same bits, {counted(ranks, 'rank')}"
    return Scene(title, ABOUT.format(slices), outcome, READING, hint, frames, [Frame("", "", frames[-1].drawing)])


def _words(number: int, count: int, step: Step, slices: int) -> tuple[str, str]:
    """Return a frame's title and caption."""
    together = step.made[0].rank is None
    title = f"step {number} of {count}: " + ("ranks add" if together else "a slice on each rank")
    if number == count:
        return title, f"{expression(0, slices)[1:-1]}, on any number of ranks"
    sums = [part.name for part in step.made if part.size > 1]
    added = f"added: {', '.join(sums)}" if sums else "nothing to add yet"
    return title, added if together else f"{added}; rank 0 keeps {', '.join(waiting.name for waiting in step.waiting)}"


def _draw(slices: int, ranks: int, tree: Sequence[Step], computed: Collection[Sum], new: Collection[Sum]) -> Drawing:
    """Draw the sums of the `tree` that are `computed`, with frames around the `new` ones."""
    share = slices / ranks
    parts = [text(4, 14, "rank", "heading")]
    parts += [text(_middle((rank + 0.5) * share), 14, str(rank), "heading", "middle") for rank in range(ranks)]
    for node in (sum_ for step in tree for sum_ in step.made):
        middle, y = _middle(node.first + node.size / 2), _top(node.size)
        x = middle - WIDE / 2
        if node not in computed:
            parts.append(box(x, y, WIDE, HIGH, "ghost"))
            continue
        for part in (node.size / 4, 3 * node.size / 4) if node.size > 1 else ():
            above = f"{_middle(node.first + part):g},{_top(node.size // 2) + HIGH:g}"
            parts.append(f'<path d="M{above} L{middle:g},{y:g}" class="axis"/>')
        kind, words = ("cell", "number") if node.rank is None else (f"k{node.rank}", "digit")
        parts += [box(x, y, WIDE, HIGH, kind), text(middle, y + 12.5, node.name, words, "middle")]
        if node in new:
            parts.append(box(x, y, WIDE, HIGH, "came"))
    return Drawing("".join(parts), LEFT + slices * COLUMN, _top(slices) + HIGH + 6)


def _middle(slices: float) -> float:
    """Return the horizontal position after a number of slices."""
    return LEFT + slices * COLUMN


def _top(size: int) -> float:
    """Return the upper edge of sums of `size` slices."""
    return TOP + (size.bit_length() - 1) * ROW


def _table(slices: int, numbers: list[int]) -> Table:
    """Show the slices and sums of each rank."""
    wide = ("computes", "adds by itself", "added between ranks")
    title, caption = f"one tree of sums, virtual_ranks={slices}", f"On any number of ranks: {expression(0, slices)}."
    table = new_table(["ranks", "rank", *wide], title=title, caption=caption, words=wide, wraps=wide)
    for ranks in numbers:
        sums = [node for step in steps(slices, ranks) for node in step.made]
        shared = ", ".join(node.name for node in sums if node.rank is None)
        for rank in range(ranks):
            rank_sums = [node for node in sums if node.rank == rank]
            computed = ", ".join(node.name for node in rank_sums if node.size == 1)
            added = ", ".join(node.name for node in rank_sums if node.size > 1)
            table.add_row("" if rank else str(ranks), str(rank), computed, added or "–", "" if rank else shared or "–")
        table.add_section()
    return table
