"""One rank's replica of the module, and the parts of a wrapper that communicate with other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.forking import finalize
from paceline.core.spans import recorder
from paceline.core.torch_internals import TorchDDP
from paceline.core.unwrapping import plain_name
from paceline.ddp.buffers import Buffers, BufferSync
from paceline.ddp.channel import Channel, open_channel
from paceline.ddp.extension_points import Extension
from paceline.ddp.extensions import CHECK_FINITE, FiniteCheck, GraphCapture, OutOfBucket, UnusedParameters
from paceline.ddp.frozen_step import FrozenStep
from paceline.ddp.joined_steps import JoinedSteps
from paceline.ddp.ledger import Ledger
from paceline.ddp.module_changes import ModuleWatch, Named, OnChange, make_equal
from paceline.ddp.options import Options, check_averaged, check_lookups, check_synchronized, trained_parameters
from paceline.ddp.reducer import Reducer
from paceline.ddp.replica_check import ReplicaCheck

if TYPE_CHECKING:
    from paceline.ddp.virtual_ranks import VirtualRanks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Replica:
    """One rank's module: knows which parameters and buffers are synchronized, and counts this rank's steps.

    Args:
        modules: the wrapper's ``_modules``, so that assigning a new ``model.module`` is detected too.
        ignored: names of parameters and buffers that are not synchronized.
    """

    device: torch.device
    """Device of the first parameter when the module was wrapped."""
    trained: Named
    """The parameters that are averaged."""
    watch: ModuleWatch
    """Detects when the module's parameters differ from `trained`."""
    buffers: Buffers
    """The buffers that are synchronized."""
    ledger: Ledger
    """Counts steps and adds up weights, which the control block reports to the other ranks."""

    def __init__(self, modules: dict[str, Any], ignored: set[str]) -> None:
        trained = trained_parameters(modules["module"], ignored)
        check_averaged(trained)
        self.device = trained[0][1].device
        self.trained = [(plain_name(name), parameter) for name, parameter in trained]
        self.watch = ModuleWatch(modules, ignored, self.trained)
        self.buffers = Buffers(self.module, ignored, self.device)
        self._ignored = ignored
        self.ledger = Ledger()

    @property
    def module(self) -> nn.Module:
        return self.watch.module

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.trained]

    def all_parameters(self) -> list[nn.Parameter]:
        """Return all parameters of the module, averaged or not."""
        return list(self.module.parameters())

    def initial_tensors(self, options: Options) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that must be equal when averaging begins: parameters, also frozen ones, and buffers."""
        parameters = self.module.named_parameters()
        buffers = self.buffers.named().items() if options.syncs_initial_buffers else []
        return [*((name, tensor) for name, tensor in parameters if name not in self._ignored), *buffers]

    def adopt(self, named: Named) -> None:
        """From now on, average the parameters `named`, and synchronize the buffers that were added with them."""
        self.trained = named
        self.buffers.renew(self.module)


@dataclass(frozen=True)
class Connection:
    """The parts of a wrapper that communicate with other ranks; all ranks create them together."""

    channel: Channel
    """The channel of the wrapper's collectives."""
    joined_steps: JoinedSteps
    """Announces collectives to ranks without data inside ``join``."""
    buffers: BufferSync
    """Keeps the module's buffers equal."""
    reducer: Reducer
    """Averages gradients."""
    replica_check: ReplicaCheck
    """Compares the replicas periodically."""
    virtual_ranks: VirtualRanks | None = None
    """Sums the gradients of a rank's slices; None without virtual ranks."""

    def with_virtual_ranks(self, options: Options) -> Connection:
        """Return the connection, extended with sums of gradients over slices; called on all ranks."""
        from paceline.ddp.virtual_ranks import VirtualRanks  # few wrappers need this import

        count = options.virtual_ranks
        virtual_ranks = VirtualRanks(self.reducer, count)
        self.buffers.is_sliced = True
        # After the two extensions that may refuse a backward pass, because SharedParameters records that parameters are
        # shared, and before the extensions that read the gradients of all slices.
        self.reducer.use_virtual_ranks(count, virtual_ranks, before=self.joined_steps)
        return replace(self, virtual_ranks=virtual_ranks)


