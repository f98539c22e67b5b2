"""``join``: ranks that run out of data shadow the others' steps until all have run out; uses torch's Joinable protocol.

    a rank that has data                          a rank that ran out
    notify                                 ──►    count the remaining ranks
    event: forward │ buffers │ layer │            the same collective, without a contribution
           backward │ end                  ──►
    … until the end of the step                   … until the end of the step

A rank that ran out of data learns of each collective, including SyncBatchNorm's, from an event
(:mod:`paceline.ddp.joined_steps`). While every rank has data, only the first event of a step is sent.

Decision 0008 gives the reasons.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from paceline.core.missing_ranks import collective
from paceline.core.stacks import warn
from paceline.core.torch_distributed import local_of, make_disabled_join
from paceline.core.torch_internals import TorchDDP
from paceline.core.unwrapping import Communicates
from paceline.ddp.connection import Connection, Replica
from paceline.ddp.joined_steps import Event, JoinedSteps, Stage
from paceline.ddp.step_guard import StepGuard
from paceline.errors import UsageError


class Announcement:
    """Announces the collectives of one layer; assigned to its ``Communicates.announce`` attribute."""

    def __init__(self, steps: JoinedSteps, layer: int) -> None:
        self._steps, self._layer = steps, layer

    def __call__(self, code: int) -> bool:
        return self._steps.announce(Event.LAYER, self._layer, code)

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace the announcement with ``None`` in a copy or pickle of the layer, which is not part of a ``join``."""
        return type(None), ()


class Leaving(JoinHook):
    """Ends ``join`` for a wrapper; sufficient for a single rank."""

    def __init__(self, wrapper: TorchDDP) -> None:
        self._wrapper = wrapper

    def leave_step(self) -> None:
        """Called when this rank leaves its loop, possibly in the middle of a step."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called by torch's ``Join`` once every rank has run out of data."""
        self.end()

    def end(self) -> None:
        """Restore the wrapper's state from before ``join``; may be called twice."""
        self._wrapper._join_config = make_disabled_join()


