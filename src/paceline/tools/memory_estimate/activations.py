"""Activations: the tensors that autograd saves in a forward pass, found by running it on fake tensors."""

from __future__ import annotations

import inspect
import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from paceline.core.torch_internals import stored_elements, without_memory
from paceline.ddp.buckets import MIB
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.tools.memory_estimate.models import BuiltModel, described, empty

LARGE = 32 * MIB
"""Minimum bytes of a memory block that malloc returns to the system (DEFAULT_MMAP_THRESHOLD_MAX in ``man mallopt``)."""


class Batch(NamedTuple):
    """The micro-batch of one rank: tokens, or floating-point samples."""

    shape: tuple[int, ...]
    is_tokens: bool = False

    @property
    def title(self) -> str:
        """Description shown to the user."""
        if self.is_tokens:
            return f"{self.shape[0]} × {self.shape[1]:,} tokens"
        return f"a batch of shape {self.shape}"


class Activations(NamedTuple):
    """Bytes that autograd saves in a forward pass, including the outputs. Each storage counts once."""

    total: int = 0
    small: int = 0
    """Bytes in blocks smaller than :data:`LARGE`, which malloc keeps when they are freed."""


def activations_of(model: BuiltModel, batch: Batch, autocast: torch.dtype | None, *, on_gpu: bool) -> Activations:
    """Return the activations of one forward pass. Makes the module's tensors fake, so it cannot be used afterwards.

    Args:
        model: the model.
        batch: its input.
        autocast: dtype of ``torch.autocast`` around the forward pass; None for no autocast.
        on_gpu: whether attention with dropout runs as flash attention, as on a GPU.
    """
    module = model.module.train()
    # Keep references to the storages, so that their ids stay unique.
    storages: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = stored_elements(tensor).untyped_storage()
        storages[id(storage)] = storage
        return tensor

    try:
        with warnings.catch_warnings(), without_memory():
            warnings.simplefilter("ignore")  # such as warnings about tensors without values
            empty(module, "cpu")  # selects the same kernels as a CPU
            inputs = _inputs(model, batch)
            cast = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
            hooks = saved_tensors_hooks(save, lambda tensor: tensor)
            # oneDNN's LSTM saves its tensors in a workspace that the hooks cannot see.
            native = torch.backends.mkldnn.flags(enabled=False)
            with torch.enable_grad(), hooks, cast, native, _Attention(model.input_name is not None, on_gpu):
                outputs = module(**inputs) if model.input_name else module(*inputs.values())
            for output in nested_tensors(outputs):
                save(output)
            for tensor in (*module.parameters(), *module.buffers()):
                storages.pop(id(stored_elements(tensor).untyped_storage()), None)
            sizes = [storage.nbytes() for storage in storages.values()]
            return Activations(sum(sizes), sum(size for size in sizes if size < LARGE))
    except (Exception, SystemExit) as error:  # user code may raise anything
        kind = "int64" if batch.is_tokens else "floating point"
        raise UsageError(
            f"the forward pass of {model.name} with {batch.title} ({kind}) failed: {described(error)}; give a batch "
            "that the model accepts, or none for an estimate without activations. The tensors have no values here, so "
            ".item(), nonzero() and boolean masks fail"
        ) from error


def _inputs(model: BuiltModel, batch: Batch) -> dict[str, Any]:
    if batch.is_tokens:
        tensor = torch.zeros(batch.shape, dtype=torch.int64, device="cpu")
    else:
        dtypes = (parameter.dtype for parameter in model.module.parameters() if parameter.is_floating_point())
        tensor = torch.ones(batch.shape, dtype=next(dtypes, torch.float32), device="cpu")
    inputs: dict[str, Any] = {model.input_name or "input": tensor}
    if model.has_labels:
        inputs["labels"] = tensor
    if model.input_name and "use_cache" in inspect.signature(model.module.forward).parameters:
        inputs["use_cache"] = False  # the KV cache is only for generation
    return inputs


class _Attention(TorchFunctionMode):
    """Runs ``scaled_dot_product_attention`` as it would run with real values on the target device.

    With dropout, the CPU kernel stores all attention scores, and the GPU kernel does not. transformers drops a mask
    that masks no token, but it cannot check fake tensors, which have no values, and would keep the mask.
    """

    def __init__(self, is_maskless: bool, on_gpu: bool) -> None:
        super().__init__()
        self._changes: dict[str, Any] = {"attn_mask": None, "is_causal": True} if is_maskless else {}
        if on_gpu:
            self._changes["dropout_p"] = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return func(**(dict(zip(names, args, strict=False)) | (kwargs or {}) | self._changes))
