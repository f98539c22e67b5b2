"""The scenes of virtual ranks: one tree of sums over the slices of a batch, computed by more and more ranks.

A column is a slice, and below it are the sums that it is in. Whatever the number of ranks, the tree is the same; only
the colours differ, which say where a sum is added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.output.wording import counted
from paceline.core.state.virtual_ranks import slices_of_rank
from paceline.tools.explain.pictures.scene import Frame, Scene, box, text

SLICES = 8
"""Slices of a picture; as many as there are ranks, if they are more."""
LEFT, TOP, HIGH, ROW = 8.0, 22.0, 18.0, 36.0
"""Place of the first slice, height of a box, and distance of two rows."""
COLUMN, SMALL_COLUMN, GAP = 44.0, 20.0, 8.0
"""Width of a column; in a small picture at least; and the space between two."""
SMALL_WIDTH = 330.0
ABOUT = (
    "A sum of floating-point numbers has other bits where it is added in another order. With virtual_ranks={} each "
    "global batch is cut into {} slices, and their gradients are added in one tree, on however many ranks."
)
AGAIN = "The same slices and the same tree. Each rank computes neighbouring slices, whose sums are a part of it."
HINT = "the tree: boxes and lines are those of one rank, and only the colours are others. So the result has its bits."
ALONE = "the sums that rank 0 keeps: they grow as a binary number does that counts the slices, so at most {} wait."
READING = (
    "A column is a slice, in the colour of the rank that computes it. Below are sums of slices, in the colour of the "
    "rank that adds them; grey: added between ranks. Framed: new."
)


@dataclass(frozen=True)
class Sum:
    """A slice's gradient, or the sum of neighbouring ones; the `rank` that adds it, None if the ranks do together."""

    first: int
    size: int
    rank: int | None

    @property
    def name(self) -> str:
        """Its slices: ``0–3``."""
        return str(self.first) if self.size == 1 else f"{self.first}–{self.first + self.size - 1}"


@dataclass(frozen=True)
class Step:
    """One slice of every rank, or one addition between ranks: the sums that are new, and those that wait on rank 0."""

    made: tuple[Sum, ...]
    waiting: tuple[Sum, ...]


