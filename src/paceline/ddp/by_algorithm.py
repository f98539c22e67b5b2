"""Buckets summed by one of :mod:`paceline.comm.algorithms` in place of the backend's all-reduce, for study and for
backends without a good one.

It runs at the end of backward and is finished when it returns, so it overlaps with nothing.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from paceline.comm import algorithms
from paceline.comm.algorithms.members import host_number
from paceline.comm.header import Note
from paceline.ddp.channel import Channel
from paceline.ddp.finisher import Finished
from paceline.errors import UsageError

Algorithm = Literal["ring", "tree", "halving-doubling", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "halving-doubling", "hierarchical")


def check_algorithm(algorithm: Algorithm | None) -> Algorithm | None:
    """`algorithm` if there is such a one.

    Raises:
        UsageError: otherwise.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise UsageError(f"algorithm={algorithm!r}: give one of {', '.join(ALGORITHMS)}, or None for the backend's own")
    return algorithm


class Algorithms:
    """Takes a channel's place for the sums of buckets; its ranks make it together."""

    scales = False
    blocks = True

    def __init__(self, channel: Channel, algorithm: Algorithm) -> None:
        self._group, self.size = channel.group, channel.size
        self._run = getattr(algorithms, f"{algorithm.replace('-', '_')}_all_reduce")
        self._options: dict[str, Any] = {}
        if algorithm == "hierarchical":
            self._options["hosts"] = channel.all_gather_object(host_number(channel.rank, channel.size))
        self._checked = False

    def all_reduce(self, tensor: Tensor, note: Note | None = None) -> Finished:
        """Sum `tensor` over all ranks, in place. Only the first is compared between ranks: the layouts are equal."""
        self._run(tensor, group=self._group, check=not self._checked, **self._options)
        self._checked = True
        return Finished()
