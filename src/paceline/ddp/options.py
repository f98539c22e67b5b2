"""The wrapper's arguments and module, which are checked before ranks communicate."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.torch_distributed import get_default_group, local_of
from paceline.core.torch_internals import has_elements, has_overlap
from paceline.core.unwrapping import plain_name
from paceline.core.virtual_ranks import check_virtual_ranks
from paceline.ddp.buckets import CAPACITY, FIRST_CAPACITY, MIB
from paceline.errors import UsageError, WorldError, WrapError

UnusedParameters = Literal["allow", "warn", "error"]
InitSync = Literal[True, False, "verify"]
_SUMMED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_BROADCAST = {*_SUMMED, torch.complex32, *_INTEGERS}


@dataclass(frozen=True)
class Options:
    """Settings of the wrapper, checked once."""

    capacities: tuple[int, ...]
    """Bytes of the first, second, … bucket; the last one applies to all further buckets."""
    merges_buckets: bool
    """Whether all gradients of one dtype share a bucket if they fit in one, because the user has set no capacity."""
    check_finite: bool
    """Whether gradients are checked for NaN and Inf."""
    reduce_dtype: torch.dtype | None
    """The dtype for summing gradients; None for each parameter's own dtype."""
    unused: UnusedParameters
    """What to do about a parameter that has no gradient on some rank."""
    init_sync: InitSync
    """Whether the replicas are made equal at the start (``True``), compared (``"verify"``) or neither (``False``)."""
    syncs_buffers: bool
    """Whether forward passes synchronize buffers in training mode; frameworks may change the wrapper's attribute."""
    syncs_initial_buffers: bool
    """Whether buffers are made equal at the start."""
    check_replicas_every: int
    """Number of optimizer steps between comparisons of the replicas; 0 for no comparisons."""
    virtual_ranks: int
    """Number of slices over which a step's gradient is summed in a fixed tree; 0 for an ordinary step."""

    @classmethod
    def checked(
        cls,
        *,
        capacity: tuple[float | None, Sequence[float] | None],
        init_sync: object,
        buffer_sync: tuple[bool | None, bool | None],
        unused: tuple[object, bool],
        checks: tuple[bool, int | None],
        sums: tuple[torch.dtype | None, int | None],
        lazy_buckets: bool,
    ) -> Options:
        """Check the wrapper's arguments.

        Args:
            capacity: ``bucket_cap_mb`` and ``bucket_cap_mb_list``.
            buffer_sync: ``broadcast_buffers`` and ``forward_sync_buffers``, torch's old and new names for one setting.
            unused: ``unused_parameters``, and whether one of torch's arguments says that some are expected.
            lazy_buckets: ``lazy_bucket_allocation``.
            sums: ``reduce_dtype`` and ``virtual_ranks``, which determine the bits of the sums.
            checks: ``check_finite`` and ``check_replicas_every``.
        """
        if lazy_buckets:  # buckets that exist only during backward; users would rely on the memory savings
            raise UsageError(
                f"lazy_bucket_allocation={lazy_buckets!r} is not supported: Paceline keeps gradients in its buckets "
                "between steps and does not make torch's second copy; leave it out"
            )
        old, new = buffer_sync
        reduce_dtype, virtual_ranks = sums
        syncs = (old if new is None else new) is not False
        return cls(
            init_sync=check_init_sync(init_sync),
            capacities=capacities(*capacity),
            merges_buckets=capacity[0] is None and not capacity[1],
            unused=check_unused_parameters(unused[0], expected=unused[1]),
            check_finite=checks[0],
            reduce_dtype=check_reduce_dtype(reduce_dtype),
            check_replicas_every=check_interval("check_replicas_every", checks[1]),
            virtual_ranks=check_summable(virtual_ranks, reduce_dtype),
            syncs_buffers=syncs,
            # As in torch, broadcast_buffers=False also leaves buffers alone at the start; forward_sync_buffers does
            # not.
            syncs_initial_buffers=new is not None or syncs,
        )


