"""Gathers a few numbers from every rank, at the end of a backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.ddp.transport.channel import Channel, Pausing


def gather_numbers(channel: Channel, numbers: Sequence[int], what: str) -> Pausing[list[list[int]]]:
    """Return every rank's `numbers`, as many on each rank, in the order of ranks; `what` names them in errors."""
    table, launched = channel.gather_rows(torch.tensor(numbers, dtype=torch.int64))
    yield True
    channel.meet(launched, what)
    rows: list[list[int]] = table.tolist()
    return rows
