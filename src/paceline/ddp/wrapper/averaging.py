"""A wrapper as a sharded optimizer sees it: the ranks and parameters of its averages, and how these come."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.telemetry.spans import Recorder
from paceline.ddp.consistency.module_changes import ModuleWatch
from paceline.ddp.engine.interface import GradientEngine
from paceline.ddp.extensions.scattered_gradients import Plan, Scatter
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.transport.channel import Channel
from paceline.ddp.transport.finisher import AllReduce
from paceline.errors import UsageError


class Watched(Protocol):
    """A wrapper's replica, as far as it is looked at here."""

    watch: ModuleWatch


class Wrapper(Protocol):
    """A wrapper, as far as it is looked at here."""

    process_group: dist.ProcessGroup
    _engine: GradientEngine

    @property
    def _join_config(self) -> Any: ...

    @property
    def _replica(self) -> Watched: ...


@dataclass(frozen=True)
class Averaging:
    """One wrapper, which may be a copy that has not been trained."""

    group: dist.ProcessGroup
    """The group that it averages over."""
    _watch: ModuleWatch
    _engine: GradientEngine
    _wrapper: weakref.ref[Wrapper]

    @property
    def reducer(self) -> Reducer:
        """The reducer, which a copy makes now. All ranks call this."""
        return self._engine.connected()

    @property
    def names(self) -> dict[int, str]:
        """Names of the parameters that the module has now, by ``id``."""
        return {id(parameter): name for name, parameter in self._watch.named_parameters()}

    @property
    def module(self) -> nn.Module:
        """The module as it is now."""
        return self._watch.module

    @property
    def is_in_join(self) -> bool:
        """Whether ranks may run out of data at different times."""
        wrapper = self._wrapper()
        return wrapper is not None and bool(wrapper._join_config.enable)

    def check_scatterable(self) -> None:
        """Refuse to scatter what something else than an all-reduce averages.

        Raises:
            UsageError: names it.
        """
        finisher = self.reducer.finisher
        if finisher.owner and not isinstance(finisher, Scatter):
            raise UsageError(
                f"reduce_scatter=True takes the place of the wrapper's all-reduce, for which {finisher.owner} has been "
                "chosen; leave one of them out"
            )

    def scatter(self, plan: Plan | None) -> None:
        """Give each rank the averages of its own pieces alone, as `plan` has them, or whole ones; on all ranks.

        Called after :meth:`check_scatterable` where there is a plan.
        """
        ledger = self.reducer.ledger
        if plan is None:
            if isinstance(self.reducer.finisher, Scatter):
                self.reducer.use_finisher(lambda channel, recorder: AllReduce(channel, ledger, recorder))
            return
        own = weakref.ref(self.reducer)

        def parameters() -> Sequence[Tensor]:
            reducer = own()
            assert reducer is not None, "it is alive while it reduces"
            return reducer.trained.given

        def make(channel: Channel, recorder: Recorder) -> Scatter:
            return Scatter(plan, parameters, channel, ledger, recorder)

        self.reducer.use_finisher(make)


def enter(wrapper: Wrapper) -> None:
    """Let `wrapper` be found for as long as it lives."""
    _wrappers()[id(wrapper)] = wrapper


def averagings(parameters: Collection[int]) -> list[Averaging]:
    """Return those of this process's wrappers whose module has one of the `parameters`, given by ``id``."""
    living = [wrapper for reference in _wrappers().valuerefs() if (wrapper := reference()) is not None]
    found = [Averaging(each.process_group, each._replica.watch, each._engine, weakref.ref(each)) for each in living]
    return [each for each in found if not each.names.keys().isdisjoint(parameters)]


@cache
def _wrappers() -> WeakValueDictionary[int, Wrapper]:
    return WeakValueDictionary()
