"""Executes a schedule on this rank's tensor, step by step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.algorithms.members import Members
from paceline.comm.algorithms.schedule import Schedule, Transfer, bounds
from paceline.comm.arithmetic import reduce_into


def execute(schedule: Schedule, flat: Tensor, members: Members, op: ReduceOp.RedOpType = ReduceOp.SUM) -> None:
    """Take this rank's part in `schedule`, in place on a flat contiguous tensor; all members do so together.

    What a step brings to be added comes into a scratch tensor, as long as the longest such message; what it brings to
    be copied comes to its place. An average is left as a sum: who calls this scales it.

    Raises:
        CommunicationError: if another rank ended or did not come in time.
    """
    members.guard(schedule.name, lambda: _execute(schedule, flat, members, op))


def _execute(schedule: Schedule, flat: Tensor, members: Members, op: ReduceOp.RedOpType) -> None:
    def part(transfer: Transfer) -> Tensor:
        return flat[bounds(flat.numel(), schedule.chunks, transfer.chunks.start, transfer.chunks.stop)]

    longest = max(
        (part(one).numel() for step in schedule.steps for one in step if one.dst == members.rank and one.reduce),
        default=0,
    )
    scratch = torch.empty(longest, dtype=flat.dtype, device=flat.device)
    for sent, received in schedule.of(members.rank):
        outgoing = [(piece, one.dst) for one in sent if (piece := part(one)).numel()]
        incoming, sums, used = [], [], 0
        for one in received:
            place = part(one)
            if not place.numel():
                continue
            target = place
            if one.reduce:
                target = scratch[used : used + place.numel()]
                used += place.numel()
                sums.append((place, target))
            incoming.append((target, one.src))
        if not (outgoing or incoming):
            continue
        receives, sends = members.start(outgoing, incoming)
        for work in receives:
            work.wait()
        for place, came in sums:
            reduce_into([place], [place, came], op)
        for work in sends:
            work.wait()
