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

from paceline.comm.forking import keep_in_children
from paceline.meeting import meet
from paceline.torch_internals.c10d import forget_group, get_default_timeout, get_known_groups, open_group


def open_own_group(group: dist.ProcessGroup, backend: str, timeout: timedelta | None) -> Any:
    """Open a process group of the ranks of `group`, in their order; all of them call this together.

    Raises:
        CommunicationError: if a rank does not come in time.
    """
    ranks, store = dist.get_process_group_ranks(group), get_known_groups()[group][1]
    timeout = timeout or get_default_timeout(backend)
    number = meet(store, group.rank(), group.size(), timeout, ranks)
    name = f"{group.group_name}/own/{number}"
    opened = open_group(group, ranks, backend, store, name, timeout)
    forget_group(opened, name)
    keep_in_children(opened)
    keep_in_children(group)  # torch does not know it any more once it is destroyed
    return opened


def is_alive(group: dist.ProcessGroup) -> bool:
    """Tell whether `group`, which torch made, has not been destroyed."""
    return group in get_known_groups()
