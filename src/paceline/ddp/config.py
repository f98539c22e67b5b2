"""What the wrapper's arguments mean, checked before anything else happens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.buckets import CAPACITY, FIRST_CAPACITY, MIB
from paceline.errors import UsageError, WorldError, WrapError

Algorithm = Literal["ring", "tree", "halving-doubling", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "halving-doubling", "hierarchical")
UnusedParameters = Literal["allow", "warn", "error"]
InitSync = Literal[True, False, "verify"]


@dataclass(frozen=True)
class Options:
    """The reducer's choices, checked by the wrapper."""

    capacities: tuple[int, ...] = (FIRST_CAPACITY, CAPACITY)
    """Bytes of the first, second, … bucket."""
    check_finite: bool = False
    """Whether gradients are checked for NaN and Inf."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients are summed, if not in their own."""
    unused: UnusedParameters = "allow"
    """What happens where a parameter has no gradient on some rank."""
    algorithm: Algorithm | None = None
    """What sums the buckets, if not the backend's own all-reduce."""


def capacities(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> tuple[int, ...]:
    """Bucket capacities in bytes: first, second, …; the last one holds for all further buckets.

    Raises:
        UsageError: for a capacity that is not a positive number.
    """
    asked = list(cap_mb_list or ([] if cap_mb is None else [cap_mb]))  # the list wins, as in torch
    for value in asked:
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"a bucket's capacity must be a number of MiB > 0, not {value!r}")
    sizes = [max(1, int(value * MIB)) for value in asked]
    if cap_mb_list:
        return tuple(sizes)
    capacity = sizes[0] if sizes else CAPACITY
    return (min(FIRST_CAPACITY, capacity), capacity)


def check_lazy(lazy_bucket_allocation: bool) -> None:
    """Refuse torch 2.15's buckets that exist only during backward, whose memory a user would count on.

    Raises:
        UsageError: unless it is false.
    """
    if lazy_bucket_allocation:
        raise UsageError(
            f"lazy_bucket_allocation={lazy_bucket_allocation!r} is not supported: gradients lie in Paceline's buckets, "
            "without the second copy that torch's have by default, and stay there between steps; leave it out"
        )


