"""Copies and pickles of a wrapper, and the attributes that they take along.

``copy.deepcopy(model)`` usually keeps an average of weights (EMA), often on one rank alone, so making a copy must not
need the others. It does not communicate until its first synchronized backward, which all ranks run.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist

from paceline.core.torch_internals.distributed.c10d import get_default_group
from paceline.core.torch_internals.distributed.ddp import make_disabled_join
from paceline.errors import UsageError

_MADE_AGAIN = (
    "process_group",
    "_replica",
    "_connection",
    "_engine",
    "_guard",
    "_recorder",
    "_comm_hook",
)


def portable_state(wrapper: Any) -> dict[str, Any]:
    """Return the attributes of `wrapper` that belong to no process group and no ``join``; all others are made again."""
    state = {name: value for name, value in wrapper.__dict__.items() if name not in _MADE_AGAIN}
    return state | {"_join_config": make_disabled_join()}


def copied_state(wrapper: Any, memo: dict[int, Any]) -> dict[str, Any]:
    """Return deep copies of the attributes that :func:`portable_state` returns."""
    return {name: copy.deepcopy(value, memo) for name, value in portable_state(wrapper).items()}


def check_default_group(group: dist.ProcessGroup) -> None:
    """Refuse to pickle a wrapper over a `group` other than the default one, like torch."""
    if group is not get_default_group():
        raise UsageError(
            "only a DistributedDataParallel over the default process group can be pickled, as the others have no "
            "name elsewhere; pickle paceline.unwrap(model) and wrap it again"
        )