def capacities(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> tuple[int, ...]:
    """Return bucket capacities in bytes: first, second, …; the last one applies to all further buckets."""
    caps = list(cap_mb_list or ([] if cap_mb is None else [cap_mb]))  # the list takes precedence, as in torch
    for value in caps:
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"a bucket's capacity must be a number of MiB > 0, not {value!r}")
    sizes = [max(1, int(value * MIB)) for value in caps]
    if cap_mb_list:
        return tuple(sizes)
    capacity = sizes[0] if sizes else CAPACITY
    return (min(FIRST_CAPACITY, capacity), capacity)


def check_reduce_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype not in (None, torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise UsageError(f"reduce_dtype={dtype!r}: give torch.float32, bfloat16, float16 or float64, or leave it out")
    return dtype


def check_devices(
    device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None, device: torch.device
) -> torch.device | None:
    """Return the device that inputs are moved to: the one in `device_ids`, if given."""
    ids = list(device_ids or [])
    if not ids:
        if output_device is not None and device.type == "cpu":
            raise UsageError(f"output_device={output_device!r} is given for a module on the CPU; leave it out")
        return None
    wanted = [torch.device("cuda", number) if isinstance(number, int) else torch.device(number) for number in ids]
    if wanted != [device]:
        raise UsageError(
            f"device_ids={ids} but the module's parameters are on {device}; pass the module's device alone, or leave "
            "device_ids out"
        )
    return device


def choose_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """Return the process group to average over."""
    if process_group is not None and device_mesh is not None:
        raise WrapError("Cannot specify both process_group and device_mesh arguments; leave one of them out")
    if not dist.is_initialized():
        raise WorldError("there is no process group yet; call paceline.init() before DistributedDataParallel")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise WrapError(
                f"Only 1D device mesh is supported, but this one has {device_mesh.ndim} dimensions; give the one to "
                "average over, such as device_mesh['data']"
            )
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group
    return process_group if process_group is not None else get_default_group()


def check_delayed(named: Any, hooked: Any, module: nn.Module) -> None:
    """Refuse delayed all-reduces of parameters outside `module`; parameters inside are put in ordinary buckets."""
    if (named is None) != (hooked is None):
        raise UsageError("give both delay_all_reduce_named_params and param_to_hook_all_reduce, or neither")
    inside = set(map(id, module.parameters()))
    for name, parameter in named or []:
        if id(parameter) not in inside:
            raise UsageError(
                f"parameter {name!r} of delay_all_reduce_named_params is not in the module; register it there, and its "
                "gradient is averaged like all others"
            )


def check_unused_parameters(value: object, *, expected: bool) -> UnusedParameters:
    """Check ``unused_parameters``; if unused parameters are `expected`, ``"warn"`` becomes ``"allow"``."""
    if value == "warn":
        return "allow" if expected else "warn"
    if value == "allow" or value == "error":
        return value
    raise UsageError(f"unused_parameters must be 'allow', 'warn' or 'error', not {value!r}")


def check_init_sync(value: object) -> InitSync:
    # By identity, because 1 == True
    if value is True or value is False or value == "verify":
        return value
    raise UsageError(f"init_sync must be True, False or 'verify', not {value!r}")


def check_interval(name: str, every: int | None) -> int:
    """Check the argument `name`, and return it as a number of optimizer steps; 0 if it is None."""
    if every is None:
        return 0
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"{name} must be a number of optimizer steps >= 1, or None, not {every!r}")
    return every


def check_summable(count: int | None, reduce_dtype: torch.dtype | None) -> int:
    """Check the number of virtual ranks, and return it; 0 if it is None."""
    if count is None:
        return 0
    count = check_virtual_ranks("virtual_ranks", count)
    if reduce_dtype is torch.float16:
        raise UsageError(
            "reduce_dtype=torch.float16 divides by the number of ranks before it sums; give torch.float32 or bfloat16 "
            f"with virtual_ranks={count}"
        )
    return count


