"""Finds the parameters of a module to average, and refuses modules that cannot be averaged."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.state.unwrapping import plain_name
from paceline.core.telemetry.users_code import warn
from paceline.core.torch_internals.distributed.dtensor import local_of
from paceline.core.torch_internals.tensors import has_elements, has_overlap
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


_SUMMED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_BROADCAST = {*_SUMMED, torch.complex32, *_INTEGERS}


def _unfit(tensor: Tensor, dtypes: Collection[torch.dtype] | None = None) -> str:
    """Describe a tensor without readable elements or, if given, with none of `dtypes`; empty for other tensors."""
    if not has_elements(tensor):
        layout = "nested" if tensor.is_nested else tensor.layout
        return f"a {type(tensor).__name__} of dtype {tensor.dtype} and layout {layout} on {tensor.device}"
    return "" if dtypes is None or tensor.dtype in dtypes else f"of dtype {tensor.dtype}"


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
