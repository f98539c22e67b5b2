"""``paceline explain``: a picture of an algorithm, in the terminal or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.tools.explain.scene import Scene

SCHEDULES = {
    "ring": ("ring_all_reduce",),
    "tree": ("tree_all_reduce",),
    "halving-doubling": ("halving_doubling_all_reduce",),
    "broadcast": ("linear_broadcast", "tree_broadcast", "scatter_all_gather_broadcast"),
    "reduce": ("linear_reduce", "tree_reduce"),
}
"""Subjects that show schedules, with the names of the schedules."""
KNOWN = ("collectives", *SCHEDULES, "bucket-overlap", "bubble")
MOST_RANKS = 8
"""Maximum number of ranks in a legible picture."""
EXAMPLES = "\n\n".join(
    (
        "Examples:",
        "paceline explain ring  (a table in the terminal)",
        "paceline explain broadcast  (one to all: one by one, as a tree, and as scatter and all-gather)",
        "paceline explain ring --ranks 6 --out ring.html  (an animated page)",
        "paceline explain collectives --out collectives.svg  (all steps in one picture)",
        "paceline explain bubble --out bubble.html  (why ranks wait for each other)",
    )
)


def explain(
    subject: Annotated[str, typer.Argument(metavar="WHAT", help=f"One of {', '.join(KNOWN)}.", show_default=False)],
    ranks: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_RANKS, help="Ranks in the picture, 1 to 8.")] = 4,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a picture (.svg) or an animated page (.html).")
    ] = None,
) -> None:
    """Show step by step which ranks send data, what they hold afterwards, and which ranks wait."""
    if subject not in KNOWN:
        raise UsageError(f"WHAT is {subject!r}; choose one of {', '.join(KNOWN)}")
    suffix = Path(out).suffix if out else ""
    if out is not None and suffix not in (".svg", ".html"):
        raise UsageError(f"--out {out}: the name must end in .svg (one picture) or .html (an animated page)")
    # --help and usage errors work without importing torch.
    from paceline.core.output_files import write_file
    from paceline.core.tables import print_table
    from paceline.tools.explain.scene import page, sheet

    drawn = scenes(subject, ranks)
    if out is not None:
        write_file("--out", out, sheet(drawn) if suffix == ".svg" else page(drawn))
        print(f"wrote {out}")
        return
    for table in (scene.table for scene in drawn if scene.table):
        # A row is identified by its case or step, and by its rank if it has one.
        print_table(table, keys=2 if table.columns[1].header == "rank" else 1)


def scenes(subject: str, ranks: int) -> list[Scene]:
    """Draw the scenes of the subject `subject`, one of :data:`KNOWN`."""
    from paceline.comm.schedules import build
    from paceline.tools.explain import bubble, buckets, collectives

    if subject in SCHEDULES:
        return [collectives.scene(build(name, ranks)) for name in SCHEDULES[subject]]
    draw = {"collectives": collectives.scenes, "bucket-overlap": buckets.scenes, "bubble": bubble.scenes}
    return draw[subject](ranks)