def trained_parameters(module: nn.Module, ignored: set[str]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters to average in the module's order; a parameter that is used twice is listed once."""
    trained = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    if not trained:
        raise WrapError(
            "the module has no parameter that requires a gradient, so no gradients can be averaged; use the bare module"
        )
    devices = sorted({str(parameter.device) for _, parameter in trained})
    if len(devices) > 1:
        raise UsageError(
            f"the module's parameters live on several devices ({', '.join(devices)}); move the module to one "
            "device, one rank per GPU"
        )
    return trained


def check_initialized(module: nn.Module) -> None:
    """Refuse a module with lazy layers that do not have shapes yet."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise WrapError(
                f"{name!r} is not initialized, because it belongs to a lazy layer that has had no input yet; run a "
                "dummy forward through the module on every rank before wrapping it"
            )


def check_lookups(module: nn.Module, ignored: set[str]) -> None:
    """Refuse embeddings that rescale the rows a rank reads."""
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag) or f"{name}.weight".lstrip(".") in ignored:
            continue
        if layer.max_norm is not None:
            raise UsageError(
                f"{type(layer).__name__} {plain_name(name)!r} has max_norm={layer.max_norm:g}, so its forward rescales "
                "the rows that this rank reads, and replicas would drift apart; set max_norm to None, and after "
                "optimizer.step() call layer.weight.data.copy_(torch.renorm(layer.weight.data, "
                f"{layer.norm_type:g}, 0, {layer.max_norm:g})) instead"
            )


def check_averaged(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters whose gradients cannot be summed over ranks or are consumed before they are summed."""
    for name, parameter in named:
        if hasattr(parameter, "_in_backward_optimizers"):
            raise UsageError(
                f"parameter {name!r} has an optimizer that steps in backward (_apply_optimizer_in_backward), before "
                "gradients are averaged; use an optimizer after backward"
            )
        if parameter.is_inference():
            raise UsageError(
                f"parameter {name!r} was created under torch.inference_mode(), so autograd cannot train it; build, "
                "load and convert the model outside of torch.inference_mode()"
            )
        if obstacle := _unfit(local_of(parameter), _SUMMED):
            raise UsageError(
                f"parameter {name!r} is {obstacle}, whose gradient cannot be averaged over ranks; keep a dense one in "
                "float32 or another of the usual dtypes, or freeze it"
            )


def check_synchronized(named: Sequence[tuple[str, Tensor]], backend: str | None = None) -> None:
    """Refuse parameters and buffers that ranks cannot compare or, if `backend` is given, that it cannot broadcast."""
    sent = None if backend is None else _BROADCAST - {torch.int16} if "gloo" in backend else _BROADCAST
    for name, tensor in named:
        local = local_of(tensor)
        obstacle = _unfit(local, sent)
        if sent and not obstacle and has_overlap(local):
            obstacle = f"expanded, of dtype {local.dtype}, with elements that share memory,"
        if obstacle:
            raise UsageError(
                f"{name!r} is {obstacle} and cannot be {'broadcast to' if sent else 'compared with'} the other "
                "ranks; make it an ordinary tensor, contiguous, dense and of a usual dtype, or name it in "
                "module._ddp_params_and_buffers_to_ignore and make it equal yourself"
            )


def _unfit(tensor: Tensor, dtypes: Collection[torch.dtype] | None = None) -> str:
    """Describe a tensor without readable elements or, if given, with none of `dtypes`; empty for other tensors."""
    if not has_elements(tensor):
        layout = "nested" if tensor.is_nested else tensor.layout
        return f"a {type(tensor).__name__} of dtype {tensor.dtype} and layout {layout} on {tensor.device}"
    return "" if dtypes is None or tensor.dtype in dtypes else f"of dtype {tensor.dtype}"
