"""A wrapper as a sharded optimizer sees it: the ranks and parameters of its averages, and how these come."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from paceline.ddp.engine.concurrent_wrappers import wrappers
from paceline.ddp.engine.reducer import Reducer
from paceline.ddp.transport.channel import Channel
from paceline.ddp.transport.finisher import AllReduce
from paceline.ddp.transport.scattered_gradients import Plan, Scatter
from paceline.errors import UsageError
from paceline.tracing import Recorder


@dataclass(frozen=True)
class Averaging:
    """One wrapper of several ranks."""

    reducer: Reducer

    @property
    def group(self) -> dist.ProcessGroup:
        """The group that it averages over."""
        return self.reducer.parts.channel.given

    @property
    def names(self) -> dict[int, str]:
        """Names of the parameters that the module has now, by ``id``."""
        return {id(parameter): name for name, parameter in self.reducer.parts.new_parameters.watch.named_parameters()}

    @property
    def module(self) -> nn.Module:
        """The module as it is now."""
        return self.reducer.parts.new_parameters.watch.module

    @property
    def is_in_join(self) -> bool:
        """Whether ranks may run out of data at different times."""
        return self.reducer.parts.join.is_active

    def expect_scatterable(self) -> None:
        """Refuse to scatter what something else than an all-reduce averages.

        Raises:
            UsageError: names it.
        """
        parts = self.reducer.parts
        if not isinstance(parts.finisher, AllReduce) or parts.options.algorithm is not None:
            used = "a communication hook" if parts.options.algorithm is None else f"{parts.options.algorithm!r}"
            raise UsageError(
                f"reduce_scatter=True takes the place of the wrapper's all-reduce, for which {used} has been chosen; "
                "leave one of them out"
            )

    def scatter(self, plan: Plan | None) -> None:
        """Give each rank the averages of its own pieces alone, as `plan` has them, or whole ones; on all ranks alike.

        Called after :meth:`expect_scatterable` where there is a plan.
        """
        parts = self.reducer.parts
        if plan is None:
            if isinstance(parts.finisher, Scatter):
                self.reducer.use_finisher(lambda channel, recorder: AllReduce(channel, parts.ledger, recorder))
            return
        own = weakref.ref(self.reducer)

        def parameters() -> Sequence[Tensor]:
            reducer = own()
            assert reducer is not None, "it is alive while it reduces"
            return reducer.parts.given

        def make(channel: Channel, recorder: Recorder) -> Scatter:
            return Scatter(plan, parameters, channel, parts.ledger, recorder)

        self.reducer.use_finisher(make)


def averagings() -> list[Averaging]:
    """Return those of all wrappers of this process that have several ranks."""
    return [Averaging(each) for each in wrappers() if isinstance(each, Reducer)]
