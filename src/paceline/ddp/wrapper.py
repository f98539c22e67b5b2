"""``DistributedDataParallel``: trains a module as one of several replicas.

``forward`` synchronizes buffers if due and hooks its outputs; backward launches complete buckets while it runs; when it
ends, ``p.grad`` is the average over the ranks; then the optimizer steps. README.md in ``ddp/`` describes the ten stages
of such a step; the numbers in the code refer to them. Decision 0003 explains why this is a subclass of torch's class.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from paceline.core.state.data_position import short, taken
from paceline.core.state.device_streams import is_capturing
from paceline.core.state.digests import quick_digest
from paceline.core.state.rng import derive_seed
from paceline.core.state.virtual_ranks import slices_of_rank
from paceline.core.telemetry.failpoints import strike
from paceline.core.telemetry.spans import FORWARD, recorder
from paceline.core.torch_internals.autograd import is_in_backward
from paceline.core.torch_internals.compile import call_module, compiled_below, never_compiled
from paceline.core.torch_internals.distributed.ddp import move_inputs
from paceline.core.torch_internals.tensors import is_plain
from paceline.ddp.agreement.step_guard import StepGuard
from paceline.ddp.consistency.module_changes import Named
from paceline.ddp.engine.connection import connect, while_alive
from paceline.ddp.engine.local import GradientEngine, LocalEngine
from paceline.ddp.engine.replica import Replica
from paceline.ddp.options import config
from paceline.ddp.options.buckets import FIRST_CAPACITY
from paceline.ddp.options.module_checks import check_devices, check_initialized
from paceline.ddp.reducer.forwards import tensors_in
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.wrapper.averaging import register
from paceline.ddp.wrapper.empty_slice import call_without_rows, have_no_rows, on_empty_slice
from paceline.ddp.wrapper.sync_control import SyncControl
from paceline.ddp.wrapper.torch_compat.members import TorchMembers, accept_bare_keys
from paceline.ddp.wrapper.torch_compat.mixed_precision import LowPrecision, low_precision

_DIGESTED_ELEMENTS = 2**16
"""Number of elements of each input to digest, for the warning that all ranks train on the same samples."""


class DistributedDataParallel(  # type: ignore[misc, override]
    SyncControl, TorchMembers, nn.parallel.DistributedDataParallel
):
    """Replicates `module` over the ranks of a process group and averages gradients during backward.

    A drop-in replacement for ``torch.nn.parallel.DistributedDataParallel``. It is a subclass, so frameworks that check
    for that class recognize it, but it does not use that class's machinery. It takes all of torch's arguments, in
    torch's order. Arguments for behavior that is always on have no effect: ``find_unused_parameters``,
    ``gradient_as_bucket_view``, ``static_graph``, ``batched_grad_copy``, ``check_reduction``. docs/drop-in.md explains
    each of them.

    Gradients are the same as in one process on the whole global batch. Use a mean loss if all slices have the same
    size; for slices of any size, compute a summed loss inside :meth:`weight`. A parameter without a gradient on any
    rank keeps ``grad is None``.

    Call the wrapper, not ``model.module``: only backward passes through the wrapper's forward are synchronized. An
    optimizer step with gradients that were not averaged raises an error. Several wrappers may share parameters; a
    shared parameter's gradient is the sum of the wrappers' averages.

    Args:
        module: the module to replicate, already on its device; the same on every rank.
        device_ids: for a module on a GPU, a list with only that GPU; inputs are moved to it. ``None`` for the CPU.
        broadcast_buffers: whether to broadcast rank 0's buffers at the end of synchronized backward passes (default).
        init_sync: ``True`` broadcasts rank 0's parameters and buffers, after checking that names, shapes and dtypes
            are equal on all ranks; ``"verify"`` also raises unless the values are equal; ``False`` does neither.
        process_group: the ranks to average over; all ranks by default.
        bucket_cap_mb: bucket capacity in MiB.
        bucket_cap_mb_list: capacities in MiB of the first, second, … bucket, in launch order.
        forward_sync_buffers: torch's new name for `broadcast_buffers`; takes precedence over it.
        lazy_bucket_allocation: must be ``False``, because ``p.grad`` is a view of the buckets.
        unused_parameters: what to do about a parameter without a gradient on some rank, because it was not used there:
            ``"warn"`` (once for each parameter and rank, on rank 0), ``"error"`` (on every rank) or ``"allow"``, which
            ``find_unused_parameters=True`` and ``static_graph=True`` imply. The average is always correct.
        mixed_precision: torch's ``_MixedPrecision``: the forward computes with copies of parameters and inputs in its
            ``param_dtype``; gradients keep the parameters' dtype and are sent in its ``reduce_dtype``. It cannot be
            combined with activation checkpointing. ``torch.autocast`` works without this argument.
        check_finite: raise :class:`~paceline.errors.NonFiniteGradient` on every rank if any rank's gradient contains
            NaN or Inf. Costs one read of the gradients. Leave it off with a GradScaler.
        reduce_dtype: dtype for sending and summing gradients, by default each parameter's own dtype. Use
            ``torch.float32`` for exact means of bf16 gradients, or bf16 or fp16 to halve the bytes. Gradients keep the
            parameters' dtype, in separate memory. In fp16, the gradient of a rank's summed loss may overflow.
        check_replicas_every: number of steps between comparisons of the ranks' parameter fingerprints; by default
            after steps 1, 3, 7, 15, 31, …; a difference raises :class:`~paceline.errors.ReplicaMismatch` on every rank.
            Costs one read of the parameters, and does not detect wrong averages.
        check_compute_every: with `virtual_ranks`, number of steps between checks that recompute a slice on a second
            rank; if the bits differ, :class:`~paceline.errors.WrongComputation` is raised on every rank, before the
            step is taken.
        virtual_ranks: V, a power of two: the gradient is the mean over V slices of the global batch, summed in the same
            tree for any number of ranks that divides V, so the weights are bit-identical on 1, 2, …, V ranks. Loop
            over ``paceline.accumulate(model, loader)``. See docs/same-bits.md.

    Raises:
        UsageError: if an argument is invalid or unsupported.
        ReplicaMismatch: if the models differ between ranks; names the parameter and the rank.
        WorldError: if there is no process group; call :func:`paceline.init` first.
    """

    module: nn.Module
    """The user's module. Another module may be assigned; the next backward pass detects this."""
    process_group: dist.ProcessGroup
    """The ranks to average over."""
    device: torch.device
    """Device of the parameters when the module was wrapped."""
    parameters_to_ignore: set[str]
    """Names of parameters and buffers that are not synchronized; includes names that the module adds later."""

    _low_precision: LowPrecision | None
    """Casts the module in each forward; None without ``mixed_precision``."""
    _input_device: torch.device | None
    """Device that inputs are moved to; None to leave them where they are."""

    # -- construction -------------------------------------------------------------------------------------------

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: config.InitSync = True,
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
        lazy_bucket_allocation: bool = False,
        *,
        unused_parameters: config.UnusedParameters = "warn",
        check_finite: bool = False,
        reduce_dtype: torch.dtype | None = None,
        check_replicas_every: int | None = None,
        check_compute_every: int | None = None,
        virtual_ranks: int | None = None,
    ) -> None:
        nn.Module.__init__(self)  # skip torch DDP's __init__, which would build its reducer
        Joinable.__init__(self)
        self._low_precision, reduce_dtype = low_precision(mixed_precision, reduce_dtype)  # the policy may set the dtype
        self._options = config.Options.checked(
            init_sync=init_sync,
            capacity=(bucket_cap_mb, bucket_cap_mb_list),
            unused=(unused_parameters, find_unused_parameters or static_graph or skip_all_reduce_unused_params),
            checks=(check_finite, check_replicas_every, check_compute_every),
            sums=(reduce_dtype, virtual_ranks),
            buffer_sync=(broadcast_buffers, forward_sync_buffers),
            lazy_buckets=lazy_bucket_allocation,
        )
        config.check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce, module)
        self._inspect_module(module)
        self._input_device = check_devices(device_ids, output_device, self.device)
        self.process_group = config.choose_group(process_group, device_mesh)
        self.device_mesh, self.device_ids = device_mesh, device_ids
        self.output_device, self.dim, self.mixed_precision = output_device, dim, mixed_precision
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.batched_grad_copy = gradient_as_bucket_view, batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self.bucket_bytes_cap_list = list(self._options.capacities if bucket_cap_mb_list else ())
        self.bucket_bytes_cap = max(self._options.capacities[-1], FIRST_CAPACITY)  # torch.compile refuses less
        self._begin()

    def _inspect_module(self, module: nn.Module) -> None:
        """Find the parameters and buffers to synchronize, and refuse a module that cannot be synchronized."""
        self.module = module
        check_initialized(module)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        if self._low_precision is not None:  # before ranks compare and broadcast buffers
            self._low_precision.cast_buffers(module, self.parameters_to_ignore)
        self._replica = Replica(self._modules, self.parameters_to_ignore)
        self.device, self.forward_sync_buffers = self._replica.device, self._options.syncs_buffers
        self.register_load_state_dict_pre_hook(accept_bare_keys)  # type: ignore[no-untyped-call]

    def _begin(self, *, is_copy: bool = False) -> None:
        """Create the engine: a reducer (collectively, on all ranks), or a local engine for a single rank or a copy."""
        slices_of_rank(self._options.virtual_ranks, 0, dist.get_world_size(self.process_group))
        self._connection, self._comm_hooks = None, []
        # Weak, because the engine and the module's hooks hold these callbacks but must not keep the wrapper alive.
        callbacks = while_alive(self._adopt_parameters), while_alive(self._connect)
        is_alone = dist.get_world_size(self.process_group) == 1 and not self._options.virtual_ranks
        if is_alone or is_copy:
            checked = self._options.check_finite
            self._average_with(LocalEngine(self._replica, checked, *callbacks, has_peers=not is_alone))
        else:
            self._connect(makes_equal=True)
        register(self)

    def _connect(self, *, makes_equal: bool = False) -> Reducer:
        """Connect to the other ranks; `makes_equal` is false for a copy, and for a hook on a single rank."""
        parts = self._replica, self._options, while_alive(self._adopt_parameters)
        self._connection = connect(self, *parts, makes_equal=makes_equal)
        self._average_with(self._connection.reducer)
        return self._connection.reducer

    def _average_with(self, engine: GradientEngine) -> None:
        self._engine = engine
        watched = self._replica.parameters(), self._replica.ledger, engine.local_gradient
        self._guard = StepGuard(*watched, while_alive(engine.read_late), self._replica.all_parameters)

    def _adopt_parameters(self, named: Named, averaged: bool) -> None:
        """Guard optimizer steps over `named`, which includes new parameters; synchronize them if `averaged`."""
        self._guard.guard(parameter for _, parameter in named)
        if averaged:
            if self._low_precision is not None:
                self._low_precision.cast_buffers(self.module, self.parameters_to_ignore)
            self._replica.adopt(named)

    def _revive(self, state: dict[str, Any], group: dist.ProcessGroup) -> None:
        """Initialize a copy or an unpickled wrapper from another wrapper's attributes."""
        nn.Module.__setstate__(self, state)  # skip torch DDP's, which would build its reducer
        self.process_group = group
        self._replica = Replica(self._modules, self.parameters_to_ignore)
        self.device = self._replica.device
        self._begin(is_copy=True)

    # -- forward ------------------------------------------------------------------------------------------------

    @compiled_below
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward; if gradients are enabled, hook its outputs for backward."""
        if taken.empty_slices and not self._replica.ledger.is_on_empty_slice and have_no_rows(inputs, kwargs):
            with on_empty_slice(self._replica):
                return self.forward(*inputs, **kwargs)
        if self._input_device is not None:
            inputs, kwargs = move_inputs(inputs, kwargs, self._input_device)
        if not torch.is_grad_enabled():
            return self._call_module(None, inputs, kwargs)
        if self._replica.ledger.inputs is None and self._connection is not None and self.training:
            self._digest_inputs(inputs, kwargs)
        counts_if_averaged = self._begin_forward()
        with recorder.span(FORWARD):
            output = self._call_module(self, inputs, kwargs)
        self._end_forward(output, counts_if_averaged)
        return output

    @compiled_below
    def _call_module(self, wrapper: Any, inputs: Any, kwargs: Any) -> Any:
        call = call_without_rows if self._replica.ledger.is_on_empty_slice else call_module
        if self._low_precision is None:
            return call(wrapper, self.module, inputs, kwargs)
        inputs, kwargs = self._low_precision.cast_inputs(inputs, kwargs)
        with self._low_precision.cast_parameters(self.module, self.parameters_to_ignore):
            return call(wrapper, self.module, inputs, kwargs)

    @never_compiled
    def _begin_forward(self) -> bool:
        """Prepare a forward pass on all ranks; returns whether it counts only if its backward pass is averaged."""
        # 1. forward begins: buffers are synchronized if due
        strike("forward")
        if not self.training or (connection := self._connection) is None:
            return False
        if (ledger := self._replica.ledger).synchronizations >= ledger.compare_at:
            connection.replica_check.note()
        connection.channel.check_open()
        if not is_in_backward():  # activation checkpointing recomputes forward passes during a backward
            self._engine.resync_aborted()
        if connection.joined_steps.enabled:
            connection.joined_steps.forward_begins()
        # A forward pass that broadcasts buffers counts regardless of its backward, because all ranks ran the broadcast.
        return self._engine.sync_enabled and not connection.buffers.forward_begins()

    @never_compiled
    def _digest_inputs(self, inputs: Any, kwargs: Any) -> None:
        heads = [
            tensor.detach().reshape(-1)[:_DIGESTED_ELEMENTS]
            for tensor in tensors_in((inputs, kwargs))
            if is_plain(tensor) and tensor.numel() > 1 and not is_capturing(tensor.device)
        ]
        # 0 for constant inputs, such as dummy inputs.
        is_constant = all(bool((head == head[0]).all()) for head in heads)
        digests = (int(quick_digest(head)) for head in heads)
        self._replica.ledger.inputs = 0 if is_constant else short(derive_seed("inputs", *digests))

    @never_compiled
    def _end_forward(self, output: Any, counts_if_averaged: bool) -> None:
        # 2. outputs are hooked: these are the first tensors that backward reaches
        self._engine.hook_outputs(tensors_in(output), counts_if_averaged=counts_if_averaged)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def bucket_layout(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket, in launch order; empty on a single rank."""
        self._engine.read_late()
        return self._engine.named_layout()

    def load_bucket_layout(self, layout: list[list[str]]) -> None:
        """Rebuild the buckets according to a `layout` from :meth:`bucket_layout`; call this method on all ranks.

        A layout of other parameters than those that this model trains has no effect. Neither has one from a single
        rank, which is empty.
        """
        if layout:
            self._engine.restore_layout(layout)
