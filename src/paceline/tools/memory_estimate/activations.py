"""The bytes that autograd saves for backward in a forward, measured with tensors that have no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from paceline.core.torch_internals.fake_tensors import without_memory
from paceline.ddp.transport.sparse import stored_elements
from paceline.nn.data_parallel import nested_tensors

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def measure_activations(
    module: nn.Module,
    make_inputs: Callable[[], Inputs],
    *,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    is_maskless: bool = False,
) -> int:
    """Return the bytes that autograd saves in a forward, and those of the outputs; each storage counts once.

    Parameters and buffers do not count. The module's tensors lose their values and their memory: do not use it
    afterwards.

    Args:
        module: on any device, the meta device among them.
        make_inputs: called where tensors have no memory; returns the arguments of a forward.
        dtype: to which the module is cast.
        autocast: the dtype of ``torch.autocast`` around the forward.
        is_maskless: leave the masks of ``scaled_dot_product_attention`` out.
    """
    module.to_empty(device="meta")
    if dtype is not None:
        module.to(dtype)
    module.train()
    with without_memory():
        _take_to_cpu(module)
        saved = _Storages([*module.parameters(), *module.buffers()])
        arguments, options = make_inputs()
        cast = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
        hooks = saved_tensors_hooks(saved.add, lambda tensor: tensor)
        with torch.enable_grad(), hooks, cast, without_mkldnn(), _FlashAttention(is_maskless):
            outputs = module(*arguments, **options)
        for output in nested_tensors(outputs):
            saved.add(output)
        return saved.nbytes


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """Make a forward use torch's own kernels, because mkldnn's LSTM saves a workspace of unknown size."""
    was_enabled, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(was_enabled)


def _take_to_cpu(module: nn.Module) -> None:
    """Give the module tensors on the CPU without memory; the CPU's kernels are chosen by them."""
    module.to_empty(device="cpu")
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):  # a plain attribute, which to_empty() leaves on the meta device
                setattr(part, name, torch.empty_like(value, device="cpu"))


class _Storages:
    """Counts the bytes of tensors; memory that several of them share counts once."""

    def __init__(self, left_out: list[Tensor]) -> None:
        self.nbytes = 0
        """Bytes of all tensors that were added."""
        self._tensors = list(left_out)
        """All tensors so far, kept alive because a freed storage's address may be given to another one."""
        self._seen = {StorageWeakRef(tensor.untyped_storage()) for tensor in left_out}

    def add(self, tensor: Tensor) -> Tensor:
        """Count `tensor`, and return it."""
        part = stored_elements(tensor)
        storage = part.untyped_storage()
        if (key := StorageWeakRef(storage)) not in self._seen:
            self._seen.add(key)
            self._tensors.append(part)
            self.nbytes += storage.nbytes()
        return tensor


class _FlashAttention(TorchFunctionMode):
    """Calls ``scaled_dot_product_attention`` without dropout: only GPUs have flash attention with it."""

    def __init__(self, is_maskless: bool) -> None:
        super().__init__()
        self._is_maskless = is_maskless

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | (kwargs or {}) | {"dropout_p": 0.0}
        if self._is_maskless:
            given |= {"attn_mask": None, "is_causal": True}
        return func(**given)
