"""torch's process groups and their tables, the default store, and options of a collective without a public name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import CellType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import _broadcast_coalesced, _unregister_process_group
from torch.distributed import Store

_c10d: Any = dist.distributed_c10d

get_default_group: Callable[[], dist.ProcessGroup] = _c10d._get_default_group
get_default_store: Callable[[], Store] = _c10d._get_default_store
broadcast_coalesced: Callable[[Any, list[Tensor], int, int], None] = _broadcast_coalesced


def cell_of(name: str) -> CellType | None:
    """Return the cell that holds the inner function of a decorated function of ``torch.distributed``; None without one.

    All callers use a function that is put into the cell, no matter how they imported the decorated function.
    """
    closure = getattr(_c10d, name).__closure__  # of torch's _exception_logger
    return closure[0] if closure else None


def get_known_groups() -> Mapping[Any, tuple[str, Store]]:
    """Return torch's own table of the process groups that it created and has not destroyed.

    Each value is a group's backend and store. A bare ``ProcessGroupGloo`` is not in the table.
    """
    groups: Mapping[Any, tuple[str, Store]] = _c10d._world.pg_map
    return groups


def open_group(
    group: dist.ProcessGroup, ranks: Sequence[int], backend: str, store: Store, name: str, timeout: timedelta
) -> Any:
    """Open a process group of the members of `group`, which are `ranks` of the world, under a name that they agree on.

    All members call this, and no other ranks. torch adds the group to its tables; see :func:`forget_group`.
    """
    opened, _ = _c10d._new_process_group_helper(
        group.size(), group.rank(), ranks, dist.Backend(backend), store, name, timeout=timeout
    )
    return opened


def forget_group(group: Any, name: Any) -> None:
    """Remove a new group from torch's tables."""
    # All tables that _new_process_group_helper() fills in torch 2.11 to 2.15. A remaining entry would be counted, or
    # destroyed a second time.
    world = _c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_backend_config):
        table.pop(group)
    # Added in torch 2.15; it would keep the group's descriptors and threads until the process ends.
    getattr(world, "pg_flight_recorder_hooks", {}).pop(group, None)
    for groups in world.tags_to_pg.values():
        groups[:] = [other for other in groups if other is not group]
    world.tags_to_pg.pop(world.pg_to_tag.pop(group))
    _unregister_process_group(name)
