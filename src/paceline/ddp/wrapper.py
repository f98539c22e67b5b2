"""``DistributedDataParallel``: trains a module as one of several replicas.

``forward`` synchronizes buffers if due and hooks its outputs; backward launches complete buckets while it runs; when it
ends, ``p.grad`` is the average over the ranks; then the optimizer steps. README.md in ``ddp/`` describes the ten stages
of such a step; the numbers in the code refer to them. Decision 0003 explains why this is a subclass of torch's class.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from paceline.core import failpoints
from paceline.core.data_position import short, taken
from paceline.core.device_streams import is_capturing
from paceline.core.digests import quick_digest
from paceline.core.rng import derive_seed
from paceline.core.spans import FORWARD, recorder
from paceline.core.stacks import warn
from paceline.core.torch_distributed import get_default_group, make_disabled_join, move_inputs
from paceline.core.torch_internals import (
    call_module,
    compiled_below,
    has_nonzero,
    is_in_backward,
    is_plain,
    is_profiling,
    never_compiled,
)
from paceline.core.unwrapping import joins, plain_name
from paceline.core.virtual_ranks import slices_of_rank
from paceline.ddp.abort import unfinished
from paceline.ddp.backward import tensors_in
from paceline.ddp.buckets import FIRST_CAPACITY
from paceline.ddp.connection import Connection, Replica, connect, while_alive
from paceline.ddp.local import GradientEngine, LocalEngine
from paceline.ddp.module_changes import ModuleWatch, Named
from paceline.ddp.options import (
    InitSync,
    Options,
    UnusedParameters,
    check_delayed,
    check_devices,
    check_initialized,
    choose_group,
)
from paceline.ddp.reducer import Reducer
from paceline.ddp.step_guard import StepGuard
from paceline.ddp.torch_members import add_unused_members
from paceline.ddp.weights import total_weight
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.ddp.comm_hook import Hook
    from paceline.ddp.mixed_precision import LowPrecision

_RECREATED = ("process_group", "_replica", "_connection", "_engine", "_guard", "_comm_hooks")
"""Attributes that are not copied or pickled, because a copy creates them itself."""

_DIGESTED_ELEMENTS = 2**16
"""Number of elements of each input to digest, for the warning that all ranks train on the same samples."""


@add_unused_members
class DistributedDataParallel(nn.parallel.DistributedDataParallel):
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
        bucket_cap_mb: bucket capacity in MiB; 25 by default, and 1 for the first bucket unless all fit in one.
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
    forward_sync_buffers: bool
    """Whether the wrapper's arguments say that forward passes in training mode synchronize buffers."""
    require_forward_param_sync = True
    """Whether forward passes in training mode synchronize buffers; frameworks set this attribute."""

    _options: Options
    """Checked settings; only ``check_finite`` may change."""
    _replica: Replica
    """The parameters and buffers that are synchronized."""
    _connection: Connection | None
    """The parts that communicate with other ranks; None on a single rank, and in a copy until it is trained."""
    _engine: GradientEngine
    """Averages gradients; the connection's reducer if there is a connection."""
    _guard: StepGuard
    """Refuses optimizer steps with gradients that were not averaged."""
    _comm_hooks: list[tuple[Hook, object]]
    """The communication hook and its state, in a list with at most one entry; named as in torch."""
    _low_precision: LowPrecision | None
    """Casts the module in each forward; None without ``mixed_precision``."""
    _input_device: torch.device | None
    """Device that inputs are moved to; None to leave them on their own device."""
    _has_joined = False
    """Whether the wrapper was ever part of a ``join``."""
    _authoritative_rank = 0
    """The rank whose model was copied to all ranks when the last ``join`` ended."""

    # -- construction -------------------------------------------------------------------------------------------

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
        lazy_bucket_allocation: bool = False,
        *,
        unused_parameters: UnusedParameters = "warn",
        check_finite: bool = False,
        reduce_dtype: torch.dtype | None = None,
        check_replicas_every: int | None = None,
        virtual_ranks: int | None = None,
    ) -> None:
        nn.Module.__init__(self)  # skip torch DDP's __init__, which would build its reducer
        Joinable.__init__(self)
        self._low_precision = None
        if mixed_precision is not None:
            from paceline.ddp.mixed_precision import LowPrecision  # few wrappers need this import

            self._low_precision = LowPrecision(mixed_precision, reduce_dtype)
            reduce_dtype = self._low_precision.reduce_dtype
        self._options = Options.checked(
            init_sync=init_sync,
            capacity=(bucket_cap_mb, bucket_cap_mb_list),
            unused=(unused_parameters, find_unused_parameters or static_graph or skip_all_reduce_unused_params),
            checks=(check_finite, check_replicas_every),
            sums=(reduce_dtype, virtual_ranks),
            buffer_sync=(broadcast_buffers, forward_sync_buffers),
            lazy_buckets=lazy_bucket_allocation,
        )
        check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce, module)
        self._inspect_module(module)
        self._input_device = check_devices(device_ids, output_device, self.device)
        self.process_group = choose_group(process_group, device_mesh)
        self.device_mesh, self.device_ids, self.output_device, self.dim = device_mesh, device_ids, output_device, dim
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.mixed_precision, self.gradient_as_bucket_view = mixed_precision, gradient_as_bucket_view
        self.batched_grad_copy, self.skip_all_reduce_unused_params = batched_grad_copy, skip_all_reduce_unused_params
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
        self.register_load_state_dict_pre_hook(_accept_bare_keys)  # type: ignore[no-untyped-call]

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
        _wrappers[self] = Averaging(self.process_group, self._replica.watch, weakref.ref(self))

    def _connect(self, *, makes_equal: bool = False) -> Reducer:
        """Connect to the other ranks; `makes_equal` is false for a copy, and for a hook on a single rank."""
        parts = self._replica, self._options, while_alive(self._adopt_parameters)
        self._connection = connect(self, *parts, makes_equal=makes_equal)
        self._average_with(self._connection.reducer)
        return self._connection.reducer

    def _connected(self) -> Connection:
        if self._connection is None:
            self._engine.connected()
        assert self._connection is not None
        return self._connection

    def _average_with(self, engine: GradientEngine) -> None:
        self._engine = engine
        watched = self._replica.parameters(), self._replica.ledger, engine.local_gradient
        self._guard = StepGuard(*watched, engine.read_late, self._replica.all_parameters)

    def _adopt_parameters(self, named: Named, averaged: bool) -> None:
        """Guard optimizer steps over `named`, which includes new parameters; synchronize them if `averaged`."""
        self._guard.guard(parameter for _, parameter in named)
        if averaged:
            if self._low_precision is not None:
                self._low_precision.cast_buffers(self.module, self.parameters_to_ignore)
            self._replica.adopt(named)

    # -- forward ------------------------------------------------------------------------------------------------

    @compiled_below
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward; if gradients are enabled, hook its outputs for backward."""
        if taken.empty_slices and not self._replica.ledger.is_on_empty_slice:
            from paceline.ddp.empty_batch import have_no_rows, on_empty_slice  # few batches need this import

            if have_no_rows(inputs, kwargs):
                with on_empty_slice(self._replica):
                    return self.forward(*inputs, **kwargs)
        if self._input_device is not None:
            inputs, kwargs = move_inputs(inputs, kwargs, self._input_device)
        if not torch.is_grad_enabled():
            return self._call_module(None, inputs, kwargs)
        if self._replica.ledger.inputs is None and self._connection is not None and self.training:
            self._digest_inputs(inputs, kwargs)
        if failpoints.orders:
            failpoints.strike("forward")
        connection, counts_if_averaged = self._connection, False
        if self.training and connection is not None:
            # 1. forward begins: buffers are synchronized if due
            channel, ledger = connection.channel, self._replica.ledger
            is_due = unfinished or connection.joined_steps.enabled or ledger.synchronizations >= ledger.compare_at
            if is_due or channel.key not in channel.living:
                self._prepare_forward(connection)
            # A forward pass that broadcasts buffers counts regardless of its backward, because all ranks ran the
            # broadcast.
            counts_if_averaged = self._engine.sync_enabled and not connection.buffers.forward_begins()
        if recorder.on or recorder.box is not None or is_profiling():
            with recorder.span(FORWARD):
                output = self._call_module(self, inputs, kwargs)
        elif self._low_precision is None and not self._replica.ledger.is_on_empty_slice:
            output = call_module(self, self._modules["module"], inputs, kwargs)  # the attribute takes longer
        else:
            output = self._call_module(self, inputs, kwargs)
        # 2. outputs are hooked: these are the first tensors that backward reaches
        outputs = (output,) if isinstance(output, Tensor) else tensors_in(output)
        self._engine.hook_outputs(outputs, counts_if_averaged=counts_if_averaged)
        return output

    @compiled_below
    def _call_module(self, wrapper: Any, inputs: Any, kwargs: Any) -> Any:
        call = call_module
        if self._replica.ledger.is_on_empty_slice:
            from paceline.ddp.empty_batch import call_without_rows

            call = call_without_rows
        if self._low_precision is None:
            return call(wrapper, self.module, inputs, kwargs)
        inputs, kwargs = self._low_precision.cast_inputs(inputs, kwargs)
        with self._low_precision.cast_parameters(self.module, self.parameters_to_ignore):
            return call(wrapper, self.module, inputs, kwargs)

    @never_compiled
    def _prepare_forward(self, connection: Connection) -> None:
        """Prepare a forward pass in training mode if there is more to do than usual."""
        if (ledger := self._replica.ledger).synchronizations >= ledger.compare_at:
            connection.replica_check.note()
        connection.channel.check_open()
        if not is_in_backward():  # activation checkpointing recomputes forward passes during a backward
            self._engine.resync_aborted()
        if connection.joined_steps.enabled:
            connection.joined_steps.forward_begins()

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

    # -- synchronization of gradients ---------------------------------------------------------------------------

    @property
    def do_sync(self) -> bool:
        """Whether a backward pass that starts now will be synchronized."""
        return self._engine.sync_enabled

    @property
    def require_backward_grad_sync(self) -> bool:
        """torch's name for :attr:`do_sync`, which frameworks read and set."""
        return self.do_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        if enabled:
            self._refuse_in_local_steps("enabling gradient synchronization, as accumulate() does,")
        self._engine.sync_enabled = enabled

    def enable_grad_sync(self) -> None:
        """Synchronize gradients in backward passes that start from now on."""
        self.require_backward_grad_sync = True

    def disable_grad_sync(self) -> None:
        """Accumulate gradients locally in backward passes that start from now on."""
        self._engine.sync_enabled = False

    @property
    def check_finite(self) -> bool:
        """Whether a gradient with NaN or Inf raises an error on every rank. May be set, on all ranks."""
        return self._options.check_finite

    @check_finite.setter
    def check_finite(self, enabled: bool) -> None:
        self._options = replace(self._options, check_finite=enabled)
        self._engine.check_finite(enabled)

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop training; may be called on any rank. See :attr:`stop_agreed`."""
        self._replica.ledger.status.asks_to_stop = True

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank had called :meth:`ask_to_stop` before the latest synchronized backward pass.

        The value is the same on every rank after ``optimizer.step()``, so all ranks can leave their loops after the
        same step. The request travels with the reports of that backward pass; no other step is affected.
        """
        self._engine.read_late()
        return self._replica.ledger.stop_agreed

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in backward passes inside the block; the next one outside reduces the sum.

        Only the start of the backward pass matters, so the block may contain forward and backward, or backward alone.
        """
        # Otherwise local gradients would be added to averages that are not complete yet.
        self._engine.read_late()
        previous = self.do_sync
        self.disable_grad_sync()
        try:
            yield
        finally:
            self._engine.sync_enabled = previous

    @contextmanager
    def local_steps(self) -> Iterator[None]:
        """Let optimizers step on this rank's own gradients inside the block, as local SGD does.

        Backward passes inside the block stay local, as under :meth:`no_sync`, so the replicas drift apart until the
        program averages their parameters, for example with one of torch's model averagers::

            averager = PeriodicModelAverager(period=4)
            with model.local_steps():
                for x, y in loader:
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    averager.average_parameters(model.parameters())  # before zero_grad(): it skips missing gradients
                    optimizer.zero_grad()

        After the block, every step needs averaged gradients again. The next synchronized backward pass compares the
        replicas, unless they are never compared (``init_sync=False`` or a communication hook, both without
        ``check_replicas_every``). Average the parameters before it, and take the same number of steps on every rank.
        Optimizer state is not averaged: momentum that differs lets the replicas drift apart again after the block.
        Register the model and the optimizer with a Checkpointer with ``per_rank=True``.

        Raises:
            UsageError: with ``virtual_ranks``. Inside the block, if gradients would be synchronized
                (:func:`~paceline.accumulate`, :meth:`sync_gradients`), or if an optimizer steps on gradients of
                micro-batches inside :meth:`weight`. After it, if an optimizer steps on gradients from the block.
            ReplicaMismatch: in the next synchronized backward pass, if the replicas still differ.
        """
        if count := self._options.virtual_ranks:
            raise UsageError(
                f"model.local_steps() cannot be combined with virtual_ranks={count}, which promises the same weights "
                "on any number of ranks; leave one of the two out"
            )
        ledger = self._replica.ledger
        with self.no_sync():
            is_nested, ledger.in_local_steps = ledger.in_local_steps, True
            try:
                yield
            finally:
                ledger.in_local_steps = is_nested
                if self._connection is not None and not is_nested:
                    self._connection.replica_check.request()

    def _refuse_in_local_steps(self, call: str) -> None:
        if self._replica.ledger.in_local_steps:
            raise UsageError(
                f"{call} inside model.local_steps() would average gradients of replicas that may differ; do it outside "
                "the block, and count micro-batches yourself inside it"
            )

    def sync_gradients(self) -> None:
        """Average the gradients in ``p.grad`` now, without a backward pass.

        Use it on a rank without data while the others run a backward pass, or after micro-batches that all ran under
        :meth:`no_sync`. A missing gradient counts as zero. If the other ranks use :meth:`weight`, a rank without data
        calls ``optimizer.zero_grad()`` first. A rank that has not run a forward pass since the last synchronization
        also takes part in the broadcast of buffers that the other ranks run with theirs. If one backward pass runs
        through several wrappers on other ranks, call this method for each wrapper, in order of construction.

        Raises:
            DesyncError: if numbers that must be equal differ between ranks, such as counts of optimizer steps and of
                steps with a forward pass.
            CommunicationError: if a rank has exited or did not take part.
            UsageError: inside :meth:`local_steps`.
        """
        self._refuse_in_local_steps("sync_gradients()")
        if (connection := self._connection) is not None:
            self._engine.resync_aborted()
            # The other ranks broadcast buffers in forward or at the end of backward.
            if self.training and self._replica.ledger.forwards_since_sync == 0:
                if connection.joined_steps.enabled:
                    connection.joined_steps.forward_begins()
                connection.buffers.forward_begins()
        self._engine.synchronize()

    def sync_buffers(self) -> bool:
        """Make buffers equal to rank 0's now; returns whether there are any to synchronize.

        After a synchronized backward pass they are already equal. Call this method on all ranks if other code has
        changed them, such as forward passes under ``no_grad`` in training mode that recompute running statistics.
        """
        return self._connection is not None and self._connection.buffers.synchronize()

    def gradients_are_averaged(self) -> None:
        """Allow an optimizer step with gradients that the program averaged, or that are the same on all ranks anyway.

        Examples are gradients computed with ``autograd.grad`` and ``all_reduce``, or from random numbers that are the
        same on all ranks. Call this method on all ranks, after setting ``p.grad`` and before the step. It compares a
        64-bit digest of each gradient, which costs one read of the gradients and a small collective. It also discards
        the weights from :meth:`weight` and the local backward passes under :meth:`no_sync` since the last
        synchronization.

        Raises:
            UsageError: if a gradient is not the same on every rank; names the gradient.
            CommunicationError: if a rank has exited or did not take part.
        """
        self._engine.check_equal()
        # This counts as a synchronization for the step guard, and discards weights and local backward passes.
        self._replica.ledger.synchronized()
        self._replica.ledger.task = -1  # and gradients that this backward pass produced outside the module

    def weight(self, weight: float | torch.Tensor) -> AbstractContextManager[None]:
        """Weight a micro-batch whose loss is a *sum* over `weight` samples or tokens.

        The gradient becomes Σ gradient / Σ weight over all ranks and micro-batches since the last synchronization. This
        is the gradient of the mean loss over the whole global batch, even if the batch is split unevenly::

            with model.weight(len(y)):
                F.cross_entropy(model(x), y, reduction="sum").backward()

        A mean times its number of items is a sum: ``(F.cross_entropy(model(x), y) * len(y)).backward()``. A bare mean
        would give gradients that are too small. The wrapper checks its first backward passes for this, and warns with
        the line of code if one starts from a mean.

        The average is accumulated into ``p.grad``, as in an ordinary backward pass. A block without a backward pass
        does not count, nor does a micro-batch under :meth:`no_sync` if all of the wrapper's gradients have been set to
        None or zero since.

        Args:
            weight: a count, or any number >= 0, or a tensor of one element. The host does not wait for a tensor on a
                GPU, so an invalid value raises an error only at the end of backward.

        Raises:
            UsageError: if `weight` is negative or not finite. Also in backward, if a backward pass outside the wrapper
                ran between the forward and its backward.
        """
        # Resync before counting this weight, because the resync consumes all counted weights.
        self._engine.resync_aborted()
        return self._replica.ledger.weigh(weight)

    # -- virtual ranks ------------------------------------------------------------------------------------------

    @property
    def virtual_ranks(self) -> int | None:
        """Number of slices over which a step's gradient is summed in a fixed tree; None for an ordinary step."""
        return self._options.virtual_ranks or None

    @property
    def slice_number(self) -> int:
        """The number of the current slice among this rank's slices, starting at 0; always 0 without virtual ranks."""
        slices = None if self._connection is None else self._connection.virtual_ranks
        return 0 if slices is None else slices.number

    # -- uneven inputs ------------------------------------------------------------------------------------------

    @property
    def _join_config(self) -> Any:
        """Settings of ``join``; set by torch when the block begins, and by :class:`.Leaving` when it ends."""
        return self.__dict__["_join_config"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self.__dict__["_join_config"] = config
        if (connection := self.__dict__.get("_connection")) is not None:
            connection.joined_steps.enable(config.enable)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Sequence[Optimizer] = (),
    ) -> Join:
        """Let ranks run out of data at different times, or have no data at all.

        A rank that leaves its loop takes part in the other ranks' steps, including SyncBatchNorm's collectives, without
        contributing. Once all ranks have left, each gets the model of the rank that left last (the highest one if
        several did).

        Args:
            divide_by_initial_world_size: whether means without :meth:`weight` divide by the number of all ranks
                (default), or only of ranks with data. Weighted means always cover all samples.
            enable: ``False`` turns ``join`` off.
            throw_on_early_termination: raise ``RuntimeError`` on every rank as soon as one runs out.
            optimizers: optimizers whose state is updated at the end on ranks that ran out early. Without this argument,
                momentum and other state remain as of that rank's last step, and a warning says so.

        Raises:
            UsageError: with ``virtual_ranks``; once a rank has run out, if the model contains torch's SyncBatchNorm.
        """
        from paceline.ddp.join import JoinOfOne  # few loops need this import

        options = {"divide_by_initial_world_size": divide_by_initial_world_size, "optimizers": optimizers}
        return JoinOfOne(self, enable, throw_on_early_termination, options)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for ``torch.distributed.algorithms.join.Join``; takes the arguments of :meth:`join`."""
        from paceline.ddp.join import Leaving, Shadow

        if count := self._options.virtual_ranks:
            raise UsageError(
                f"join cannot be combined with virtual_ranks={count}, whose tree of sums does not account for ranks "
                "that run out of data; leave one of the two out"
            )
        self._has_joined = True
        self._engine.resync_aborted()
        if dist.get_world_size(self.process_group) > 1:
            self._engine.connected()  # now, because not all ranks may run a copy's first backward
        if self._connection is None:
            return Leaving(self)
        self._connection.reducer.follow_module_on_all_ranks()  # inside join, ranks without data could not follow
        # torch passes the same keyword arguments to everything in one Join, so some may be meant for other objects.
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        optimizers = tuple(kwargs.get("optimizers", ()))
        return Shadow(
            self,
            self._connection,
            self._replica,
            self._guard,
            optimizers,
            divides_by_all=divides_by_all,
            takes_buffers_along=self.forward_sync_buffers,
        )

    @property
    def join_device(self) -> torch.device:
        """Device of the tensors in ``Join``'s own collectives."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Process group of ``Join``'s own collectives."""
        return self.process_group

    # -- communication hooks ------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Register ``hook(state, bucket)`` to replace the all-reduce of every bucket, with torch's contract.

        The bucket holds this rank's gradients. The hook returns a future of their new values, which should be the mean
        over the ranks; with :meth:`weight` the result is then multiplied by N/Σw. In each synchronized backward pass
        the hook is called for all buckets, in the same order on every rank: with zeros on a rank without gradients, and
        also on a single rank. Late gradients (reentrant checkpointing) are averaged without the hook.

        Call this method once, on all ranks, between steps.

        Raises:
            HookError: if `hook` is not callable or does not have a hook's signature. In backward: if it raises, or
                returns anything but a future of one tensor like ``bucket.buffer()``.
            UsageError: if a hook is already registered.
        """
        from paceline.ddp.comm_hook import check_hook  # few wrappers need this import

        check_hook(hook)
        self._use_hook(state, hook)

    @property
    def comm_hook_state(self) -> object:
        """The state passed to :meth:`register_comm_hook`; None without a hook."""
        return self._comm_hooks[0][1] if self._comm_hooks else None

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register torch's ``ALLREDUCE`` or ``FP16_COMPRESS``."""
        from paceline.ddp.comm_hook import builtin_hook

        self._use_hook(self.process_group, builtin_hook(comm_hook_type))

    def _use_hook(self, state: object, hook: Hook) -> None:
        from paceline.ddp.comm_hook import name_of, use_hook

        if self._comm_hooks:
            raise UsageError(
                "register_comm_hook or register_builtin_comm_hook can only be called once, and "
                f"{name_of(self._comm_hooks[0][0])!r} is registered already; let one hook call the other"
            )
        reducer = self._engine.connected()  # on a single rank, only a hook needs buckets
        use_hook(state, hook, reducer, self._replica, self._options, self.process_group)
        self._comm_hooks.append((hook, state))

    @property
    def has_local_parameters(self) -> bool:
        """Whether the program is inside :meth:`local_steps`, so that ranks may have different parameters."""
        ledger = self._replica.ledger
        return ledger.in_local_steps and ledger.has_peers

    # -- state and costs ----------------------------------------------------------------------------------------

    def holds_local_gradients(self) -> bool:
        """Return whether gradients of micro-batches under :meth:`no_sync` have yet to be synchronized.

        In :meth:`local_steps`, return whether they have yet to be used by an optimizer.
        """
        if not self._replica.ledger.is_accumulating:
            return False
        gradients = [parameter.grad for parameter in self._replica.all_parameters()]
        # They may have been dropped or zeroed in the meantime.
        return any(gradient is not None and has_nonzero(gradient) for gradient in gradients)

    @property
    def total_weight(self) -> float:
        """Sum of all ranks' weights (:meth:`weight`) in the latest synchronized backward pass; 0 without weights."""
        return total_weight(self._replica.ledger.notes)

    @property
    def gradient_bytes_per_step(self) -> int:
        """Bytes of gradients that this rank communicates in one synchronized backward pass."""
        return sum(self._engine.bucket_bytes())

    @property
    def exposed_seconds(self) -> float:
        """Total seconds that backward passes have waited for communication at their end, since the wrapper was created.

        On a GPU, this is GPU time, estimated from a sample of the steps, and does not yet include the latest ones.
        """
        time = self._engine.exposed_time
        return 0.0 if time is None else time.seconds

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

    # -- copies -------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the wrapper on this rank only; a trained copy connects to its peers in its first backward pass."""
        # Without calling __init__, which communicates.
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        state = {name: copy.deepcopy(value, memo) for name, value in self._portable_state().items()}
        copied._revive(state, self.process_group)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the process group and buckets, which are recreated on loading."""
        if self.process_group is not get_default_group():
            raise UsageError(
                "only a DistributedDataParallel over the default process group can be pickled, because other groups "
                "cannot be identified on loading; pickle paceline.unwrap(model) and wrap it again"
            )
        return self._portable_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Initialize from a pickle, using the default process group."""
        self._revive(state, choose_group(None, None))

    def _portable_state(self) -> dict[str, Any]:
        """Return the attributes, except those of the process group or ``join``, which are recreated."""
        state = {name: value for name, value in vars(self).items() if name not in _RECREATED}
        return state | {"_join_config": make_disabled_join()}

    def _revive(self, state: dict[str, Any], group: dist.ProcessGroup) -> None:
        """Initialize a copy or an unpickled wrapper from another wrapper's attributes."""
        nn.Module.__setstate__(self, state)  # skip torch DDP's, which would build its reducer
        self.process_group = group
        self._replica = Replica(self._modules, self.parameters_to_ignore)
        self.device = self._replica.device
        self._begin(is_copy=True)

    # -- members that frameworks read and call ------------------------------------------------------------------

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's parameters, after making sure that their gradients are complete averages."""
        self._read_late()  # with GPUs, some control blocks may not have been read yet
        return super().named_parameters(*arguments, **options)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the module's state, with torch's prefix ``module.``."""
        self._read_late()
        return super().state_dict(*arguments, **options)

    def _read_late(self) -> None:
        if (engine := vars(self).get("_engine")) is not None:  # not set yet while the wrapper is being constructed
            engine.read_late()

    @property
    def device_type(self) -> str:
        """Type of the module's device."""
        return self.device.type

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Buffers that are synchronized, by name."""
        return self._replica.buffers.named()

    @property
    def modules_buffers(self) -> list[Tensor]:  # type: ignore[override]
        """Buffers that are synchronized."""
        return list(self._replica.buffers.named().values())

    def will_sync_module_buffers(self) -> bool:
        """Return whether forward passes in training mode synchronize buffers."""
        return self._replica.buffers.are_broadcast_by(self)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self.will_sync_module_buffers()

    def _check_sync_bufs_post_fwd(self) -> bool:
        return False

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warn("static_graph is already set; it has no effect in Paceline anyway")
        self.static_graph = True

    def _check_reducer_finalized(self) -> None:
        self._engine.check_idle()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return the entries of torch's logging data that change with the job, under torch's names."""
        return {
            "backend_name": dist.get_backend(self.process_group),
            "bucket_sizes": ", ".join(map(str, self._engine.bucket_bytes())),
            "world_size": dist.get_world_size(self.process_group),
            "rank": dist.get_rank(self.process_group),
            "iteration": self._replica.ledger.synchronizations,
            "join_uneven_inputs": self._has_joined,
            "has_error": 0,
        }

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise UsageError(f"the sample rate of runtime logging must be at least 1, not {sample_rate}")

    def _remove_autograd_hooks(self) -> None:
        """Release the module, so that another wrapper can wrap it."""
        self._engine.read_late()
        self._engine.close()

    def _set_sparse_metadata(self, global_unique_ids: object) -> None:
        """Ignore the call, because each step finds the rows it needs on its own."""

    def _sync_buffers(self) -> None:
        self.sync_buffers()

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        raise err_type(err_msg)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Always ``False``: gradients are averaged when backward ends. Setting it to ``True`` raises an error."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise UsageError(
                f"require_manual_backward_finalization={required!r} is not supported: every backward in Paceline ends "
                "with the averages in p.grad; leave it out, and also finalize_backward()"
            )


def _accept_bare_keys(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Add ``module.`` to state dict keys that lack it, such as keys from a checkpoint or ``unwrap(model)``."""
    for name in model.state_dict():
        bare, wanted = prefix + plain_name(name.removeprefix("module.")), prefix + name
        if bare in state_dict and wanted not in state_dict:
            state_dict[wanted] = state_dict.pop(bare)


@dataclass(frozen=True)
class Averaging:
    """Information about one wrapper, for a sharded optimizer; does not keep the wrapper alive."""

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
        return wrapper is not None and joins(wrapper)


_wrappers: WeakKeyDictionary[DistributedDataParallel, Averaging] = WeakKeyDictionary()
"""The living wrappers of this process."""


def find_wrappers(parameters: Collection[int]) -> list[Averaging]:
    """Return this process's wrappers whose module contains any of the `parameters`, which are given by ``id``."""
    return [entry for entry in list(_wrappers.values()) if not entry.names.keys().isdisjoint(parameters)]