def check_reduce_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """`dtype` if gradients can be reduced in it.

    Raises:
        UsageError: otherwise.
    """
    if dtype not in (None, torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise UsageError(f"reduce_dtype={dtype!r}: give torch.float32, bfloat16, float16 or float64, or leave it out")
    return dtype


def choose_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """The ranks to average over.

    Raises:
        WorldError: without a process group.
        WrapError: if both arguments are given, or a mesh of several dimensions.
    """
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
    return process_group if process_group is not None else dist.distributed_c10d._get_default_group()


def check_delayed(named: Any, hooked: Any) -> list[tuple[str, nn.Parameter]]:
    """torch's parameters whose all-reduce is delayed until that of another is due; here the end of backward is.

    Raises:
        UsageError: unless both arguments are given, or none.
    """
    if (named is None) != (hooked is None):
        raise UsageError("give both delay_all_reduce_named_params and param_to_hook_all_reduce, or none of them")
    return list(named or [])


def trained_parameters(
    module: nn.Module, ignored: set[str], more: Sequence[tuple[str, nn.Parameter]] = ()
) -> list[tuple[str, nn.Parameter]]:
    """The parameters to be averaged, each once however often it is shared, in the module's order, then `more`.

    Raises:
        WrapError: if there is none.
        UsageError: if they live on several devices.
    """
    trained = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    own = {id(parameter) for parameter in module.parameters()}
    trained += [(name, parameter) for name, parameter in more if id(parameter) not in own and parameter.requires_grad]
    if not trained:
        raise WrapError(
            "the module has no parameter that requires a gradient, so there is nothing to average; use the bare module"
        )
    devices = sorted({str(parameter.device) for _, parameter in trained})
    if len(devices) > 1:
        raise UsageError(
            f"the module's parameters live on several devices ({', '.join(devices)}); move the module to one "
            "device, one rank per GPU"
        )
    return trained


def check_initialized(module: nn.Module) -> None:
    """Refuse a module whose lazy layers do not know their shapes yet.

    Raises:
        WrapError: names the parameter or buffer.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise WrapError(
                f"{name!r} is not initialized, as it belongs to a lazy layer that has not seen an input; run a dummy "
                "forward through the module on every rank before wrapping it"
            )


def check_averaged(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters whose gradients cannot be summed over ranks.

    Raises:
        UsageError: names the parameter and its dtype or layout.
    """
    for name, parameter in named:
        kind = _unfit_layout(parameter) or ("" if parameter.dtype in _SUMMED else f"of dtype {parameter.dtype}")
        if kind:
            raise UsageError(
                f"parameter {name!r} is {kind}, whose gradient cannot be averaged over ranks; keep a dense one in "
                "float32 or another of the usual dtypes, or freeze it"
            )


def check_broadcast(named: Sequence[tuple[str, Tensor]], backend: str) -> None:
    """Refuse parameters and buffers that `backend` cannot broadcast.

    Raises:
        UsageError: names the first, with its dtype or layout, and the remedy.
    """
    unfit = _NEVER_BROADCAST if "gloo" not in backend else (*_NEVER_BROADCAST, torch.int16)
    for name, tensor in named:
        kind = _unfit_layout(tensor)
        if not kind and (tensor.dtype in unfit or (tensor.dtype.itemsize == 1 and tensor.is_floating_point())):
            kind = f"of dtype {tensor.dtype}"
        if not kind and torch._debug_has_internal_overlap(tensor) == 1:
            kind = f"expanded, of dtype {tensor.dtype}, so that several of its elements share memory,"
        if kind:
            raise UsageError(
                f"{name!r} is {kind} and cannot be broadcast to the other ranks; make it contiguous, dense and of a "
                "usual dtype, or name it in module._ddp_params_and_buffers_to_ignore and make it equal yourself"
            )


_SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_NEVER_BROADCAST = (torch.uint16, torch.uint32, torch.uint64)


def _unfit_layout(tensor: Tensor) -> str:
    """What kind of tensor it is, with its dtype, if its elements do not lie in memory as those of most tensors do."""
    if tensor.is_quantized:
        return f"quantized, of dtype {tensor.dtype}"
    if tensor.is_nested:
        return f"a nested tensor of dtype {tensor.dtype}"
    if tensor.layout is not torch.strided:
        sparse = "sparse, " if "sparse" in str(tensor.layout) else ""
        return f"{sparse}of layout {tensor.layout} and dtype {tensor.dtype}"
    return f"on the meta device, of dtype {tensor.dtype}, without values" if tensor.is_meta else ""


def check_devices(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    device: torch.device,
) -> torch.device | None:
    """Where inputs have to be moved: the one device of `device_ids`, if any.

    Raises:
        UsageError: for more than one device id, or one on which the module does not live.
    """
    ids = list(device_ids or [])
    if not ids:
        if output_device is not None and device.type == "cpu":
            raise UsageError(f"output_device={output_device!r} is given for a module on the CPU; leave it out")
        return None
    wanted = [torch.device("cuda", one) if isinstance(one, int) else torch.device(one) for one in ids]
    if wanted != [device]:
        raise UsageError(
            f"device_ids={ids} but the module's parameters are on {device}; give one rank one device, the module's "
            "own, or leave device_ids out"
        )
    return device


def tensors_in(output: Any) -> list[Tensor]:
    """All tensors in a forward's output, through tuples, lists, mappings, dataclasses and plain objects."""
    found: list[Tensor] = []
    stack, seen = [output], set()
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | set | frozenset):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module) and id(value) not in seen:
            seen.add(id(value))
            stack.extend(vars(value).values())
    return found


def check_algorithm(algorithm: Algorithm | None) -> Algorithm | None:
    """`algorithm` if there is such a one.

    Raises:
        UsageError: otherwise.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise UsageError(f"algorithm={algorithm!r}: give one of {', '.join(ALGORITHMS)}, or None for the backend's own")
    return algorithm


def check_unused_parameters(value: object, *, expected: bool) -> UnusedParameters:
    """`value` if it is one of the three that exist; a warning is left out where unused parameters are `expected`.

    Raises:
        UsageError: otherwise.
    """
    if value == "warn":
        return "allow" if expected else "warn"
    if value == "allow" or value == "error":
        return value
    raise UsageError(f"unused_parameters must be 'allow', 'warn' or 'error', not {value!r}")


def check_init_sync(value: object) -> InitSync:
    """`value` if it is one of the three that exist.

    Raises:
        UsageError: otherwise.
    """
    if value is True or value is False or value == "verify":
        return value
    raise UsageError(f"init_sync must be True, False or 'verify', not {value!r}")


def check_interval(every: int | None) -> int:
    """The interval in optimizer steps; 0 for none.

    Raises:
        UsageError: unless it is a whole number above 0, or None.
    """
    if every is None:
        return 0
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"check_replicas_every must be a number of optimizer steps >= 1, or None, not {every!r}")
    return every
