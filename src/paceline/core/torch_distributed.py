"""The private names of ``torch.distributed`` that Paceline uses, and of modules that it trains in parallel.

In order: process groups, their NCCL backend, torch's DistributedDataParallel, modules, and DTensors. See
:mod:`.torch_internals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import CellType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import Future as Future
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import _broadcast_coalesced, _unregister_process_group
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.utils.stateless import _reparametrize_module

from paceline.core.torch_internals import never_compiled

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# -- process groups ----------------------------------------------------------------------------------------------------

_c10d: Any = dist.distributed_c10d
get_default_group: Callable[[], dist.ProcessGroup] = _c10d._get_default_group
get_default_store: Callable[[], Store] = _c10d._get_default_store
broadcast_coalesced: Callable[[Any, list[Tensor], int, int], None] = _broadcast_coalesced


def cell_of(name: str) -> CellType | None:
    """Return the cell that holds the inner function of a decorated function of ``torch.distributed``; None without one.

    All callers use a function that is put into the cell, no matter how they imported the decorated function.
    """
    closure = getattr(_c10d, name).__closure__  # of torch's _exception_logger
    return closure[0] if closure else None


def get_known_groups() -> Mapping[Any, tuple[str, Store]]:
    """Return torch's own table of the process groups that it created and has not destroyed.

    Each value is a group's backend and store. A bare ``ProcessGroupGloo`` is not in the table.
    """
    groups: Mapping[Any, tuple[str, Store]] = _c10d._world.pg_map
    return groups


def open_group(
    group: dist.ProcessGroup, ranks: Sequence[int], backend: str, store: Store, name: str, timeout: timedelta
) -> Any:
    """Open a process group of the members of `group`, which are `ranks` of the world, under a name that they agree on.

    All members call this, and no other ranks. torch adds the group to its tables; see :func:`forget_group`.
    """
    opened, _ = _c10d._new_process_group_helper(
        group.size(), group.rank(), ranks, dist.Backend(backend), store, name, timeout=timeout
    )
    return opened


def forget_group(group: Any, name: Any) -> None:
    """Remove a new group from torch's tables."""
    # All tables that _new_process_group_helper() fills in torch 2.11 to 2.15. A remaining entry would be counted, or
    # destroyed a second time.
    world = _c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_backend_config):
        table.pop(group)
    # Added in torch 2.15; it would keep the group's descriptors and threads until the process ends.
    getattr(world, "pg_flight_recorder_hooks", {}).pop(group, None)
    for groups in world.tags_to_pg.values():
        groups[:] = [other for other in groups if other is not group]
    world.tags_to_pg.pop(world.pg_to_tag.pop(group))
    _unregister_process_group(name)


# -- NCCL --------------------------------------------------------------------------------------------------------------


def nccl_of(group: Any) -> Any:
    """Return the NCCL backend that serves CUDA tensors in `group`; None if it has none."""
    if not dist.is_nccl_available():
        return None
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # no backend for CUDA tensors
        return None
    while hasattr(backend, "wrapped_pg"):  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def attach_nccl(group: Any, parent: Any, ranks: Sequence[int], store: Store, name: str, timeout: timedelta) -> None:
    """Add a new NCCL communicator to `group`, for its CUDA tensors; `group` has the same `ranks` as `parent`.

    It is split from the parent's communicator if the parent is bound to a device, because then all ranks already have
    that communicator. All ranks call this together.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group, options.group_name = list(ranks), name
    device, source = parent.bound_device_id, nccl_of(parent)
    is_split = device is not None and source is not None and source.supports_splitting
    if is_split:
        options.split_from, options.split_color = source, 0
    nccl = dist.ProcessGroupNCCL(PrefixStore("cuda/", store), group.rank(), group.size(), options)
    nccl._set_sequence_number_for_group()
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
    group._set_group_name(name)  # set after the backends are registered, because the group passes it to them
    group._set_group_desc("paceline")
    if is_split:
        torch.cuda.synchronize(device)  # NCCL can split only an idle communicator
        nccl.eager_connect_single_device(device)


@contextmanager
def grouped_aborts(nccl: Any) -> Iterator[None]:
    """Combine the block's aborts of communicators, so that they do not wait for each other."""
    if nccl is None:
        yield
        return
    nccl._group_start()
    try:
        yield
    finally:
        nccl._group_end()


def abort_known_groups() -> None:
    """Abort and remove every process group that torch knows, like ``destroy_process_group`` but without waiting."""
    _c10d._abort_process_group()


# -- DistributedDataParallel, and its join -----------------------------------------------------------------------------

