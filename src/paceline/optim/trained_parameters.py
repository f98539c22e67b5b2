"""The sharded optimizers of this process; no two of them may train the same parameter."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.optim.arguments import Subject


def register(optimizer: Optimizer) -> None:
    """Register `optimizer` for as long as it lives."""
    _living().add(optimizer)


def check_disjoint(optimizer: Optimizer, groups: Iterable[Mapping[str, Any]], subject: Subject) -> None:
    """Refuse parameters of `groups` that an optimizer other than `optimizer` trains."""
    ours = {id(parameter) for group in groups for parameter in group["params"]}
    if _in_common(optimizer, ours):
        gc.collect()  # a deleted optimizer may still wait for a collection, on some ranks and not on others
    for parameter in _in_common(optimizer, ours):
        raise UsageError(
            f"{subject.name_of(parameter)} is trained by another ShardedOptimizer already; make one for a model, and "
            "delete it before you make another"
        )


def _in_common(optimizer: Optimizer, ours: set[int]) -> list[Tensor]:
    groups = [group for other in _living() if other is not optimizer for group in other.param_groups]
    return [parameter for group in groups for parameter in group["params"] if id(parameter) in ours]


@cache
def _living() -> WeakSet[Optimizer]:
    return WeakSet()