def connect(
    wrapper: TorchDDP, replica: Replica, options: Options, on_change: OnChange, *, makes_equal: bool
) -> Connection:
    """Open a channel between the ranks, make their replicas equal, and start averaging; called by all ranks.

    Args:
        wrapper: provides the process group and takes part in ``join``. Its torch attributes determine whether forward
            passes synchronize buffers. It is referenced weakly.
        replica: the wrapper's replica.
        options: the wrapper's options.
        on_change: called with new parameters, see :class:`.Reducer`.
        makes_equal: whether to apply ``init_sync``; otherwise the replicas stay unchanged.
    """
    init_sync = makes_equal and options.init_sync
    replicated = replica.initial_tensors(options) if makes_equal else []
    if makes_equal:
        named_buffers = list(replica.buffers.named().items()) if options.syncs_buffers else []
        broadcast = replicated if init_sync is True else named_buffers
        check_synchronized(broadcast, str(dist.get_backend(wrapper.process_group)))
        if broadcast is not replicated and (init_sync or options.check_replicas_every):
            check_synchronized(replicated)
        if options.virtual_ranks or dist.get_world_size(wrapper.process_group) > 1:
            check_lookups(replica.module, wrapper.parameters_to_ignore)
    channel = open_channel(wrapper.process_group, replica.device)
    # Registered before anything below can raise, so that the channel is closed even if construction fails.
    finalize(wrapper, channel.close)
    make_equal(channel, replicated, init_sync)
    recorder.groups[channel.name] = channel.members
    ledger, every, has_peers = replica.ledger, options.check_replicas_every, channel.size > 1
    ledger.has_peers = has_peers
    if has_peers and options.init_sync is not False:
        ledger.settings.comparisons_left = 8
        if not every:
            ledger.compare_at = 1
    joined_steps = JoinedSteps(wrapper, channel, lambda: replica.module)
    replica_check = ReplicaCheck(every, replica.watch.named_parameters, ledger, channel)
    may_differ = has_peers and not (replicated and init_sync)
    buffers = BufferSync(wrapper, replica.buffers, channel, joined_steps, ledger, may_differ=may_differ)
    reducer = Reducer(replica.trained, replica.watch, on_change, channel, ledger, buffers, options)
    reducer.extensions.use(_extensions_of(reducer, options, joined_steps, replica_check))
    connection = Connection(channel, joined_steps, buffers, reducer, replica_check)
    if options.virtual_ranks:
        connection = connection.with_virtual_ranks(options)
    reducer.frozen_step = FrozenStep(reducer)
    # The module outlives the wrapper and must not keep its hooks.
    finalize(wrapper, reducer.close)
    return connection


def _extensions_of(
    reducer: Reducer, options: Options, joined_steps: JoinedSteps, replica_check: ReplicaCheck
) -> list[Extension]:
    """Return the extensions for the rare cases of a step, in the order of their calls."""
    channel, trained = reducer.channel, reducer.trained
    cannot_be_captured = {
        CHECK_FINITE: lambda: reducer.checks_finite,
        "check_replicas_every, because the host compares the replicas": replica_check.begin_capture,
        "model.weight(), because the sum of weights would always be the captured one": (
            lambda: reducer.ledger.is_weight_pending
        ),
        "virtual_ranks, because the sums of earlier slices are in different memory in each step": lambda: bool(
            reducer.virtual_ranks
        ),
        "join(), because ranks run out of data at different steps": joined_steps.is_active,
        "sparse gradients, because the host reads their size": lambda: bool(reducer.buckets.unbucketed),
        "a communication hook or compressor, because it needs the host": (lambda: not reducer.finisher.is_capturable),
        "the wrapper's first steps, because they find the order of the gradients": lambda: (
            not reducer.arrivals.order_known
        ),
    }
    return [
        # These two may refuse a backward pass. GraphCapture comes first, because SharedParameters inspects gradients
        # and sets some of them aside.
        GraphCapture(reducer.exposed_time.device, channel.rank, cannot_be_captured),
        reducer.shared,
        # JoinedSteps comes next, so that it does not announce a refused backward pass to ranks without data.
        joined_steps,
        # Before all extensions that read averages, because late and sparse gradients complete them.
        OutOfBucket(trained, reducer.buckets, channel),
        UnusedParameters(options.unused, trained, channel),
        replica_check,
        FiniteCheck(lambda: reducer.checks_finite),
    ]


def while_alive(method: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
    """Return a function that calls `method` as long as its object is alive."""
    alive = weakref.WeakMethod(method)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
        bound = alive()
        return None if bound is None else bound(*args, **kwargs)

    return call
