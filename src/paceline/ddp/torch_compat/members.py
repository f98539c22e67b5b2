"""Members of torch's class that frameworks read or call: each means the same here, or says that it cannot.

The table is in docs/drop-in.md, and a test compares it with the installed torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.consistency.buffers import Buffers
from paceline.ddp.engine.reducer import Reducer
from paceline.errors import UsageError


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"DistributedDataParallel.{name} drives torch's own reducer, which Paceline does not have; docs/drop-in.md "
            "lists what to use instead"
        )

    refuse.__name__ = name
    refuse.__doc__ = "Part of torch's own reducer: raises UsageError."
    return refuse


class Face:
    """What is left of ``model.reducer`` and ``model.logger``: what frameworks call around a step, and does nothing."""

    def __init__(self, name: str, *calls: str) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, attribute: str) -> Callable[..., None]:
        if attribute.startswith("__") or attribute not in self._calls:
            raise AttributeError(
                f"model.{self._name} of Paceline has only {', '.join(self._calls) or 'its name'}, not {attribute}; "
                "docs/drop-in.md lists what to use instead"
            )
        return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """There is nothing to prepare: every backward finds out by itself."""


class TorchMembers:
    """Comes before torch's class among the wrapper's bases."""

    module: nn.Module
    device: torch.device
    process_group: dist.ProcessGroup
    static_graph: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    forward_sync_buffers: bool
    device_ids: Any
    output_device: Any
    parameters_to_ignore: set[str]
    _buffers_to_sync: Buffers
    _reducer: Any
    _has_joined: bool
    _ledger: Ledger

    require_forward_param_sync = True
    """Whether a training forward synchronizes buffers; frameworks set it."""
    broadcast_bucket_size = 250 * 2**20
    use_side_stream_for_tensor_copies = False
    is_multi_device_module = False
    _use_python_reducer = False
    reducer = Face("reducer", "prepare_for_backward", "prepare_for_forward", "_rebuild_buckets")
    logger = Face("logger")

    _require_manual_backward_finalization = False
    should_finalize_after_backward = False
    """As in torch where manual finalization is off, which it is always."""

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Always ``False``: every backward ends with the averages in place. Setting it to ``True`` is refused."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise UsageError(
                f"require_manual_backward_finalization={required!r} is not supported: every backward of Paceline ends "
                "with the averages in p.grad; leave it out, and finalize_backward() with it"
            )

    @property
    def device_type(self) -> str:
        """The kind of device that the module lives on."""
        return self.device.type

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are synchronized, by name."""
        return self._buffers_to_sync.named()

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronized."""
        return list(self._buffers_to_sync.named().values())

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        named = self.module.named_parameters()
        return [parameter for name, parameter in named if name not in self.parameters_to_ignore]

    def will_sync_module_buffers(self) -> bool:
        """Whether a training forward synchronizes buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and len(self._buffers_to_sync) > 0

    def _has_buffer_hook(self) -> bool:
        return hasattr(self, "buffer_hook")

    def _syncs_buffers_at_rest(self) -> bool:
        return self.will_sync_module_buffers() and not self._has_buffer_hook()

    def _check_sync_bufs_pre_fwd(self) -> bool:
        hook = getattr(self, "buffer_hook", None)
        before = hook is None or hook.buffer_comm_hook_location == _BufferCommHookLocation.PRE_FORWARD
        return before and self.will_sync_module_buffers()

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers() and not self._check_sync_bufs_pre_fwd()

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("static_graph is set already, which changes nothing here in any case", stacklevel=2)
        self.static_graph = True

    def _check_reducer_finalized(self) -> None:
        if isinstance(self._reducer, Reducer):
            self._reducer.expect_idle()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What is known of torch's entries, under torch's names."""
        parameters = self._module_parameters
        buckets = self._reducer.storage.buckets if isinstance(self._reducer, Reducer) else []
        return {
            "module_name": type(self.module).__name__,
            "backend_name": dist.get_backend(self.process_group),
            "dtypes": ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in parameters})),
            "device_ids": "" if self.device_ids is None else ", ".join(map(str, self.device_ids)),
            "bucket_sizes": ", ".join(str(one.flat.numel() * one.flat.element_size()) for one in buckets),
            "world_size": dist.get_world_size(self.process_group),
            "rank": dist.get_rank(self.process_group),
            "iteration": self._ledger.synchronizations,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(one.numel() * one.element_size() for one in parameters),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "can_set_static_graph": 1,
            "join_uneven_inputs": self._has_joined,
            "has_error": 0,
        }

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise UsageError(f"the sample rate of runtime logging must be at least 1, not {sample_rate}")

    def _remove_autograd_hooks(self) -> None:
        """Let go of the module, so that another wrapper can take it."""
        if isinstance(self._reducer, Reducer):
            self._reducer.close()

    def _set_sparse_metadata(self, global_unique_ids: object) -> None:
        """Nothing: which rows are touched is found out in each step."""

    def _sync_buffers(self) -> None:
        self.sync_buffers()

    def sync_buffers(self) -> bool:
        """The wrapper's own."""
        raise NotImplementedError

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        raise err_type(err_msg)

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
