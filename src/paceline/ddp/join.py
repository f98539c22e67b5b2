"""``join``: ranks that run out of data shadow the others' steps until all have, after torch's Joinable protocol.

    a rank that has data                          a rank that ran out
    notify                                 ──►    count who is left
    event: forward │ buffers │ layer │            the same collective, with nothing to contribute
           backward │ end                  ──►
    … until the step is over                      … until the step is over

A rank that ran out learns from events what comes next (:mod:`paceline.ddp.agreement.join_events`), nothing is guessed:
SyncBatchNorm's collectives are shadowed one by one, also by a rank that never had a batch. While every rank has data
only the first event of a step is told, by which each learns that.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.optim import Optimizer

from paceline.ddp.agreement.join_events import Event, Message, Stage, decode, encode, number_of
from paceline.ddp.agreement.layer_collectives import expect_shadowable, layers_to_shadow
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.agreement.step_guard import StepGuard
from paceline.ddp.consistency.buffers import Buffers
from paceline.ddp.consistency.buffers_at_rest import BuffersAtRest
from paceline.ddp.engine.dormant import Asleep
from paceline.ddp.engine.reducer import Reducer
from paceline.ddp.engine.single_rank import SoloReducer
from paceline.ddp.transport.channel import Channel
from paceline.torch_internals.dtensor import local_of
from paceline.unwrapping import Communicates


class Joining(Joinable):
    """The part of the wrapper that lets ranks run out of data at different times."""

    module: nn.Module
    device: torch.device
    process_group: dist.ProcessGroup
    forward_sync_buffers: bool
    _join_config: _JoinConfig
    _channel: Channel | None
    _reducer: Reducer | SoloReducer | Asleep
    _ledger: Ledger
    _guard: StepGuard
    parameters_to_ignore: set[str]
    _delayed: Sequence[tuple[str, nn.Parameter]]
    _buffers_to_sync: Buffers
    _rest: BuffersAtRest
    _replica_check: Any = None
    _comm_hooks: list[Any]
    _trained: list[tuple[str, nn.Parameter]]
    buffer_hook: Any

    _stage = Stage.IDLE
    _is_joining = False
    _has_joined = False
    """Whether it was ever part of a ``join``."""
    _present: Sequence[int] = (0,)
    """Ranks of the group that had data when the step began; rank 0 at least, outside ``join``."""
    _layers: Sequence[Communicates] = ()
    _optimizers: Sequence[Optimizer] = ()
    _counts_joined = True
    """Whether a mean divides by the ranks that ran out, too."""
    _authoritative_rank = 0
    """The rank whose model all got when the last ``join`` ended."""

    def _wake(self) -> Reducer:
        raise NotImplementedError

    # -- torch's protocol ---------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Sequence[Optimizer] = (),
    ) -> Join:
        """Surround a training loop in which ranks may run out of data at different times, or have none at all.

        A rank that leaves its loop takes part in the others' steps, SyncBatchNorm's collectives included, without
        contributing; once all have left, every rank gets the model of the one that left last (the highest of these).

        Args:
            divide_by_initial_world_size: means without :meth:`weight` divide by all ranks (default), or only by those
                that have data. Weighted means are those over all samples in any case.
            enable: ``False`` turns it off.
            throw_on_early_termination: raise ``RuntimeError`` on every rank as soon as one runs out.
            optimizers: brought up to date as well at the end, on ranks that ran out early; without it momentum and
                the like stay as they were at that rank's own last step, of which a warning tells.

        Raises:
            UsageError: once a rank has run out, if the model holds torch's own SyncBatchNorm.
        """
        options = {"divide_by_initial_world_size": divide_by_initial_world_size, "optimizers": optimizers}
        return _JoinOne(self, enable, throw_on_early_termination, options)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``torch.distributed.algorithms.join.Join``; takes the keyword arguments of :meth:`join`."""
        self._counts_joined = kwargs.get("divide_by_initial_world_size", True)
        self._optimizers = tuple(kwargs.get("optimizers", ()))
        self._stage, self._has_joined = Stage.IDLE, True
        if isinstance(self._reducer, Asleep):
            self._wake()  # all ranks come here, which may not be so in the copy's first backward
        if isinstance(self._reducer, Reducer):
            self._layers = layers_to_shadow(self.module, self.process_group)
            self._is_joining = True
            for index, layer in enumerate(self._layers):
                layer.announce = partial(self._tell, Event.LAYER, index)
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join``'s own collectives have their tensors."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of ``Join``'s own collectives."""
        return self.process_group

    # -- a rank that has data -----------------------------------------------------------------------------------

    def _join_forward(self) -> None:
        """A forward begins a step, unless it is one more in a step that others shadow."""
        if self._join_config.enable and self._stage in (Stage.IDLE, Stage.ALONE):
            self._open_step()

    def _open_step(self) -> None:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        self._exchange(Message(Event.FORWARD))
        self._stage = Stage.ALONE if len(self._present) == dist.get_world_size(self.process_group) else Stage.FOLLOWED

    def _tell(self, event: Event, layer: int = 0, code: int = 0) -> bool:
        """Before a collective: tell it to the ranks that ran out; returns whether there are any."""
        if not self._join_config.enable or self._stage is Stage.SHADOWING:
            return self._stage is Stage.SHADOWING
        ends = event in (Event.END, Event.LOCAL)
        if self._stage is Stage.IDLE:
            if ends:
                return False
            self._open_step()
        if is_followed := self._stage is Stage.FOLLOWED:
            self._exchange(Message(event, layer, code))
        if ends:
            self._stage = Stage.IDLE
        return is_followed

    def _exchange(self, message: Message | None) -> Message | None:
        """Collective: what the ranks that have data do next, and which these are."""
        channel = self._channel
        assert channel is not None
        vector = torch.tensor(encode(message, number_of(channel.name), channel.rank, channel.size), device=self.device)
        # On the group of Join's own messages, where a wrapper whose turn it is not meets them, too. Collectives of
        # layers and of communication hooks, which may be on it as well, come before or after it on all ranks alike.
        dist.all_reduce(vector, dist.ReduceOp.MAX, group=self.process_group)
        message, self._present = decode(vector)
        if message is not None and message.event is Event.FORWARD and len(self._present) < channel.size:
            expect_shadowable(self.module)
        return message

    # -- a rank that ran out ------------------------------------------------------------------------------------

    def _shadow_step(self) -> None:
        """Take part in one step of the ranks that have data, or in what is left of it."""
        self._stage = Stage.SHADOWING
        assert isinstance(self._reducer, Reducer)
        self._ledger.status.joined = True
        while (message := self._exchange(None)) is not None and message.event is not Event.LOCAL:
            if message.event is Event.BUFFERS:
                self._exchange_buffers()
            elif message.event is Event.LAYER:
                self._layers[message.layer].shadow(message.code, self.device)
            elif message.event is Event.BACKWARD:
                self._launch_without_data(self._reducer)
            elif message.event is Event.END:
                self._reducer.finish()  # a sharded optimizer in the same Join steps with these averages
                return

    def _launch_without_data(self, reducer: Reducer) -> None:
        """Hand in what was accumulated under ``no_sync`` and not averaged yet; what was averaged before is dropped."""
        self._ledger.forget_dropped(reducer.parameters, in_backward=False)
        if not self._ledger.local_backwards:
            for parameter in reducer.parameters:
                parameter.grad = None
            self._ledger.contributes_nothing(counted=self._counts_joined)
        with torch.no_grad():
            reducer.launch_all()

    def _exchange_buffers(self) -> None:
        """Collective: make buffers equal to those of the first rank that has data, or as a user's hook does it."""
        assert self._channel is not None
        if hasattr(self, "buffer_hook"):  # as torch's _register_buffer_comm_hook leaves it
            self._buffers_to_sync.run_hook(self.buffer_hook.buffer_comm_hook, self.buffer_hook.buffer_comm_hook_state)
        else:
            self._buffers_to_sync.broadcast(self._channel, self._present[0])
            if self._replica_check is not None:
                self._replica_check.note_buffers(self._buffers_to_sync.named())

    # -- the end ------------------------------------------------------------------------------------------------

    def _leave_step(self) -> None:
        """This rank has left its loop; if in the middle of a step, others may go on with it."""
        self._reducer.settle_aborted()
        if self._stage is Stage.FOLLOWED:
            self._shadow_step()

    def _agree(self, is_last_joiner: bool) -> None:
        """Collective, when all ranks have run out: every rank goes on from the model of one that ran out last."""
        if self._channel is not None:
            status = self._ledger.status
            mine = (is_last_joiner, status.forwards, status.optimizer_steps, self._guard.has_state())
            everyone = self._channel.all_gather_object(mine)
            source = self._authoritative_rank = max(rank for rank, theirs in enumerate(everyone) if theirs[0])
            named = [*self.module.named_parameters(), *self._delayed]
            tensors = [parameter.data for name, parameter in named if name not in self.parameters_to_ignore]
            if self.forward_sync_buffers:
                tensors += [buffer.data for buffer in self._buffers_to_sync.named().values()]
                self._rest.forwards = 0
            self._channel.broadcast([local_of(tensor) for tensor in tensors], source)
            stale = [rank for rank, theirs in enumerate(everyone) if theirs[2] != everyone[source][2]]
            if stale and self._optimizers:
                self._bring_up_to_date(source)
            elif stale and everyone[source][3]:
                self._warn_of_stale_state(stale, [theirs[2] for theirs in everyone], source)
            _, status.forwards, status.optimizer_steps, _ = everyone[source]
        self._end_join()

    def _bring_up_to_date(self, source: int) -> None:
        assert self._channel is not None
        is_source = self._channel.rank == source
        box: list[Any] = [[optimizer.state_dict() for optimizer in self._optimizers] if is_source else None]
        self._channel.run(
            "broadcast of optimizer state",
            dist.broadcast_object_list,
            box,
            group=self.process_group,
            group_src=source,
            device=self.device,
        )
        if not is_source:
            for optimizer, state in zip(self._optimizers, box[0], strict=True):
                optimizer.load_state_dict(state)

    def _warn_of_stale_state(self, stale: list[int], steps: list[int], source: int) -> None:
        where = ", ".join(f"rank {rank} after {steps[rank]}" for rank in stale)
        warnings.warn(
            f"data ran out on {where} of {steps[source]} optimizer steps, where the optimizer's state stays as it was, "
            "so replicas will differ after the next step; give join(optimizers=[optimizer]) to bring it up to date",
            stacklevel=4,
        )

    def _end_join(self) -> None:
        """The wrapper is as it was before ``join``."""
        self._join_config = _JoinConfig.construct_disabled_join_config()
        self._stage, self._present, self._optimizers = Stage.IDLE, (0,), ()
        if self._ledger.status.joined:
            for _, parameter in self._trained:
                parameter.grad = None  # of the others' data; the next backward would add to it
        self._ledger.status.joined = False
        for layer in self._layers:
            layer.announce = None
        self._layers = ()
        self._is_joining = False


class EventsOf:
    """The events of `wrapper`'s ``join``, for its reducer."""

    def __init__(self, wrapper: Joining) -> None:
        self._wrapper = weakref.ref(wrapper)

    @property
    def is_active(self) -> bool:
        """Whether a ``join`` is under way."""
        wrapper = self._wrapper()
        return wrapper is not None and wrapper._is_joining

    def tell(self, event: Event) -> bool:
        """Say what comes next."""
        wrapper = self._wrapper()
        return wrapper is not None and wrapper._tell(event)


class _Hook(JoinHook):
    """What ``Join`` calls on a rank that ran out."""

    def __init__(self, wrapper: Joining) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        self._wrapper._shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._wrapper._agree(is_last_joiner)


class _JoinOne(Join):
    """torch's ``Join`` of one wrapper, which may also be left in the middle of a step, and leaves nothing behind."""

    def __init__(self, wrapper: Joining, enable: bool, throw: bool, options: dict[str, Any]) -> None:
        super().__init__([wrapper], enable, throw, **options)
        self._wrapper = wrapper

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._enable:
                self._wrapper._leave_step()
            with warnings.catch_warnings():  # torch changes the filters of the whole process
                super().__exit__(kind, error, trace)
        finally:
            self._wrapper._end_join()
