"""A forward, a loss and a backward with tensors that have no memory, and the bytes that they would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from paceline.core.torch_internals.fake_tensors import without_memory
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.tools.memory_estimate.kernels import DEVICES, Device
from paceline.tools.memory_estimate.live_bytes import LiveBytes

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class DryRun:
    """The bytes of a forward and a backward, without parameters, buffers, and gradients that have been accumulated."""

    activations: int
    """Bytes that autograd saves in the forward, with the outputs; each storage counts once."""
    arrivals: tuple[tuple[int, int], ...]
    """Each gradient in the order of arrival: the index of its parameter, and the largest number of bytes that were
    alive since the one before arrived, itself included. The first has those of the forward, too."""
    after: int
    """Largest number of bytes that were alive since the last gradient arrived."""
    kept: int
    """Bytes that are alive after backward: inputs, outputs and the loss."""
    loss: str
    """The loss, for people."""
    small_share: float
    """Share of the bytes in blocks that malloc keeps when they are freed."""
    equal_share: float
    """Share of the bytes, on average, in blocks of the same size as a given one."""
    convolutions: int
    """Number of convolutions that differ in a shape or a stride: kernels are compiled for each of them."""
    workspace: int
    """Most bytes that a convolution, or its backward, has beside tensors while it runs."""

    def peak(self, sizes: Sequence[int], buckets: Sequence[Sequence[int]] = ()) -> int:
        """Return the most bytes of activations, temporaries and gradients at once.

        Args:
            sizes: bytes that each parameter's gradient takes from its arrival on.
            buckets: parameters whose gradients are freed when all of them are there, because they are copied elsewhere.
        """
        bucket_of = {place: number for number, bucket in enumerate(buckets) for place in bucket}
        missing = [len(bucket) for bucket in buckets]
        peak = held = 0
        for place, alive in self.arrivals:
            peak = max(peak, alive + held)
            held += sizes[place]
            if (number := bucket_of.get(place)) is not None:
                missing[number] -= 1
                if not missing[number]:
                    held -= sum(sizes[each] for each in buckets[number])
        return max(peak, self.after + held)


def run_dry(
    module: nn.Module,
    make_inputs: Callable[[], Inputs],
    *,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    is_maskless: bool = False,
    device: Device = DEVICES["cpu"],
) -> DryRun:
    """Run a forward and a backward.

    The module's tensors lose their values and their memory: do not use it afterwards.

    Args:
        module: on any device, the meta device among them.
        make_inputs: called where tensors have no memory; returns the arguments of a forward.
        dtype: to which the module is cast.
        autocast: the dtype of ``torch.autocast`` around the forward.
        is_maskless: leave the masks of ``scaled_dot_product_attention`` out.
        device: whose kernels are meant.
    """
    # Before the cast, which would copy the values of a module that was built already.
    _empty(module, "meta")
    if dtype is not None:
        module.to(dtype)
    module.train()
    with without_memory():
        _take_to_cpu(module)
        held = [*module.parameters(), *module.buffers()]
        saved, live = LiveBytes(held), LiveBytes(held, device.beside_tensors)

        def save(tensor: Tensor) -> Tensor:
            saved.add(tensor)
            return tensor

        arrivals = _follow_arrivals(module, live)
        with torch.enable_grad(), live:
            arguments, options = make_inputs()
            cast = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
            hooks = saved_tensors_hooks(save, lambda tensor: tensor)
            with hooks, cast, _Attention(is_maskless, device.has_flash):
                outputs = module(*arguments, **options)
            for output in nested_tensors(outputs):
                saved.add(output)
            activations = saved.now + live.beside
            loss, title = _loss_of(outputs, arguments)
            loss.backward()
            return DryRun(
                activations,
                tuple(arrivals),
                live.peak,
                live.now,
                title,
                live.small_share,
                live.equal_share,
                len(live.calls["convolution"]),
                max(live.workspaces["convolution"], live.workspaces["convolution_backward"]),
            )


def _follow_arrivals(module: nn.Module, live: LiveBytes) -> list[tuple[int, int]]:
    """Return a list that backward fills: each gradient's parameter, and the peak since the one before it arrived."""
    arrivals: list[tuple[int, int]] = []

    def arrived(place: int, parameter: Tensor) -> None:
        arrivals.append((place, live.peak))
        # Freed at once: peak() adds gradients from their arrivals on, as long as the strategy keeps them.
        parameter.grad = None
        live.restart()

    for place, parameter in enumerate(module.parameters()):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(arrived, place))
    return arrivals


def _loss_of(outputs: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, str]:
    """Return a loss of the outputs of a forward, and its description.

    Raises:
        UsageError: if no output has floating-point values, or it does not depend on a trained parameter.
    """
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss, "the model's own loss"
    output = next((tensor for tensor in nested_tensors(outputs) if tensor.is_floating_point()), None)
    if output is None:
        raise UsageError("its forward returns no floating-point tensor to make a loss of; return one, or give no batch")
    if not output.requires_grad:
        raise UsageError("its output depends on no parameter that requires a gradient; let it, or give no batch")
    inputs = [tensor for tensor in nested_tensors(arguments) if tensor.shape == output.shape]
    if not output.dim():
        return output, "the model's output"
    if inputs and inputs[0].is_floating_point():
        return F.mse_loss(output, inputs[0]), "mse_loss of output and input"
    if output.dim() == 1:
        return F.mse_loss(output, torch.zeros_like(output)), "mse_loss"
    # From four dimensions on it is an image's, with the classes in the second; else these are in the last.
    logits = output.flatten(0, -2) if output.dim() < 4 else output
    target = torch.zeros((logits.shape[0], *logits.shape[2:]), dtype=torch.int64)
    return F.cross_entropy(logits, target), "cross_entropy"


def _empty(module: nn.Module, device: str) -> None:
    """Give the module tensors without values on `device`; parameters that are shared stay so."""
    owners = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
    ]
    module.to_empty(device=device)
    new: dict[nn.Parameter, nn.Parameter] = {}
    for part, name, parameter in owners:  # to_empty() gives each owner one of its own
        setattr(part, name, new.setdefault(parameter, getattr(part, name)))


def _take_to_cpu(module: nn.Module) -> None:
    """Give the module tensors on the CPU without memory; the CPU's kernels are chosen by them."""
    _empty(module, "cpu")
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):  # a plain attribute, which to_empty() leaves on the meta device
                setattr(part, name, torch.empty_like(value, device="cpu"))


class _Attention(TorchFunctionMode):
    """Calls ``scaled_dot_product_attention`` as the device does that is meant."""

    def __init__(self, is_maskless: bool, has_flash: bool) -> None:
        super().__init__()
        self._is_maskless, self._has_flash = is_maskless, has_flash

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        # On the CPU, dropout would lead away from flash attention, to a kernel that keeps all scores.
        if self._has_flash:
            given |= {"dropout_p": 0.0}
        if self._is_maskless:
            given |= {"attn_mask": None, "is_causal": True}
        return func(**given)
