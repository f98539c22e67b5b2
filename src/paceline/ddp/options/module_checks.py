"""Finds the parameters of a module to average, and refuses modules that cannot be averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.state.unwrapping import plain_name
from paceline.core.telemetry.users_code import warn
from paceline.core.torch_internals.tensors import has_overlap
from paceline.errors import UsageError, WrapError


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


def check_lookups(module: nn.Module, ignored: set[str], *, warns: bool) -> None:
    """Refuse embeddings that rescale the rows a rank reads; warn if each rank counts row frequencies separately."""
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag) or f"{name}.weight".lstrip(".") in ignored:
            continue
        kind = f"{type(layer).__name__} {plain_name(name)!r}"
        if layer.max_norm is not None:
            raise UsageError(
                f"{kind} has max_norm={layer.max_norm:g}, so its forward rescales the rows that this rank reads, and "
                "replicas would drift apart; set max_norm to None, and after optimizer.step() call layer.weight.data."
                f"copy_(torch.renorm(layer.weight.data, {layer.norm_type:g}, 0, {layer.max_norm:g})) instead"
            )
        if layer.scale_grad_by_freq and warns:
            warn(
                f"{kind} has scale_grad_by_freq=True, which divides by how often a row occurs in the samples of one "
                "rank or slice and not of the global batch, so gradients differ from those of one rank; leave it out "
                "to avoid that"
            )


def check_averaged(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters whose gradients cannot be summed over ranks or are consumed before they are summed."""
    for name, parameter in named:
        if hasattr(parameter, "_in_backward_optimizers"):
            raise UsageError(
                f"parameter {name!r} has an optimizer that steps in backward (_apply_optimizer_in_backward), before "
                "gradients are averaged; use an optimizer after backward"
            )
        obstacle = _unfit_layout(parameter) or ("" if parameter.dtype in _SUMMED else f"of dtype {parameter.dtype}")
        if obstacle:
            raise UsageError(
                f"parameter {name!r} is {obstacle}, whose gradient cannot be averaged over ranks; keep a dense one in "
                "float32 or another of the usual dtypes, or freeze it"
            )


def check_broadcast(named: Sequence[tuple[str, Tensor]], backend: str) -> None:
    """Refuse parameters and buffers that `backend` cannot broadcast."""
    unfit = _NEVER_BROADCAST if "gloo" not in backend else (*_NEVER_BROADCAST, torch.int16)
    for name, tensor in named:
        obstacle = _unfit_layout(tensor)
        # the only one-byte floating-point dtypes are the float8 dtypes
        if not obstacle and (tensor.dtype in unfit or (tensor.dtype.itemsize == 1 and tensor.is_floating_point())):
            obstacle = f"of dtype {tensor.dtype}"
        if not obstacle and has_overlap(tensor):
            obstacle = f"expanded, of dtype {tensor.dtype}, with elements that share memory,"
        if obstacle:
            raise UsageError(
                f"{name!r} is {obstacle} and cannot be broadcast to the other ranks; make it contiguous, dense and of "
                "a usual dtype, or name it in module._ddp_params_and_buffers_to_ignore and make it equal yourself"
            )


_SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_NEVER_BROADCAST = (torch.uint16, torch.uint32, torch.uint64)


def _unfit_layout(tensor: Tensor) -> str:
    """Describe a tensor that is quantized, nested, sparse or on the meta device; empty for ordinary tensors."""
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