def steps(slices: int, ranks: int) -> list[Step]:
    """Return the steps in which so many `ranks` add up the `slices`: each rank counts in binary, then the ranks do."""
    waiting: list[list[Sum]] = [[] for _ in range(ranks)]
    found = []
    for number in range(slices // ranks):
        made = []
        for rank, sums in enumerate(waiting):
            new = Sum(slices_of_rank(slices, rank, ranks)[number], 1, rank)
            made.append(new)
            # The carry of a counter in binary: two sums of one size become one of twice the size.
            while sums and sums[-1].size == new.size:
                new = replace(sums.pop(), size=2 * new.size)
                made.append(new)
            sums.append(new)
        found.append(Step(tuple(made), tuple(waiting[0])))
    size = slices // ranks
    while size < slices:
        size *= 2
        made = [Sum(first, size, None) for first in range(0, slices, size)]
        found.append(Step(tuple(made), (made[0],)))
    return found


def numbers(most: int) -> list[int]:
    """Return the numbers of ranks, up to `most`, that are drawn: powers of two."""
    return [2**power for power in range(most.bit_length())]


def scenes(most: int) -> list[Scene]:
    """Draw the tree on 1, 2, 4, … ranks, up to `most`."""
    slices = max(SLICES, numbers(most)[-1])
    return [scene(slices, ranks) for ranks in numbers(most)]


def scene(slices: int, ranks: int) -> Scene:
    """Draw a frame for each step of so many `ranks`."""
    about = ABOUT.format(slices, slices) if ranks == 1 else AGAIN
    hint = HINT if ranks > 1 else ALONE.format(slices.bit_length() - 1)
    drawn = _drawn(slices, ranks)
    small = _drawn(slices, ranks, is_small=True)
    return replace(drawn, small=small, about=about, hint=hint, still=drawn.frames[-1].drawing)


def outcome(slices: int, ranks: int) -> str:
    """Describe the work of each rank."""
    share = slices // ranks
    if ranks == 1:
        return f"The rank computes all {slices} slices, one after the other, and adds their gradients up."
    together = counted(ranks.bit_length() - 1, "round")
    times = "once" if share == 2 else f"{share - 1} times"
    own = "and adds nothing by itself" if share == 1 else f"and adds their gradients {times}"
    return f"Each rank computes {counted(share, 'slice')}, {own}; the rest of the tree is {together} between ranks."


def expression(first: int, size: int) -> str:
    """Return the sum of so many slices with its parentheses."""
    if size == 1:
        return str(first)
    left, right = (expression(first + at, size // 2) for at in (0, size // 2))
    return f"({left} + {right})"


def _drawn(slices: int, ranks: int, is_small: bool = False) -> Scene:
    board, done = Board(slices, ranks, is_small), set[Sum]()
    frames = [Frame("start", "no slice has been computed", board.draw(done, set()))]
    found = steps(slices, ranks)
    for number, step in enumerate(found, start=1):
        done |= set(step.made)
        frames.append(Frame(*_words(number, len(found), step, slices), board.draw(done, set(step.made))))
    title = f"the same bits, {counted(ranks, 'rank')}"
    return Scene(title, outcome(slices, ranks), READING, board.width, board.height, tuple(frames))


def _words(number: int, count: int, step: Step, slices: int) -> tuple[str, str]:
    """Return a frame's title and caption."""
    together = step.made[0].rank is None
    title = f"step {number} of {count}: " + ("ranks add" if together else "a slice of each rank")
    sums = [made.name for made in step.made if made.size > 1]
    if number == count:
        return title, f"{expression(0, slices)[1:-1]}, on any number of ranks"
    added = f"added: {', '.join(sums)}" if sums else "nothing to add yet"
    if together:
        return title, added
    return title, f"{added}; rank 0 keeps {', '.join(each.name for each in step.waiting)}"


class Board:
    """Draws a tree."""

    def __init__(self, slices: int, ranks: int, is_small: bool) -> None:
        self.slices, self.ranks = slices, ranks
        self.column = max(SMALL_COLUMN, SMALL_WIDTH / slices) if is_small else COLUMN
        self.tree = [made for step in steps(slices, ranks) for made in step.made]
        self.width = 2 * LEFT + slices * self.column
        self.height = self.top(slices) + HIGH + 6

    def top(self, size: int) -> float:
        """Return the upper edge of sums of so many slices."""
        return TOP + (size.bit_length() - 1) * ROW

    def middle(self, one: Sum) -> float:
        """Return the middle of a sum, which is that of its slices."""
        return LEFT + (one.first + one.size / 2) * self.column

    def draw(self, done: set[Sum], new: set[Sum]) -> str:
        """Draw the tree as far as it is `done`, with frames around what is `new`."""
        ways = "".join(self._ways(one) for one in self.tree if one in done)
        path = f'<path d="{ways}" class="axis" fill="none"/>' if ways else ""
        return "".join([*self._names(), path, *(self._sum(one, one in done, one in new) for one in self.tree)])

    def _names(self) -> list[str]:
        share = self.slices // self.ranks * self.column
        is_narrow = share <= COLUMN
        return [
            text(LEFT + (rank + 0.5) * share, 14, str(rank) if is_narrow else f"rank {rank}", "heading", "middle")
            for rank in range(self.ranks)
        ]

    def _ways(self, one: Sum) -> str:
        """Return lines from the two parts of a sum to it."""
        if one.size == 1:
            return ""
        above, offset = self.top(one.size // 2) + HIGH, one.size / 4 * self.column
        return "".join(
            f"M{self.middle(one) + side * offset:g},{above:g}L{self.middle(one):g},{self.top(one.size):g}"
            for side in (-1, 1)
        )

    def _sum(self, one: Sum, is_done: bool, is_new: bool) -> str:
        wide = self.column - GAP if one.size == 1 else max(self.column - GAP, 7.0 * len(one.name))
        x, y = self.middle(one) - wide / 2, self.top(one.size)
        if not is_done:
            return box(x, y, wide, HIGH, "ghost")
        kind, words = ("cell", "number") if one.rank is None else (f"k{one.rank}", "digit")
        drawn = box(x, y, wide, HIGH, kind) + text(self.middle(one), y + 12.5, one.name, words, "middle")
        return drawn + (box(x - 1, y - 1, wide + 2, HIGH + 2, "came") if is_new else "")
