"""``paceline explain``: a picture of an algorithm, in the terminal or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.core.output.files import write_file
from paceline.core.output.tables import print_table
from paceline.errors import UsageError
from paceline.tools.explain.pictures.scene import MOST_RANKS, Scene

if TYPE_CHECKING:
    from rich.table import Table

SCHEDULES = {
    "ring": ("ring_all_reduce",),
    "tree": ("tree_all_reduce",),
    "halving-doubling": ("halving_doubling_all_reduce",),
}
KNOWN = ("collectives", *SCHEDULES, "bucket-overlap", "workflow", "bubble", "reduce", "same-bits")
EXAMPLES = """Examples:

paceline explain ring  (a table in the terminal)

paceline explain ring --ranks 6 --out ring.html  (a page that plays it)

paceline explain collectives --out collectives.html  (broadcast, reduce, all-to-all and others)

paceline explain tree --out tree.svg  (all steps in one picture)

paceline explain workflow  (one training step, and where its ranks meet)

paceline explain bubble --out bubble.html  (why ranks wait for each other)

paceline explain reduce  (DataParallel against DistributedDataParallel, in bytes)

paceline explain same-bits --out bits.html  (virtual ranks: one tree of sums on 1, 2 and 4 ranks)
"""


def explain(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=f"One of {', '.join(KNOWN)}.", show_default=False)],
    ranks: Annotated[str, typer.Option(metavar="N", help=f"Ranks in the picture, 1 to {MOST_RANKS}.")] = "4",
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a picture (.svg) or a page that plays it (.html).")
    ] = None,
) -> None:
    """Show, step by step, which rank sends what to which, what each holds then, and which ranks wait."""
    if what not in KNOWN:
        raise UsageError(f"there is nothing to explain about {what!r}; choose one of {', '.join(KNOWN)}")
    size = _ranks(ranks)
    if out is None:
        for table in tables(what, size):
            # A row is named by a case or a step, and by its rank where it has one.
            print_table(table, keys=2 if table.columns[1].header == "rank" else 1)
        return
    from paceline.tools.explain.page import page
    from paceline.tools.explain.sheet import sheet

    writer = {".svg": sheet, ".html": page}.get(Path(out).suffix)
    if writer is None:
        raise UsageError(f"--out {out}: the name has to end in .svg (all steps in one picture) or .html (played)")
    write_file("--out", out, writer(scenes(what, size)))
    print(f"wrote {out}")


# The following two import what they need when they are called: --help and a refusal need no torch.


def scenes(what: str, ranks: int) -> list[Scene]:
    """Make the scenes of the subject `what`, one of :data:`KNOWN`."""
    from paceline.comm.algorithms import build
    from paceline.tools.explain.pictures import bubble, devices, panels, ring_exchange, slice_tree, timeline, workflow

    match what:
        case "collectives":
            return panels.scenes(ranks)
        case "bucket-overlap":
            return [timeline.scene(ranks)]
        case "workflow":
            return [workflow.scene(ranks)]
        case "bubble":
            return bubble.scenes(ranks)
        case "reduce":
            return devices.scenes(ranks)
        case "same-bits":
            return slice_tree.scenes(ranks)
    return [ring_exchange.scene(build(name, ranks)) for name in SCHEDULES[what]]


def tables(what: str, ranks: int) -> list[Table]:
    """Make the tables of the subject `what`, one of :data:`KNOWN`."""
    from paceline.comm.algorithms import build
    from paceline.tools.explain.tables import (
        bubble_tables,
        collective_tables,
        overlap_table,
        schedule_table,
        slice_table,
        way_tables,
        workflow_table,
    )

    match what:
        case "collectives":
            return collective_tables(ranks)
        case "bucket-overlap":
            return [overlap_table(ranks)]
        case "workflow":
            return [workflow_table(ranks)]
        case "bubble":
            return bubble_tables(ranks)
        case "reduce":
            return way_tables(ranks)
        case "same-bits":
            return [slice_table(ranks)]
    return [schedule_table(build(name, ranks)) for name in SCHEDULES[what]]


def _ranks(given: str) -> int:
    try:
        ranks = int(given)
    except ValueError:
        raise UsageError(f"--ranks={given!r} is not a whole number") from None
    if not 1 <= ranks <= MOST_RANKS:
        raise UsageError(f"--ranks={ranks} is not in 1..{MOST_RANKS}, which a picture can show")
    return ranks
