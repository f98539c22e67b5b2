"""Activations: the tensors that autograd saves in a forward pass, found by running it on fake tensors."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.core.torch_internals import NEEDS_VALUES, TorchDispatchMode, stored_elements, tree_leaves, without_memory
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.tools.memory_estimate.models import BuiltModel, described, empty

GROUPED = "aten::_grouped_mm"


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
    """The tensors of a forward and backward pass other than weights; the gradients of weights are only in the trace."""

    total: int = 0
    """Maximum bytes at any moment, without the gradients of weights."""
    trace: tuple[tuple[int, int], ...] = ()
    """Each new storage as its number (from 1) and bytes; its release as the negative number and 0."""
    forward: int = 0
    """Length of the forward pass in the trace."""
    gradients: frozenset[int] = frozenset()
    """Numbers of the storages that become the gradients of weights."""


def activations_of(model: BuiltModel, batch: Batch, autocast: torch.dtype | None, *, on_gpu: bool) -> Activations:
    """Return the activations of one step. Makes the module's tensors fake, so it cannot be used afterwards.

    Backward runs too, so recomputed activations (``torch.utils.checkpoint``) are included.

    Args:
        model: the model.
        batch: its input.
        autocast: dtype of ``torch.autocast`` around the forward pass and the loss; None for no autocast.
        on_gpu: whether attention with dropout runs as flash attention, as on a GPU.
    """
    module = model.module.train()
    try:
        with warnings.catch_warnings(), without_memory():
            warnings.simplefilter("ignore")  # such as warnings about tensors without values
            empty(module, "cpu")  # selects the same kernels as a CPU
            live = _Live(module)
            # oneDNN's LSTM saves its tensors in a workspace that cannot be seen.
            native = torch.backends.mkldnn.flags(enabled=False)
            attention = _attention(model.input_name is not None, on_gpu)
            with torch.enable_grad(), native, attention, live:
                inputs = _inputs(model, batch)
                with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
                    outputs = module(**inputs) if model.input_name else module(*inputs.values())
                    losses = [outputs.loss] if model.has_labels else _losses(outputs, batch)
                if not losses:
                    raise ValueError("no output is a tensor that requires a gradient")
                forward = len(live.trace)
                torch.autograd.backward(losses)
                # The training loop holds the inputs, outputs and loss until the next step.
                return Activations(live.peak, tuple(live.trace), forward, frozenset(live.gradients))
    except (Exception, SystemExit) as error:  # user code may raise anything
        kind = "int64" if batch.is_tokens else "floating point"
        # The error's text names the operator.
        if isinstance(error, NEEDS_VALUES):
            remedy = "the model reads values of tensors, which an estimate does not have, so omit the batch"
        elif hasattr(error, "func") or isinstance(error, NotImplementedError) or "fake impl" in str(error):
            remedy = "this operator has no implementation for tensors without values, so omit the batch"
        else:
            remedy = "give a batch that the model accepts as its only input, or omit it"
        raise UsageError(
            f"forward or backward of {model.name} with {batch.title} ({kind}) failed: {described(error)}; {remedy} to "
            "estimate without activations"
        ) from error


def _losses(outputs: Any, batch: Batch) -> list[Tensor]:
    """Return the usual loss of each output: cross-entropy, or the mean squared error for outputs like the inputs."""
    losses = []
    for output in nested_tensors(outputs):
        if output.requires_grad and output.dim() > 1 and (batch.is_tokens or output.shape != batch.shape):
            logits = output.flatten(0, -2)
            targets = torch.zeros(len(logits), dtype=torch.int64, device="cpu")
            losses.append(F.cross_entropy(logits, targets))
        elif output.requires_grad:
            losses.append(F.mse_loss(output, torch.zeros_like(output)) if output.dim() else output)
    return losses


class _Live(TorchDispatchMode):
    """Counts the bytes of the storages that exist, and traces when each one is allocated and freed."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace: list[tuple[int, int]] = []
        self.gradients: set[int] = set()
        self.peak = self._now = 0
        # Storages by id, which is unique as long as they exist.
        self._initial = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())]
        self._numbers = {id(storage): 0 for storage in self._initial}
        self._with_gradient: set[Tensor] = set()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._release)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _grouped(*args, **(kwargs or {})) if func.name() == GROUPED else func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(stored_elements(tensor).untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._numbers:
            return
        number = self._numbers[id(storage)] = len(self.trace) + 1
        self.trace.append((number, storage.nbytes()))
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._remove, id(storage), storage.nbytes()).atexit = False

    def _remove(self, identity: int, size: int) -> None:
        self.trace.append((-self._numbers.pop(identity), 0))
        self._now -= size

    def _release(self, parameter: Tensor) -> None:
        """Free a gradient as soon as it is complete, because gradients are counted elsewhere."""
        assert parameter.grad is not None
        if parameter not in self._with_gradient:  # reentrant checkpoints of a shared layer accumulate several
            self.gradients.add(self._numbers[id(stored_elements(parameter.grad).untyped_storage())])
        self._with_gradient.add(parameter)
        parameter.grad = None


def _grouped(first: Tensor, second: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Multiply matrices in groups (mixtures of experts); torch 2.13 implements it for fake tensors only in bfloat16."""
    groups = first.shape[:1] if first.dim() == 3 and second.dim() == 3 else ()
    if first.dim() == second.dim() == 2 and offsets is not None:
        groups = offsets.shape
    return first.new_empty(*groups, first.shape[-2], second.shape[-1])


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


@contextmanager
def _attention(is_maskless: bool, on_gpu: bool) -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` run as with real values on the target device.

    With dropout, the CPU kernel stores all attention scores, and the GPU kernel does not. transformers drops a mask
    that masks no token, but it cannot check fake tensors, which have no values, and would keep the mask.
    """
    original = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        kwargs |= zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)
        mask = kwargs.get("attn_mask")
        if is_maskless and mask is not None and mask.dtype is torch.bool:
            kwargs |= {"attn_mask": None, "is_causal": True}
        if on_gpu:
            kwargs["dropout_p"] = 0.0
        return original(**kwargs)

    class ByName(TorchFunctionMode):
        """Also reaches modules that have imported the function by name."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (attention if func is original else func)(*args, **(kwargs or {}))

    # The mode is not active in backward, for recomputed attention.
    with patch.object(F, "scaled_dot_product_attention", attention), ByName():
        yield
