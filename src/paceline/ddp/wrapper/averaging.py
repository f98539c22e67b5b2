"""Registry of this process's wrappers for a sharded optimizer: the ranks and parameters of each wrapper."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import nn

from paceline.ddp.consistency.module_changes import ModuleWatch

if TYPE_CHECKING:
    from paceline.ddp.wrapper.wrapper import DistributedDataParallel

_wrappers: WeakValueDictionary[int, DistributedDataParallel] = WeakValueDictionary()
"""The living wrappers of this process, by ``id``."""


@dataclass(frozen=True)
class Averaging:
    """Information about one wrapper; does not keep the wrapper alive."""

    group: dist.ProcessGroup
    """The process group that the wrapper averages over."""
    _watch: ModuleWatch
    _wrapper: weakref.ref[DistributedDataParallel]

    @property
    def names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._watch.named_parameters()}

    @property
    def module(self) -> nn.Module:
        return self._watch.module

    @property
    def is_in_join(self) -> bool:
        """Whether ranks may run out of data at different times."""
        wrapper = self._wrapper()
        return wrapper is not None and bool(wrapper._join_config.enable)


def register(wrapper: DistributedDataParallel) -> None:
    """Register `wrapper` for :func:`find_wrappers` until it is deleted."""
    _wrappers[id(wrapper)] = wrapper


def find_wrappers(parameters: Collection[int]) -> list[Averaging]:
    """Return this process's wrappers whose module contains any of the `parameters`, which are given by ``id``."""
    living = [wrapper for reference in _wrappers.valuerefs() if (wrapper := reference()) is not None]
    wrappers = [Averaging(entry.process_group, entry._replica.watch, weakref.ref(entry)) for entry in living]
    return [entry for entry in wrappers if not entry.names.keys().isdisjoint(parameters)]
