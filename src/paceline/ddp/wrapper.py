"""``DistributedDataParallel``: a module that trains as one replica among many.

A step, as the data flows: ``forward`` syncs buffers and hooks its outputs; backward hands complete buckets to
communication while it runs; at its end ``p.grad`` is the average over the ranks; the optimizer steps. The middle part
is :mod:`paceline.ddp.engine.reducer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _to_kwargs

from paceline.buckets import FIRST_CAPACITY
from paceline.comm.forking import finalize
from paceline.ddp.agreement.join_events import Event
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.agreement.step_guard import StepGuard
from paceline.ddp.config import (
    Algorithm,
    InitSync,
    Options,
    UnusedParameters,
    capacities,
    check_algorithm,
    check_averaged,
    check_broadcast,
    check_delayed,
    check_devices,
    check_init_sync,
    check_initialized,
    check_interval,
    check_reduce_dtype,
    check_unused_parameters,
    choose_group,
    tensors_in,
    trained_parameters,
)
from paceline.ddp.consistency.buffers import Buffers
from paceline.ddp.consistency.buffers_at_rest import BuffersAtRest
from paceline.ddp.consistency.initial_sync import make_equal
from paceline.ddp.consistency.replica_check import ReplicaCheck
from paceline.ddp.engine.dormant import Asleep
from paceline.ddp.engine.mean_losses import MeanLosses
from paceline.ddp.engine.module_changes import ModuleWatch, Named
from paceline.ddp.engine.new_parameters import Newcomers, OnChange
from paceline.ddp.engine.parts import make_parts
from paceline.ddp.engine.reducer import Reducer
from paceline.ddp.engine.single_rank import SoloReducer
from paceline.ddp.join import EventsOf, Joining
from paceline.ddp.sync_control import SyncControl
from paceline.ddp.torch_compat.copying import Copyable
from paceline.ddp.torch_compat.hooks import TakesHooks
from paceline.ddp.torch_compat.members import TorchMembers
from paceline.ddp.torch_compat.mixed_precision import LowPrecision
from paceline.ddp.transport.channel import Channel, open_channel
from paceline.torch_internals.autograd import is_in_backward
from paceline.torch_internals.compile import call_module, compiled_below, never_compiled
from paceline.torch_internals.dtensor import local_of
from paceline.tracing import FORWARD, Recorder
from paceline.unwrapping import plain_name


class DistributedDataParallel(  # type: ignore[misc, override]
    SyncControl, TakesHooks, Copyable, TorchMembers, Joining, nn.parallel.DistributedDataParallel
):
    """Replicates `module` over the ranks of a process group and averages gradients during backward.

    A drop-in for ``torch.nn.parallel.DistributedDataParallel``, of which it is a subclass so that frameworks that ask
    for that class find it; none of its machinery is used. Every argument of torch's is taken, in torch's order. Those
    that choose what is always so here change nothing: ``find_unused_parameters``, ``gradient_as_bucket_view``,
    ``static_graph``, ``batched_grad_copy``, ``check_reduction``. What each means here is in docs/drop-in.md.

    Gradients equal those of one process on the whole global batch: for a mean loss and equal slices as torch's do, and
    for slices of any size with :meth:`weight` around a summed loss. A parameter for which no rank has a gradient keeps
    ``grad is None``.

    Call the wrapper, not ``model.module``: only backwards through a forward of the wrapper are synchronized. An
    optimizer step over gradients of which none was averaged is refused. Several wrappers may share parameters, whose
    gradient is the sum of what each of them averages.

    Args:
        module: the module to replicate, on its device already; the same on every rank.
        device_ids: for a module on one GPU, that GPU; inputs are moved there. ``None`` for the CPU.
        broadcast_buffers: send rank 0's buffers to all ranks at the end of synchronized backwards (default), or not.
        init_sync: ``True`` broadcasts rank 0's parameters and buffers, after checking that names, shapes and dtypes
            are equal everywhere; ``"verify"`` raises unless the values are equal, too; ``False`` does neither.
        process_group: the ranks to average over; by default all.
        bucket_cap_mb: bucket capacity in MiB.
        bucket_cap_mb_list: capacity of the first, second, … bucket to be launched, in MiB.
        forward_sync_buffers: torch's new name for `broadcast_buffers`; wins over it.
        unused_parameters: what to do where a parameter has no gradient on some rank, as it was not used: ``"warn"``
            once for each by name and rank, on rank 0; ``"error"`` on every rank; ``"allow"``, as also with
            ``find_unused_parameters=True`` or ``static_graph=True``. The average is right in any case.
        mixed_precision: torch's ``_MixedPrecision``: the forward computes with copies of parameters and inputs in its
            ``param_dtype``; gradients keep the parameters' dtype and travel in its ``reduce_dtype``. Not together with
            activation checkpointing; ``torch.autocast`` needs no argument.
        check_finite: raise :class:`~paceline.errors.NonFiniteGradient`, on every rank in the same step, if a rank's
            gradient holds NaN or Inf. Costs one read of the gradients. Leave it off with a GradScaler.
        reduce_dtype: dtype of the buckets, and so of what travels and is summed, where it is not to be each
            parameter's own: ``torch.float32`` for exact means of bf16 gradients, bf16 or fp16 for half the bytes.
            Gradients keep the parameters' dtype, in memory of their own beside the buckets. In fp16 the gradient of
            a rank's summed loss must not overflow; bf16 has the range for it.
        check_replicas_every: compare parameters, optimizer state and broadcast buffers between ranks once in so many
            optimizer steps, bit by bit through fingerprints; a difference raises
            :class:`~paceline.errors.ReplicaMismatch` on every rank. Costs one read of them.
        algorithm: ``"ring"``, ``"tree"``, ``"halving-doubling"`` or ``"hierarchical"`` sums the buckets by that one of
            :mod:`paceline.comm.algorithms`, for study and for backends without a good all-reduce. It overlaps with
            nothing, and two such wrappers must come in the same order on every rank. By default the backend's own.
        recorder: records the spans of each step while it is on.

    Raises:
        UsageError: for arguments that are wrong or not supported.
        ReplicaMismatch: if the models differ between ranks; names the parameter and the rank.
        WorldError: without a process group; call :func:`paceline.init` first.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: InitSync = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        unused_parameters: UnusedParameters = "warn",
        check_finite: bool = False,
        reduce_dtype: torch.dtype | None = None,
        check_replicas_every: int | None = None,
        algorithm: Algorithm | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not torch DDP's, which would build its reducer
        Joinable.__init__(self)
        self._low_precision = LowPrecision(mixed_precision, reduce_dtype) if mixed_precision is not None else None
        if self._low_precision is not None:
            reduce_dtype = self._low_precision.reduce_dtype
        init_sync = check_init_sync(init_sync)
        capacity = capacities(bucket_cap_mb, bucket_cap_mb_list)
        unused = check_unused_parameters(
            unused_parameters, expected=find_unused_parameters or static_graph or skip_all_reduce_unused_params
        )
        self._options = Options(
            capacity, check_finite, check_reduce_dtype(reduce_dtype), unused, check_algorithm(algorithm)
        )
        self._check_replicas_every = check_interval(check_replicas_every)
        self._delayed = check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.module = module
        check_initialized(module)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        if self._low_precision is not None:
            self._low_precision.cast_buffers(module, self.parameters_to_ignore)
        self._prepare()
        self._input_device = check_devices(device_ids, output_device, self.device)
        self.process_group = choose_group(process_group, device_mesh)

        self.device_mesh, self._recorder = device_mesh, recorder or Recorder()
        self.device_ids, self.output_device, self.dim = device_ids, output_device, dim
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.mixed_precision = gradient_as_bucket_view, mixed_precision
        self.batched_grad_copy, self.skip_all_reduce_unused_params = batched_grad_copy, skip_all_reduce_unused_params
        # torch.compile cuts its graphs at this size, and refuses one below torch's first bucket.
        self.bucket_bytes_cap, self.bucket_bytes_cap_list = (
            max(capacity[-1], FIRST_CAPACITY),
            list(capacity if bucket_cap_mb_list else ()),
        )
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        sync = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.forward_sync_buffers = sync is not False
        self.register_load_state_dict_pre_hook(_accept_bare_keys)  # type: ignore[no-untyped-call]
        if dist.get_world_size(self.process_group) == 1:
            self._be_alone()
            return
        # torch's rule: broadcast_buffers=False leaves buffers alone at the start, too, forward_sync_buffers=False not.
        buffers = self._buffers_to_sync.named() if forward_sync_buffers is not None or sync is not False else {}
        parameters = [*module.named_parameters(), *self._delayed]
        named = [(name, one) for name, one in parameters if name not in self.parameters_to_ignore]
        replicated = [*named, *buffers.items()]
        broadcast = replicated if init_sync is True else buffers.items() if self.forward_sync_buffers else []
        check_broadcast([(name, local_of(one)) for name, one in broadcast], str(dist.get_backend(self.process_group)))
        self._connect(replicated, init_sync)

    def _prepare(self) -> None:
        """Find out what there is to average, which needs no other rank."""
        module, ignored = self.module, self.parameters_to_ignore
        trained = trained_parameters(module, ignored, self._delayed)
        check_averaged(trained)
        self._trained = [(plain_name(name), parameter) for name, parameter in trained]
        self._watch = ModuleWatch(self._modules, ignored, self._delayed, self._trained)
        self._buffers_to_sync = Buffers(module, ignored)
        self.device = trained[0][1].device
        self._ledger = Ledger()
        self._mean_losses = MeanLosses(self._watch, self._ledger)
        self._channel: Channel | None = None
        self._reducer: Reducer | SoloReducer | Asleep
        self._comm_hooks = []

    def _be_alone(self) -> None:
        """A world of one."""
        self._reducer = SoloReducer(
            self._trained, self._ledger, self._options.check_finite, self._watch, self._on_change()
        )
        self._guard = StepGuard([one for _, one in self._trained], self._ledger, lambda: None)

    def _connect(self, replicated: list[tuple[str, torch.Tensor]], init_sync: InitSync) -> Reducer:
        """Open a channel among the ranks, make `replicated` equal, and begin to average; called by all ranks."""
        self._channel = open_channel(self.process_group, self.device)
        # When the wrapper goes, also one that is refused below, the module is the user's alone again.
        finalize(self, self._channel.close)
        make_equal(self._channel, replicated, init_sync)
        return self._reduce_over(self._channel, buffers_may_differ=not (replicated and init_sync))

    def _reduce_over(self, channel: Channel, *, buffers_may_differ: bool = False) -> Reducer:
        """Make the reducer that communicates on `channel`."""
        wanted = weakref.WeakMethod(self._syncs_buffers_at_rest)
        self._rest = BuffersAtRest(
            self._buffers_to_sync, channel, lambda: bool((call := wanted()) and call()), may_differ=buffers_may_differ
        )
        newcomers = Newcomers(self._watch, channel, self._on_change())
        if self._check_replicas_every:
            self._replica_check = ReplicaCheck(
                self._check_replicas_every, self._watch.named_parameters, self._ledger, channel
            )
        self._reducer = reducer = Reducer(
            partial(
                make_parts,
                self._trained,
                channel,
                self._ledger,
                self._options,
                self._recorder,
                newcomers,
                self._rest,
                EventsOf(self),
                self._replica_check,
            )
        )
        self._guard = StepGuard([one for _, one in self._trained], self._ledger, reducer.local_gradient)
        finalize(self, reducer.close)
        return reducer

    def _on_change(self) -> OnChange:
        """What the reducer calls when the module has got other parameters after it was wrapped."""
        take_over = weakref.WeakMethod(self._take_over)

        def tell(named: Named, averaged: bool) -> None:
            if (call := take_over()) is not None:  # the wrapper is not gone
                call(named, averaged)

        return tell

    def _take_over(self, named: Named, averaged: bool) -> None:
        """The parameters `named` are `averaged` from now on, or will be; a step over them is guarded already."""
        self._guard.watch(parameter for _, parameter in named)
        if averaged:
            self._trained = named
            if self._low_precision is not None:
                self._low_precision.cast_buffers(self.module, self.parameters_to_ignore)
            self._buffers_to_sync.renew(self.module)

    def _whole_reducer(self) -> Reducer:
        """The reducer, with buckets also where the rank is alone: a communication hook is called there, too."""
        if isinstance(self._reducer, Reducer):
            return self._reducer
        if isinstance(self._reducer, Asleep):
            return self._wake()
        enabled = self._reducer.sync_enabled
        self._channel = open_channel(self.process_group, self.device)
        finalize(self, self._channel.close)
        reducer = self._reduce_over(self._channel)
        reducer.sync_enabled = enabled
        return reducer

    def _named_trained(self) -> list[tuple[str, nn.Parameter]]:
        return self._trained

    # -- forward ------------------------------------------------------------------------------------------------

    @compiled_below
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; with gradients, its outputs are hooked for backward."""
        if self._input_device is not None:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, self._input_device, False)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if not torch.is_grad_enabled():
            return self._call_module(None, inputs, kwargs)
        on_local = self._begin_forward()
        with self._recorder.span(FORWARD):
            output = self._call_module(self, inputs, kwargs)
        self._end_forward(output, on_local)
        return output

    @compiled_below
    def _call_module(self, wrapper: Any, inputs: Any, kwargs: Any) -> Any:
        if self._low_precision is None:
            return call_module(wrapper, self.module, inputs, kwargs)
        inputs, kwargs = self._low_precision.cast_inputs(inputs, kwargs)
        with self._low_precision.cast_parameters(self.module, self.parameters_to_ignore):
            return call_module(wrapper, self.module, inputs, kwargs)

    @never_compiled
    def _end_forward(self, output: Any, on_local: Callable[[], None]) -> None:
        self._reducer.watch_outputs(tensors_in(output), on_local)
        if self._channel is not None and self.training and self.do_sync and self._check_sync_bufs_post_fwd():
            self._tell(Event.BUFFERS)
            self._exchange_buffers()

    @never_compiled
    def _begin_forward(self) -> Callable[[], None]:
        """Before a forward: what has to happen on all ranks. Returns what undoes its count."""
        if not self.training or self._channel is None:
            return _nothing
        self._channel.expect_open()
        if not is_in_backward():  # not while a checkpoint is recomputed inside backward
            self._reducer.settle_aborted()
        self._join_forward()
        if not self.do_sync:
            return _nothing
        # A forward whose buffers travel counts, whatever its backward does.
        return _nothing if self._count_forward() else self._ledger.take_back_forward()

    def _count_forward(self) -> bool:
        """Count a forward that all ranks run; returns whether its buffers travel."""
        travels = self.will_sync_module_buffers()
        self._ledger.forward(broadcasts=travels)
        if travels and (self._rest.forwards or self._has_buffer_hook()):
            self.sync_buffers()
        self._rest.forwards += 1
        return travels

    def sync_buffers(self) -> bool:
        """Make buffers equal to rank 0's now; returns whether there are any to sync.

        After a synchronized backward they are equal already. Call it on all ranks where something else has changed
        them, such as training forwards under ``no_grad`` that recompute running statistics.
        """
        if self._channel is None or not self._check_sync_bufs_pre_fwd():
            return False
        self._tell(Event.BUFFERS)
        self._exchange_buffers()
        self._rest.forwards = 0
        return True

    # -- what it costs ------------------------------------------------------------------------------------------

    @property
    def gradient_bytes_per_step(self) -> int:
        """Bytes of gradient that this rank hands to communication in one synchronized backward."""
        return self._reducer.storage.nbytes if isinstance(self._reducer, Reducer) else 0

    @property
    def exposed_seconds(self) -> float:
        """Time that backwards have waited for communication at their end, in seconds, since the wrapper was made."""
        return self._reducer.exposed_seconds

    # -- checkpoints --------------------------------------------------------------------------------------------

    def bucket_layout(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order of launch; empty in a world of one."""
        return self._reducer.storage.named_layout() if isinstance(self._reducer, Reducer) else []

    def load_bucket_layout(self, layout: list[list[str]]) -> None:
        """Rebuild the buckets as :meth:`bucket_layout` gave them; on all ranks alike.

        A layout from a world of one says nothing, and a world of one needs none.

        Raises:
            CheckpointMismatch: if it does not fit this model.
        """
        if layout and isinstance(self._reducer, Reducer):
            self._reducer.restore_layout(layout)


def _nothing() -> None:
    """For a forward that cannot be taken back."""


def _accept_bare_keys(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Let ``load_state_dict`` take keys without ``module.``, as checkpoints and ``unwrap(model)`` write them."""
    for own in model.state_dict():
        bare, wanted = prefix + plain_name(own.removeprefix("module.")), prefix + own
        if bare in state_dict and wanted not in state_dict:
            state_dict[wanted] = state_dict.pop(bare)
