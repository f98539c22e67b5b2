"""The connection: the parts of a wrapper that reach other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn

from paceline.comm.forking import finalize
from paceline.core.telemetry.spans import Recorder
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.ddp.consistency.buffer_sync import BufferSync
from paceline.ddp.consistency.initial_sync import make_equal
from paceline.ddp.consistency.replica_check import ReplicaCheck
from paceline.ddp.engine.backward.new_parameters import NewParameters, OnChange
from paceline.ddp.engine.parts import make_parts
from paceline.ddp.engine.reducer import Reducer
from paceline.ddp.options.config import Options
from paceline.ddp.options.module_checks import check_broadcast
from paceline.ddp.transport.channel import Channel
from paceline.ddp.transport.opening import open_channel
from paceline.ddp.wrapper.join import JoinedSteps
from paceline.ddp.wrapper.replica import Replica

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
TorchDDP = nn.parallel.DistributedDataParallel


@dataclass(frozen=True)
class Connection:
    """The parts of a wrapper that reach other ranks, made by all of them together."""

    channel: Channel
    """Carries the wrapper's collectives."""
    joined_steps: JoinedSteps
    """Tells ranks without data, inside ``join``, what comes next."""
    buffers: BufferSync
    """Keeps the module's buffers equal."""
    reducer: Reducer
    """Averages gradients."""


def connect(
    wrapper: TorchDDP,
    replica: Replica,
    options: Options,
    recorder: Recorder,
    on_change: OnChange,
    *,
    makes_equal: bool,
) -> Connection:
    """Open a channel among the ranks, make their replicas equal, and begin to average; called by all ranks.

    Args:
        wrapper: has the process group, and is asked while it lives, by torch's names, whether forwards synchronize
            buffers, for a buffer hook, and for ``join``.
        replica: the wrapper's.
        options: the wrapper's.
        recorder: records spans.
        on_change: is told of new parameters, see :class:`.NewParameters`.
        makes_equal: whether to do as ``init_sync`` says; if not, the replicas are left as they are.

    Raises:
        UsageError: for parameters or buffers that cannot be broadcast.
        ReplicaMismatch: if the replicas differ where they must not.
    """
    init_sync = makes_equal and options.init_sync
    replicated = replica.initial_tensors(options) if makes_equal else []
    if makes_equal:
        buffers = list(replica.buffers.named().items()) if options.syncs_buffers else []
        broadcast = replicated if init_sync is True else buffers
        backend = str(dist.get_backend(wrapper.process_group))
        check_broadcast([(name, local_of(tensor)) for name, tensor in broadcast], backend)
    channel = open_channel(wrapper.process_group, replica.device, options.nccl)
    # When the wrapper goes, also one that is refused below, the module is the user's alone again.
    finalize(wrapper, channel.close)
    make_equal(channel, replicated, init_sync)
    buffers_may_differ = channel.size > 1 and not (replicated and init_sync)
    connection = _average_over(channel, wrapper, replica, options, recorder, on_change, buffers_may_differ)
    finalize(wrapper, connection.reducer.close)
    return connection


def _average_over(
    channel: Channel,
    wrapper: TorchDDP,
    replica: Replica,
    options: Options,
    recorder: Recorder,
    on_change: OnChange,
    buffers_may_differ: bool,
) -> Connection:
    alive = weakref.ref(wrapper)
    recorder.groups[channel.name] = channel.members
    joined_steps = JoinedSteps(wrapper, channel, replica)
    replica_check = None
    if options.check_replicas_every:
        replica_check = ReplicaCheck(
            options.check_replicas_every, replica.watch.named_parameters, replica.ledger, channel
        )
    buffers = BufferSync(
        replica.buffers,
        channel,
        joined_steps,
        replica_check,
        is_wanted=lambda: (model := alive()) is not None and model.will_sync_module_buffers(),
        hook=lambda: None if (model := alive()) is None else vars(model).get("buffer_hook"),
        may_differ=buffers_may_differ,
    )
    make = partial(
        make_parts,
        replica.trained,
        channel,
        replica.ledger,
        options,
        recorder,
        NewParameters(replica.watch, channel, on_change),
        buffers,
        joined_steps,
        replica_check,
    )
    return Connection(channel, joined_steps, buffers, Reducer(make))


def while_alive(method: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
    """Return a function that calls `method` for as long as its object lives, and then does nothing."""
    alive = weakref.WeakMethod(method)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
        bound = alive()
        return None if bound is None else bound(*args, **kwargs)

    return call
