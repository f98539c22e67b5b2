"""The tensors that autograd saves in a forward, found by running the model with tensors that have no memory."""

from __future__ import annotations

import inspect
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from paceline.core.torch_internals.fake_tensors import without_memory
from paceline.ddp.options.buckets import MIB
from paceline.ddp.transport.sparse import stored_elements
from paceline.errors import UsageError
from paceline.nn.data_parallel import nested_tensors
from paceline.tools.memory_estimate.models import BuiltModel, described

LARGE = 32 * MIB
"""Bytes from which glibc's malloc returns a freed block: DEFAULT_MMAP_THRESHOLD_MAX in ``man mallopt``."""
OPTIONS = "--batch-size, --sequence-length and --input-shape"


@dataclass(frozen=True)
class Batch:
    """The micro-batch of one rank: tokens of a sequence length, or floating-point samples of a shape."""

    size: int
    sequence_length: int | None = None
    shape: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """Description for people."""
        if self.sequence_length is not None:
            return f"{self.size} × {self.sequence_length:,} tokens"
        return f"a batch of shape {(self.size, *self.shape)}"


class Activations(NamedTuple):
    """Bytes that autograd saves in a forward, with the outputs; each storage counts once."""

    total: int = 0
    small: int = 0
    """Bytes in blocks smaller than :data:`LARGE`, which malloc keeps when they are freed."""


def activations_of(
    model: BuiltModel, batch: Batch, dtype: torch.dtype | None, autocast: torch.dtype | None, *, on_gpu: bool
) -> Activations:
    """Return the activations of one forward.

    The module's tensors lose their values and memory, so the module cannot be used afterwards.

    Args:
        model: the model, on any device.
        batch: its input.
        dtype: dtype to which the module is cast; None for its own.
        autocast: dtype of ``torch.autocast`` around the forward; None for none.
        on_gpu: whether attention with dropout runs as flash attention, as on a GPU.
    """
    _check_input(model, batch)
    module = model.module
    _empty(module, "meta")  # before the cast, which would copy the values of a module that was already built
    if dtype is not None:
        module.to(dtype)
    module.train()
    try:
        with warnings.catch_warnings(), without_memory():
            warnings.simplefilter("ignore")  # they are about tensors without values
            _empty(module, "cpu")  # kernels are chosen as on a CPU
            own = [*module.parameters(), *module.buffers()]
            left_out = {id(stored_elements(each).untyped_storage()) for each in own}
            # Keeping the storages keeps their identities unique.
            storages: dict[int, torch.UntypedStorage] = {}

            def save(tensor: Tensor) -> Tensor:
                storage = stored_elements(tensor).untyped_storage()
                if id(storage) not in left_out:
                    storages[id(storage)] = storage
                return tensor

            arguments, options = _inputs(model, batch)
            cast = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
            hooks = saved_tensors_hooks(save, lambda tensor: tensor)
            # oneDNN's LSTM keeps what it saves in a workspace that the hooks cannot see.
            native = torch.backends.mkldnn.flags(enabled=False)
            with torch.enable_grad(), hooks, cast, native, _Attention(model.input_name is not None, on_gpu):
                outputs = module(*arguments, **options)
            for output in nested_tensors(outputs):
                save(output)
            sizes = [storage.nbytes() for storage in storages.values()]
            return Activations(sum(sizes), sum(size for size in sizes if size < LARGE))
    except (Exception, SystemExit) as error:  # the model's, of any class
        raise UsageError(_why_it_failed(model.name, batch, error)) from error


def _check_input(model: BuiltModel, batch: Batch) -> None:
    if model.input_name is None:
        return
    takes_tokens = model.input_name == "input_ids"
    if takes_tokens and batch.sequence_length is None:
        raise UsageError(f"{model.name} takes tokens; give --sequence-length in place of --input-shape")
    if not takes_tokens and not batch.shape:
        raise UsageError(f"{model.name} does not take tokens; give --input-shape in place of --sequence-length")
    if model.positions is not None and (batch.sequence_length or 0) > model.positions:
        raise UsageError(
            f"--sequence-length={batch.sequence_length} is more than the {model.positions:,} positions of {model.name}"
        )


def _inputs(model: BuiltModel, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if batch.sequence_length is None:
        dtypes = (parameter.dtype for parameter in model.module.parameters() if parameter.is_floating_point())
        tensor = torch.ones(batch.size, *batch.shape, dtype=next(dtypes, torch.float32))
    else:
        tensor = torch.zeros(batch.size, batch.sequence_length, dtype=torch.int64)
    if model.input_name is None:
        return (tensor,), {}
    options: dict[str, Any] = {model.input_name: tensor} | ({"labels": tensor} if model.has_labels else {})
    if "use_cache" in inspect.signature(model.module.forward).parameters:
        options["use_cache"] = False  # the cache of keys and values is for generation
    return (), options


def _why_it_failed(name: str, batch: Batch, error: BaseException) -> str:
    text = described(error)
    # By their names, because torch has the classes in a private module.
    if type(error).__name__ == "DataDependentOutputException" or ".numpy() is not supported" in text:
        reason = "reads the values of a tensor, as .item(), .numpy() and an if do, and here tensors have none"
    elif type(error).__name__ == "DynamicOutputShapeException":
        reason = "makes a tensor whose shape depends on values, as nonzero() and a mask do, and here tensors have none"
    else:
        kind = "a floating-point tensor" if batch.sequence_length is None else "an int64 tensor"
        return (
            f"a forward of {name} failed with {batch.title}, {kind}: {text}; give a batch that it takes, or none; for "
            "other inputs, name a module whose forward makes them of such a tensor"
        )
    place = text[text.rindex(" (") :] if text.endswith(")") else ""
    return f"{name} {reason}{place}; change that, or leave {OPTIONS} out for an estimate without activations"


def _empty(module: nn.Module, device: str) -> None:
    """Give the module tensors without values on `device`; shared parameters stay shared."""
    owners = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
    ]
    module.to_empty(device=device)
    new: dict[nn.Parameter, nn.Parameter] = {}
    for part, name, parameter in owners:  # to_empty() gives each owner a parameter of its own
        setattr(part, name, new.setdefault(parameter, getattr(part, name)))
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):  # a plain attribute, which to_empty() does not move
                setattr(part, name, torch.empty_like(value, device=device))


class _Attention(TorchFunctionMode):
    """Runs ``scaled_dot_product_attention`` as it runs with real values on the device that is meant.

    With dropout, a CPU uses a kernel that keeps all scores, and a GPU does not. transformers leaves out a mask that
    hides nothing, but here it cannot look at the values and would make one.
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
