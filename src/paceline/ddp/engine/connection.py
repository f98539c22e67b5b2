"""The connection: the parts of a wrapper that reach other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn

from paceline.comm.forking import finalize
from paceline.core.telemetry.spans import Recorder
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.ddp.consistency.buffer_sync import BufferSync
from paceline.ddp.consistency.initial_sync import make_equal
from paceline.ddp.consistency.module_changes import OnChange
from paceline.ddp.engine.replica import Replica
from paceline.ddp.extensions.finite_check import FiniteCheck
from paceline.ddp.extensions.graph_capture import CHECK_FINITE, GraphCapture
from paceline.ddp.extensions.joined_steps import JoinedSteps
from paceline.ddp.extensions.out_of_bucket import OutOfBucket
from paceline.ddp.extensions.replica_check import ReplicaCheck
from paceline.ddp.extensions.shared_parameters import SharedParameters
from paceline.ddp.extensions.unused_parameters import UnusedParameters
from paceline.ddp.options.config import Options
from paceline.ddp.options.module_checks import check_broadcast, check_lookups
from paceline.ddp.reducer.extension import Extension
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.transport.channel import Channel
from paceline.ddp.transport.opening import open_channel

if TYPE_CHECKING:
    from paceline.ddp.slices.compute_check import ComputeCheck
    from paceline.ddp.slices.gradients import VirtualRanks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
TorchDDP = nn.parallel.DistributedDataParallel


@dataclass(frozen=True)
class Connection:
    """The parts of a wrapper that reach other ranks, made by all of them together."""

    channel: Channel
    """The channel of the wrapper's collectives."""
    joined_steps: JoinedSteps
    """Announces collectives to ranks without data, inside ``join``."""
    buffers: BufferSync
    """Keeps the module's buffers equal."""
    reducer: Reducer
    """Averages gradients."""
    replica_check: ReplicaCheck
    """Compares the replicas once in a while."""
    virtual_ranks: VirtualRanks | None = None
    """Adds up the gradients of a rank's slices; None without virtual ranks."""
    compute_check: ComputeCheck | None = None
    """Computes slices twice; None without ``check_compute_every``."""

    def with_virtual_ranks(self, options: Options) -> Connection:
        """Return the connection with gradients and statistics summed over slices; on all ranks."""
        from paceline.ddp.slices.compute_check import ComputeCheck  # few wrappers have virtual ranks
        from paceline.ddp.slices.gradients import VirtualRanks

        count, every = options.virtual_ranks, options.check_compute_every
        virtual_ranks = VirtualRanks(self.reducer, count)
        self.buffers.statistics = virtual_ranks.statistics
        # Before extensions that look at the gradients of all slices, and after the two that may refuse a backward:
        # SharedParameters notes that parameters are shared.
        self.reducer.use_virtual_ranks(count, virtual_ranks, before=self.joined_steps)
        check = ComputeCheck(every, self.reducer, virtual_ranks) if every else None
        return replace(self, virtual_ranks=virtual_ranks, compute_check=check)


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
        wrapper: has the process group. While it lives it is asked, by torch's names, whether forwards synchronize
            buffers, and for ``join``.
        replica: the wrapper's replica.
        options: the wrapper's options.
        recorder: records spans.
        on_change: called with new parameters, see :class:`.Reducer`.
        makes_equal: whether to act on ``init_sync``; if not, the replicas are left as they are.
    """
    init_sync = makes_equal and options.init_sync
    replicated = replica.initial_tensors(options) if makes_equal else []
    if makes_equal:
        buffers = list(replica.buffers.named().items()) if options.syncs_buffers else []
        broadcast = replicated if init_sync is True else buffers
        backend = str(dist.get_backend(wrapper.process_group))
        check_broadcast([(name, local_of(tensor)) for name, tensor in broadcast], backend)
        if options.virtual_ranks or dist.get_world_size(wrapper.process_group) > 1:
            is_first = dist.get_rank(wrapper.process_group) == 0
            check_lookups(replica.module, wrapper.parameters_to_ignore, warns=is_first)
    channel = open_channel(wrapper.process_group, replica.device, options.nccl)
    # Registered before anything below can raise, so that a refused wrapper also closes its channel.
    finalize(wrapper, channel.close)
    make_equal(channel, replicated, init_sync)
    buffers_may_differ = channel.size > 1 and not (replicated and init_sync)
    connection = _average_over(channel, wrapper, replica, options, recorder, on_change, buffers_may_differ)
    if options.virtual_ranks:
        connection = connection.with_virtual_ranks(options)
    # The module outlives the wrapper, and must not keep hooks of it.
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
    alive = weakref.ref(wrapper)  # which holds all that is made here
    recorder.groups[channel.name] = channel.members
    joined_steps = JoinedSteps(wrapper, channel, lambda: replica.module)
    every = options.check_replicas_every
    replica_check = ReplicaCheck(every, replica.watch.named_parameters, replica.ledger, channel)
    replica.ledger.has_peers = channel.size > 1
    if channel.size > 1 and options.init_sync is not False and not every:
        replica.ledger.compare_at = 1
    buffers = BufferSync(
        replica.buffers,
        channel,
        joined_steps,
        replica.ledger,
        is_wanted=lambda: (model := alive()) is not None and model.will_sync_module_buffers(),
        may_differ=buffers_may_differ,
    )
    reducer = Reducer(replica.trained, replica.watch, on_change, channel, replica.ledger, recorder, buffers, options)
    reducer.extend(_extensions_of(reducer, options, joined_steps, replica_check))
    return Connection(channel, joined_steps, buffers, reducer, replica_check)


def _extensions_of(
    reducer: Reducer,
    options: Options,
    joined_steps: JoinedSteps,
    replica_check: ReplicaCheck,
) -> list[Extension]:
    """Return the rare cases of a step, in the order of their calls."""
    channel, trained = reducer.channel, reducer.trained
    cannot_be_captured = {
        CHECK_FINITE: lambda: reducer.checks_finite,
        "check_replicas_every, which the host compares": replica_check.begin_capture,
        "model.weight(), whose sum over the ranks would stay that of this step": (
            lambda: reducer.ledger.is_weight_pending
        ),
        "virtual_ranks, whose sums of earlier slices lie elsewhere in each step": lambda: bool(reducer.virtual_ranks),
        "join(), in which ranks take part by turns": joined_steps.is_active,
        "sparse gradients, whose size the host reads": lambda: bool(reducer.buckets.unbucketed),
        "a communication hook or compressor, for which the host works": (lambda: not reducer.finisher.is_capturable),
        "the wrapper's first steps, which find the order of the gradients": lambda: not reducer.arrivals.order_known,
    }
    joined_steps.launches_at_end = lambda shadowed: reducer.finisher.launches_at_end(shadowed=shadowed)
    return [
        # These two may refuse a backward. GraphCapture first, because the other looks at gradients and sets some aside.
        GraphCapture(reducer.exposed_time.device, channel.rank, cannot_be_captured),
        SharedParameters(reducer),
        # After them, because ranks without data must not hear of a backward that is refused.
        joined_steps,
        # Before all that look at averages: late and sparse gradients complete these.
        OutOfBucket(trained, reducer.buckets, channel),
        UnusedParameters(options.unused, reducer),
        replica_check,
        FiniteCheck(lambda: reducer.checks_finite),
    ]


def while_alive(method: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
    """Return a function that calls `method` as long as its object lives."""
    alive = weakref.WeakMethod(method)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
        bound = alive()
        return None if bound is None else bound(*args, **kwargs)

    return call
