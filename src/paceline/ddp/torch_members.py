"""Members of torch's class that Paceline does not use: inert ones, which do nothing, and refused ones, which raise.

Frameworks and torch's own functions look for them on the class. The table is in docs/drop-in.md, and a test compares it
with the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from paceline.errors import UsageError


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


INERT = {
    "broadcast_bucket_size": 250 * 2**20,
    "use_side_stream_for_tensor_copies": False,
    "is_multi_device_module": False,
    "lazy_bucket_allocation": False,
    "should_finalize_after_backward": False,
    "_require_manual_backward_finalization": False,
    "_use_python_reducer": False,
    "reducer": InertMember("reducer", "prepare_for_backward", "prepare_for_forward", "_rebuild_buckets"),
    "logger": InertMember("logger"),
}
"""Attributes that Paceline never reads."""
REFUSED = (
    "_register_fused_optim",
    "_register_buffer_comm_hook",
    "_delayed_all_reduce_hook",
    "_register_delay_all_reduce_hook",
    "_register_accum_grad_hook",
    "_setup_in_backward_optimizers",
    "_fire_reducer_autograd_hook",
    "_root_copy_hook",
    "_module_wait_for_copy_hook",
    "_ddp_init_helper",
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_lazy_init",
    "_clear_grad_buffer",
    "_pre_forward",
    "_post_forward",
    "_passing_sync_batchnorm_handle",
    "_update_process_group",
    "_assign_modules_buffers",
    "_check_manual_backward_finalization_supported",
    "finalize_backward",
)
"""Methods that drive torch's own reducer."""
AnyClass = TypeVar("AnyClass", bound=type)


def add_unused_members(wrapper: AnyClass) -> AnyClass:
    """Set these members on the class `wrapper`."""
    for name, value in (*INERT.items(), *((name, _refusing(name)) for name in REFUSED)):
        setattr(wrapper, name, value)
    return wrapper


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"DistributedDataParallel.{name} drives torch's own reducer, which Paceline does not have; "
            "docs/drop-in.md lists what to use instead"
        )

    refuse.__name__ = name
    refuse.__doc__ = "Part of torch's own reducer: raises UsageError."
    return refuse
