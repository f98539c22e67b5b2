"""Process groups of our own among the ranks of a given one, made by its members alone.

torch's ``new_group`` is called by the whole world, or names the group after how many groups this process has: members
of different numbers of groups then wait for each other under different names. Here the members agree on a name.

torch does not learn of such a group. Else it would count it, and where ranks have different numbers of wrappers, or
collect them at different times, its own names for the user's groups would differ between ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _unregister_process_group

from paceline.comm.forking import keep_in_children
from paceline.meeting import meet


def open_own_group(group: dist.ProcessGroup, backend: str, timeout: timedelta | None) -> Any:
    """Open a process group of the ranks of `group`, in their order; all of them call this together.

    Raises:
        CommunicationError: if a rank does not come in time.
    """
    c10d: Any = dist.distributed_c10d
    ranks, store = dist.get_process_group_ranks(group), c10d._world.pg_map[group][1]
    timeout = timeout or c10d._get_default_timeout(dist.Backend(backend))
    number = meet(store, group.rank(), group.size(), timeout, ranks)
    name = f"{group.group_name}/own/{number}"
    opened, _ = c10d._new_process_group_helper(
        group.size(), group.rank(), ranks, dist.Backend(backend), store, name, timeout=timeout
    )
    _forget(opened, name)
    keep_in_children(opened)
    keep_in_children(group)  # torch does not know it any more once it is destroyed
    return opened


def _forget(group: Any, name: Any) -> None:
    """Take a new group out of torch's tables."""
    world: Any = dist.distributed_c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_backend_config):
        table.pop(group)
    for groups in world.tags_to_pg.values():
        groups[:] = [other for other in groups if other is not group]
    world.tags_to_pg.pop(world.pg_to_tag.pop(group))
    _unregister_process_group(name)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Tell whether `group`, which torch made, has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map