class Shadow(Leaving):
    """Takes part in the other ranks' steps after this rank has run out of data, and in the end of ``join``.

    Args:
        wrapper, connection, replica, guard: the wrapper in ``join``, and its parts.
        optimizers: optimizers whose state is sent to all ranks at the end.
        divides_by_all: whether means still count this rank after it has run out of data.
        takes_buffers_along: whether all ranks take over the buffers with the model; otherwise each keeps its own.
    """

    def __init__(
        self,
        wrapper: TorchDDP,
        connection: Connection,
        replica: Replica,
        guard: StepGuard,
        optimizers: Sequence[Optimizer],
        *,
        divides_by_all: bool,
        takes_buffers_along: bool,
    ) -> None:
        super().__init__(wrapper)
        self._steps, self._reducer, self._buffers = connection.joined_steps, connection.reducer, connection.buffers
        self._replica, self._ledger, self._is_counted = replica, replica.ledger, divides_by_all
        self._channel, self._guard, self._optimizers = connection.channel, guard, optimizers
        self._takes_buffers_along = takes_buffers_along
        self._steps.reset()
        # Layers whose collectives are announced; events refer to them by index. Empty after ``join`` has ended.
        self._layers: Sequence[Communicates] = layers_to_shadow(replica.module, wrapper.process_group)
        for index, layer in enumerate(self._layers):
            layer.announce = Announcement(self._steps, index)

    def main_hook(self) -> None:
        """Take part in one step (or the rest of it) of the ranks that still have data."""
        self._steps.stage = Stage.SHADOWING
        self._ledger.status.joined = True
        while (message := self._steps.exchange(None)) is not None and message.event is not Event.LOCAL:
            if message.event is Event.BUFFERS:
                self._buffers.exchange()
            elif message.event is Event.LAYER:
                self._layers[message.layer].shadow(message.code, self._wrapper.join_device)
            elif message.event is Event.BACKWARD:
                self._launch_without_data()
            elif message.event is Event.END:
                self._reducer.complete()  # a ZeroRedundancyOptimizer in the same Join uses these averages
                return

    def _launch_without_data(self) -> None:
        """Launch gradients that were accumulated under ``no_sync`` but not averaged yet, or zeros if there are none."""
        parameters = self._reducer.trained.parameters
        self._ledger.forget_dropped(parameters, in_backward=False)
        if not self._ledger.local_tasks:
            for parameter in parameters:
                parameter.grad = None  # the averages of the previous step
            self._ledger.contributes_nothing(counted=self._is_counted)
        with torch.no_grad():
            self._reducer.launch_all()

    def leave_step(self) -> None:
        """Finish the current step if this rank left its loop in the middle of it and other ranks are shadowing it."""
        self._reducer.resync_aborted()
        if self._steps.stage is Stage.FOLLOWED:
            self.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make all ranks use the same model after all have run out of data. Collective."""
        self._wrapper._authoritative_rank = self._take_over_model(is_last_joiner)
        self.end()

    def _take_over_model(self, is_last_joiner: bool) -> int:
        """Copy the model of the rank that ran out of data last (the highest one if several did); returns that rank."""
        status = self._ledger.status
        local_state = (is_last_joiner, status.forwards, status.optimizer_steps, self._guard.has_state())
        states = self._channel.all_gather_object(local_state)
        source = max(rank for rank, state in enumerate(states) if state[0])
        tensors = [parameter.data for _, parameter in self._replica.watch.named_parameters()]
        if self._takes_buffers_along:
            tensors += self._buffers.taken_along()
        self._channel.broadcast([local_of(tensor) for tensor in tensors], source)
        # On ranks that took fewer steps than the source, the optimizer state is now older than the model.
        stale = [rank for rank, state in enumerate(states) if state[2] != states[source][2]]
        if stale and self._optimizers:
            self._bring_optimizers_up_to_date(source)
        elif stale and states[source][3]:
            _warn_of_stale_state(stale, [state[2] for state in states], source)
        _, status.forwards, status.optimizer_steps, _ = states[source]
        self._ledger.forwards_since_sync = 0  # a rank may have left in the middle of a step
        return source

    def _bring_optimizers_up_to_date(self, source: int) -> None:
        is_source = self._channel.rank == source
        box: list[Any] = [[optimizer.state_dict() for optimizer in self._optimizers] if is_source else None]
        group, device = self._wrapper.join_process_group, self._wrapper.join_device
        with self._channel.meeting(), collective("broadcast of optimizer state", group):
            dist.broadcast_object_list(box, group=group, group_src=source, device=device)
        if not is_source:
            for optimizer, state in zip(self._optimizers, box[0], strict=True):
                optimizer.load_state_dict(state)

    def end(self) -> None:
        """Restore the wrapper's state from before ``join``; may be called twice."""
        super().end()
        self._steps.reset()
        if self._ledger.status.joined:
            for parameter in self._replica.parameters():
                parameter.grad = None  # averages of other ranks' data; the next backward would add to them
        self._ledger.status.joined = False
        for layer in self._layers:
            layer.announce = None
        self._layers = ()


def layers_to_shadow(module: nn.Module, group: dist.ProcessGroup) -> list[Communicates]:
    """Return the layers of `module` whose collectives are announced to ranks of `group` without data."""
    own_ranks = set(dist.get_process_group_ranks(group))
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, Communicates)}
    for name, layer in layers.items():
        if outside := sorted(set(layer.ranks()) - own_ranks):
            raise UsageError(
                f"{type(layer).__name__} {name!r} communicates with ranks {outside}, which do not average with "
                f"ranks {sorted(own_ranks)} and so would not learn when data runs out inside join(); give the layer a "
                "process_group that contains only ranks of the wrapper's group"
            )
    return list(layers.values())


def _warn_of_stale_state(stale: list[int], steps: list[int], source: int) -> None:
    where = ", ".join(f"rank {rank} after {steps[rank]}" for rank in stale)
    warn(
        f"data ran out on {where} of {steps[source]} optimizer steps, and the optimizer's state there is outdated, "
        "so replicas will differ after the next step; use join(optimizers=[optimizer]) to bring it up to date"
    )


class JoinOfOne(Join):
    """torch's ``Join`` for a single wrapper; it may be left in the middle of a step, and always cleans up."""

    def __init__(self, wrapper: Joinable, enable: bool, throw: bool, options: dict[str, Any]) -> None:
        super().__init__([wrapper], enable, throw, **options)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (leaving,) = self._join_hooks
        assert isinstance(leaving, Leaving)
        try:
            if kind is None and self._enable:
                leaving.leave_step()
            with warnings.catch_warnings():  # torch changes the filters of the whole process and does not restore them
                super().__exit__(kind, error, trace)
        finally:
            leaving.end()
