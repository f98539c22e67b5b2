"""All schedules, by the name of their public function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from paceline.comm.algorithms import halving, hierarchical, linear, ring, scatter, tree
from paceline.comm.algorithms.schedule import Schedule
from paceline.errors import UsageError

_ROOTED: dict[str, Callable[[int, int], Schedule]] = {
    "linear_broadcast": linear.broadcast,
    "tree_broadcast": tree.broadcast,
    "scatter_all_gather_broadcast": scatter.broadcast,
    "linear_reduce": linear.reduce,
    "tree_reduce": tree.reduce,
}
_ROOTLESS: dict[str, Callable[[int], Schedule]] = {
    "ring_reduce_scatter": ring.reduce_scatter,
    "ring_all_gather": ring.all_gather,
    "ring_all_reduce": ring.all_reduce,
    "tree_all_reduce": tree.all_reduce,
    "halving_doubling_all_reduce": halving.all_reduce,
}
NAMES = (*_ROOTED, *_ROOTLESS, "hierarchical_all_reduce")
"""Names of all schedules."""


def build(name: str, size: int, root: int = 0, hosts: Sequence[Hashable] | None = None) -> Schedule:
    """Build the schedule `name` for `size` ranks.

    Args:
        name: one of :data:`NAMES`.
        size: number of ranks, 1 or more.
        root: the source of a broadcast or the destination of a reduction; other algorithms ignore it.
        hosts: the host of each rank, for ``"hierarchical_all_reduce"``; by default all ranks are on one host.
    """
    if size < 1:
        raise UsageError(f"size={size}, but a schedule needs at least 1 rank")
    if not 0 <= root < size:
        raise UsageError(f"root={root} is not one of the ranks 0 to {size - 1}")
    if hosts is not None and len(hosts) != size:
        raise UsageError(f"hosts names {len(hosts)} hosts for {size} ranks; name the host of every rank")
    if name in _ROOTED:
        return _ROOTED[name](size, root)
    if name in _ROOTLESS:
        return _ROOTLESS[name](size)
    if name == "hierarchical_all_reduce":
        return hierarchical.all_reduce(hosts if hosts is not None else [0] * size)
    raise UsageError(f"unknown algorithm {name!r}; choose one of {', '.join(NAMES)}")
