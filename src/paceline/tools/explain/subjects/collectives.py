"""The six collectives: every rank's data before, during and after each, its cost, and the torch function to call."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from paceline.comm.algorithms.linear import all_to_all
from paceline.comm.algorithms.ring import all_gather, all_reduce, reduce_scatter
from paceline.comm.algorithms.schedule import Schedule
from paceline.comm.algorithms.tree import broadcast, reduce
from paceline.core.output.wording import counted
from paceline.ddp.options.buckets import CAPACITY, MIB
from paceline.tools.explain.scene import Frame, Scene, ms
from paceline.tools.explain.subjects import schedules
from paceline.tools.explain.subjects.buckets import LINK, LINKS

BEFORE_2_13 = {"reduce_scatter_single": "reduce_scatter_tensor", "all_gather_single": "all_gather_into_tensor"}
"""Names of these torch.distributed functions up to torch 2.12."""


class Collective(NamedTuple):
    """A collective, with the schedule that is drawn."""

    schedule: Schedule
    call: str
    """The torch.distributed function, with its arguments."""
    after: str
    """The data that ranks hold at the end."""


def collectives(size: int) -> list[Collective]:
    """Return the six collectives among `size` ranks."""
    return [
        Collective(broadcast(size, 0), "broadcast(tensor, src=0)", "every rank holds rank 0's tensor"),
        Collective(reduce(size, 0), "reduce(tensor, dst=0)", "rank 0 holds the sum; the others have no result"),
        Collective(all_reduce(size), "all_reduce(tensor)", "every rank holds the sum of every row"),
        Collective(reduce_scatter(size), "reduce_scatter_single(part, tensor)", "every rank holds the sum of one row"),
        Collective(all_gather(size), "all_gather_single(tensor, part)", "every rank holds all ranks' parts"),
        Collective(all_to_all(size), "all_to_all_single(output, input)", "every rank holds the parts addressed to it"),
    ]


def scenes(size: int) -> list[Scene]:
    """Draw all six; only the first scene explains how to read them."""
    first, *others = [_scene(collective) for collective in collectives(size)]
    return [first, *(replace(scene, reading="") for scene in others)]


def _scene(collective: Collective) -> Scene:
    schedule = collective.schedule
    grid = schedules.grid_of(schedule)
    end = [[cell._replace(came=False) for cell in held] for held in schedules.states(schedule)[-1]]
    frames = [*schedules.frames(schedule, grid), Frame("after", collective.after, grid.draw(end))]
    title, result = f"{schedule.result}, {counted(schedule.size, 'rank')}", outcome(collective)
    middle, last = (len(schedule.steps) + 1) // 2, len(schedule.steps)
    caption = f"{result} {collective.after.capitalize()}."
    return Scene(
        title,
        schedules.ABOUT[schedule.result],
        result,
        f"{schedules.reading(grid)} A rank's tensor has {CAPACITY // MIB} MiB; {LINKS}.",
        schedules.hint(schedule),
        frames,
        shown=[frames[step] for step in sorted({0, middle})] + frames[-1:],
        table=schedules.table(schedule, title, caption, sorted({0, middle, last})),
        symbols=grid.symbols,
    )


def outcome(collective: Collective) -> str:
    """Return the call, the steps, the bytes and the time as a sentence."""
    call, schedule = f"torch.distributed.{collective.call}", collective.schedule
    if (name := collective.call.partition("(")[0]) in BEFORE_2_13:
        call += f" ({BEFORE_2_13[name]} before torch 2.13)"
    if schedule.size == 1:
        return f"{call}. One rank has nothing to send."
    # In an all-to-all, the chunks of all ranks' tensors together count as one tensor.
    tensor = CAPACITY * (schedule.size if schedule.result == "all-to-all" else 1)
    seconds, moved = ms(LINK.seconds(schedule, tensor)), schedules.traffic_of(schedule, tensor / MIB)
    algorithm = schedule.name.split("_")[0].replace("pairwise", "pairwise exchange")
    return f"{call}. As a {algorithm}: {seconds} in {moved} MiB."