MixedPrecision = nn.parallel.distributed._MixedPrecision


def make_disabled_join() -> Any:
    """Make the ``_join_config`` of a wrapper that is outside ``join``."""
    return _JoinConfig.construct_disabled_join_config()


@never_compiled
def move_inputs(inputs: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Return a forward's inputs with their tensors on `device`."""
    moved, moved_kwargs = _to_kwargs(inputs, kwargs, device, False)  # type: ignore[arg-type]
    return moved[0], moved_kwargs[0]


def cast_inputs(dtype: torch.dtype | None, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a forward's inputs with their floating-point tensors in `dtype`; None keeps their dtypes."""
    return _cast_forward_inputs(dtype, *inputs, **kwargs)


# -- modules -----------------------------------------------------------------------------------------------------------

AnyBatchNorm = nn.modules.batchnorm._BatchNorm


def replace_parameters(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[Any]:
    """In the block, replace parameters, including tied parameters, with the `tensors` of the same names."""
    context: AbstractContextManager[Any] = _reparametrize_module(module, tensors, tie_weights=True)
    return context


def bare_replica(module: nn.Module) -> nn.Module:
    """Return a shallow copy of one module, without its parameters; :func:`set_tensor` adds tensors instead."""
    replica: nn.Module = module._replicate_for_data_parallel()
    return replica


def set_tensor(replica: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Set `tensor`, which autograd computed from a parameter, under that parameter's name."""
    if tensor is None:
        replica._parameters[name] = None
    else:
        setattr(replica, name, tensor)  # recurrent layers also add it to their list of weights


# -- DTensors ----------------------------------------------------------------------------------------------------------


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # imported only if needed, because it is slow to load

    return isinstance(tensor, DTensor)


def has_sharded(values: Iterable[Any]) -> bool:
    """Whether there is a DTensor among `values`."""
    return any(isinstance(value, Tensor) and is_sharded(value) for value in values)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, not copied; any other tensor unchanged."""
    return cast("DTensor", tensor)._local_tensor if is_sharded(tensor) else tensor


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; needs a collective among the ranks of its mesh."""
    return cast("DTensor", tensor).full_tensor()


@torch.no_grad()
def part_like(full: Tensor, tensor: Tensor) -> Tensor:
    """Return `full`, which every rank has, in the layout of the DTensor `tensor`, without a collective."""
    from torch.distributed.tensor import distribute_tensor

    like = cast("DTensor", tensor)
    moved = full.to(like._local_tensor.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def as_local(parameter: nn.Parameter) -> nn.Parameter:
    """Return `parameter` or, if it is a DTensor, an object that represents it in the reducer."""
    return cast("nn.Parameter", _Shard(cast("DTensor", parameter))) if is_sharded(parameter) else parameter


def release(parameter: nn.Parameter) -> None:
    """Remove the hook that :func:`as_local` registered."""
    if isinstance(parameter, _Shard):
        parameter.close()


class _Shard:
    """This rank's shard of a DTensor parameter: its shape, and its gradient as a plain tensor.

    It has the parameter attributes that the reducer uses.
    """

    def __init__(self, parameter: DTensor) -> None:
        self._parameter = parameter
        # Convert gradients on arrival, because this may need a collective: gradients arrive in the same order on all
        # ranks that share a parameter, but each group of replicas chooses its own order for launching buckets.
        self._handle = parameter.register_post_accumulate_grad_hook(_lay_out)

    @property
    def requires_grad(self) -> bool:
        return self._parameter.requires_grad

    @property
    def grad(self) -> Tensor | None:
        if self._parameter.grad is None:
            return None
        _lay_out(self._parameter)
        return cast("DTensor", self._parameter.grad)._local_tensor

    @grad.setter
    def grad(self, local: Tensor | None) -> None:
        from torch.distributed.tensor import DTensor

        spec = self._parameter._spec
        self._parameter.grad = None if local is None else DTensor(local, spec, requires_grad=False)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        return self._parameter.register_post_accumulate_grad_hook(hook)

    def register_hook(self, hook: Any) -> Any:
        return self._parameter.register_hook(hook)

    def expand_as(self, _other: Any) -> Any:
        return self._parameter.expand_as(self._parameter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter._local_tensor, name)

    def close(self) -> None:
        self._handle.remove()


@torch.no_grad()
def _lay_out(parameter: Any) -> None:
    """Give the gradient its parameter's layout. The gradient of a replicated parameter may still be a partial sum."""
    gradient = parameter.grad
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    if hasattr(gradient._local_tensor, "trigger_wait"):  # a functional collective is running
        gradient._local_tensor = gradient._local_tensor.wait()
