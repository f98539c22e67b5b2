"""Members of torch's class that frameworks read or call: each means the same here, or raises an error.

The table is in docs/drop-in.md, and a test compares it with the installed torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.stacks import warn
from paceline.core.torch_distributed import (
    MixedPrecision,
    cast_inputs,
    get_default_group,
    make_disabled_join,
    replace_parameters,
)
from paceline.core.unwrapping import plain_name
from paceline.ddp.connection import Replica
from paceline.ddp.local import GradientEngine
from paceline.ddp.options import Options, check_reduce_dtype, choose_group
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.ddp.comm_hook import Hook


# ``mixed_precision``: low-precision computation with full-precision weights and gradients, as in torch's DDP.
#
# During forward, every parameter is replaced with a low-precision copy. The copy is made by a differentiable operation,
# so gradients arrive at the parameters in the parameters' dtype. Buckets cast them to ``reduce_dtype`` for
# communication.
# Decision 0009 gives the reasons.


class LowPrecision:
    """Casts a module and its inputs according to a ``_MixedPrecision`` policy; buffers are cast once, as in torch.

    This cannot be combined with activation checkpointing inside the module: when backward recomputes a forward, the
    parameters have full precision again, and torch raises an error. Use ``torch.autocast`` instead.
    """

    reduce_dtype: torch.dtype | None
    """The dtype for summing gradients; None for each parameter's own."""

    def __init__(self, policy: Any, reduce_dtype: torch.dtype | None) -> None:
        if not isinstance(policy, MixedPrecision):
            raise UsageError(
                f"DistributedDataParallel(mixed_precision={policy!r}) takes torch.nn.parallel.distributed."
                "_MixedPrecision; for autocast, put torch.autocast around forward and leave it out"
            )
        if policy.reduce_dtype is not None and reduce_dtype is not None:
            raise UsageError("give reduce_dtype to DistributedDataParallel or to its mixed_precision, not to both")
        self._dtype, self._buffer_dtype = policy.param_dtype, policy.buffer_dtype
        self.reduce_dtype = check_reduce_dtype(policy.reduce_dtype or reduce_dtype or policy.param_dtype)

    def cast_buffers(self, module: nn.Module, ignored: set[str]) -> None:
        for name, buffer in module.named_buffers():
            if self._buffer_dtype is not None and buffer.is_floating_point() and name not in ignored:
                buffer.data = buffer.to(self._buffer_dtype)

    def cast_inputs(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the inputs with their floating-point tensors cast to low precision."""
        return cast_inputs(self._dtype, inputs, kwargs)

    def cast_parameters(self, module: nn.Module, ignored: set[str]) -> AbstractContextManager[Any]:
        """Return a context manager that casts parameters to low precision for a forward pass; tied ones stay tied."""
        if self._dtype is None:
            return nullcontext()
        named = module.named_parameters()
        # The cast is differentiable; its backward casts the gradients to the parameters' dtype.
        cast = {name: p.to(self._dtype) for name, p in named if p.is_floating_point() and name not in ignored}
        return replace_parameters(module, cast)


def low_precision(policy: Any, reduce_dtype: torch.dtype | None) -> tuple[LowPrecision | None, torch.dtype | None]:
    """Return the :class:`LowPrecision` for `policy` (None without a policy), and the dtype for summing gradients."""
    if policy is None:
        return None, reduce_dtype
    casts = LowPrecision(policy, reduce_dtype)
    return casts, casts.reduce_dtype


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"DistributedDataParallel.{name} drives torch's own reducer, which Paceline does not have; "
            "docs/drop-in.md lists what to use instead"
        )

    refuse.__name__ = name
    refuse.__doc__ = "Part of torch's own reducer: raises UsageError."
    return refuse


class InertMember:
    """Replaces ``model.reducer`` or ``model.logger``; the methods named in `calls` do nothing."""

    def __init__(self, name: str, *calls: str) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, attribute: str) -> Callable[..., None]:
        # Check names with two underscores first, because copy and pickle look them up before `_calls` is set.
        if attribute.startswith("__") or attribute not in self._calls:
            raise AttributeError(
                f"Paceline's model.{self._name} has only {', '.join(self._calls) or 'its name'}, not {attribute}; "
                "docs/drop-in.md lists what to use instead"
            )
        return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """Ignore the call, because a backward pass needs no preparation."""


class TorchMembers:
    """A base class of the wrapper with members of torch's class, which it precedes in the resolution order."""

    device: torch.device
    process_group: dist.ProcessGroup
    static_graph: bool
    forward_sync_buffers: bool
    _replica: Replica
    _engine: GradientEngine
    _options: Options
    _comm_hooks: list[tuple[Hook, object]]
    """The communication hook and its state, in a list with at most one entry; named as in torch."""

    require_forward_param_sync = True
    """Whether forward passes in training mode synchronize buffers; frameworks set this attribute."""
    # Paceline never reads these; frameworks and torch's own functions look for them on the class.
    broadcast_bucket_size = 250 * 2**20
    use_side_stream_for_tensor_copies = False
    is_multi_device_module = False
    _use_python_reducer = False
    _has_joined = False
    """Whether the wrapper was ever part of a ``join``."""
    _authoritative_rank = 0
    """The rank whose model was copied to all ranks when the last ``join`` ended."""
    reducer = InertMember("reducer", "prepare_for_backward", "prepare_for_forward", "_rebuild_buckets")
    logger = InertMember("logger")

    lazy_bucket_allocation = False
    _require_manual_backward_finalization = False
    should_finalize_after_backward = False
    """Always False, as in torch unless finalization is manual."""

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
        from paceline.ddp.comm_hook import check_hook, put_hook  # few wrappers need this import
        # few wrappers need this import

        check_hook(hook)
        put_hook(self, state, hook)

    @property
    def comm_hook_state(self) -> object:
        """The state passed to :meth:`register_comm_hook`; None without a hook."""
        return self._comm_hooks[0][1] if self._comm_hooks else None

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register torch's ``ALLREDUCE`` or ``FP16_COMPRESS``."""

        from paceline.ddp.comm_hook import builtin_hook, put_hook

        put_hook(self, self.process_group, builtin_hook(comm_hook_type))

    # -- copies and pickles -------------------------------------------------------------------------------------

    def _revive(self, state: dict[str, Any], group: dist.ProcessGroup) -> None:
        """Initialize from the attributes of another wrapper."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the wrapper on this rank only; a trained copy connects to its peers in its first backward pass."""
        # Without calling __init__, which communicates.
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied._revive(copied_state(self, memo), self.process_group)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the process group and buckets, which are recreated on loading."""
        check_default_group(self.process_group)
        return portable_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Initialize from a pickle, using the default process group."""
        self._revive(state, choose_group(None, None))

    # -- members that frameworks read and call ------------------------------------------------------------------

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's parameters, after making sure that their gradients are complete averages."""
        self._read_late()  # with GPUs, some control blocks may not have been read yet
        return super().named_parameters(*arguments, **options)  # type: ignore[misc,no-any-return]

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the module's state, with torch's prefix ``module.``."""
        self._read_late()
        return super().state_dict(*arguments, **options)  # type: ignore[misc]

    def _read_late(self) -> None:
        if (engine := vars(self).get("_engine")) is not None:  # not set yet while the wrapper is being constructed
            engine.read_late()

    @property
    def device_type(self) -> str:
        """Type of the module's device."""
        return self.device.type

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Buffers that are synchronized, by name."""
        return self._replica.buffers.named()

    @property
    def modules_buffers(self) -> list[Tensor]:
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

    def sync_buffers(self) -> bool:
        """Make buffers equal to rank 0's now; implemented by the wrapper."""
        raise NotImplementedError

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        raise err_type(err_msg)

    _register_fused_optim = _refusing("_register_fused_optim")
    _register_buffer_comm_hook = _refusing("_register_buffer_comm_hook")
    _delayed_all_reduce_hook = _refusing("_delayed_all_reduce_hook")
    _register_delay_all_reduce_hook = _refusing("_register_delay_all_reduce_hook")
    _register_accum_grad_hook = _refusing("_register_accum_grad_hook")
    _setup_in_backward_optimizers = _refusing("_setup_in_backward_optimizers")
    _fire_reducer_autograd_hook = _refusing("_fire_reducer_autograd_hook")
    _root_copy_hook = _refusing("_root_copy_hook")
    _module_wait_for_copy_hook = _refusing("_module_wait_for_copy_hook")
    _ddp_init_helper = _refusing("_ddp_init_helper")
    _build_params_for_reducer = _refusing("_build_params_for_reducer")
    _build_debug_param_to_name_mapping = _refusing("_build_debug_param_to_name_mapping")
    _lazy_init = _refusing("_lazy_init")
    _clear_grad_buffer = _refusing("_clear_grad_buffer")
    _pre_forward = _refusing("_pre_forward")
    _post_forward = _refusing("_post_forward")
    _passing_sync_batchnorm_handle = _refusing("_passing_sync_batchnorm_handle")
    _update_process_group = _refusing("_update_process_group")
    _assign_modules_buffers = _refusing("_assign_modules_buffers")
    _check_manual_backward_finalization_supported = _refusing("_check_manual_backward_finalization_supported")
    finalize_backward = _refusing("finalize_backward")


def accept_bare_keys(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Add ``module.`` to state dict keys that lack it, such as keys from a checkpoint or ``unwrap(model)``."""
    for name in model.state_dict():
        bare, wanted = prefix + plain_name(name.removeprefix("module.")), prefix + name
        if bare in state_dict and wanted not in state_dict:
            state_dict[wanted] = state_dict.pop(bare)


_MADE_AGAIN = (
    "process_group",
    "_replica",
    "_connection",
    "_engine",
    "_guard",
    "_comm_hooks",
)


def portable_state(wrapper: Any) -> dict[str, Any]:
    """Return the attributes of `wrapper` except those of its process group or ``join``, which are recreated."""
    state = {name: value for name, value in wrapper.__dict__.items() if name not in _MADE_AGAIN}
    return state | {"_join_config": make_disabled_join()}


def copied_state(wrapper: Any, memo: dict[int, Any]) -> dict[str, Any]:
    """Return deep copies of the attributes that :func:`portable_state` returns."""
    return {name: copy.deepcopy(value, memo) for name, value in portable_state(wrapper).items()}


def check_default_group(group: dist.ProcessGroup) -> None:
    """Refuse to pickle a wrapper over a `group` other than the default one, like torch."""
    if group is not get_default_group():
        raise UsageError(
            "only a DistributedDataParallel over the default process group can be pickled, because other groups "
            "cannot be identified on loading; pickle paceline.unwrap(model) and wrap it again"
        )
