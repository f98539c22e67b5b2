"""SHA-256 of tensors, weights and data sets, to compare replicas and runs bit by bit."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.modules import unwrap
from paceline.rng import rng_state, seed_all, set_rng_state

PROBES = 16
"""Samples read of a data set that is no ``TensorDataset``."""


def tensor_digest(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's elements in logical order, wherever it lives and however it is strided."""
    plain = tensor.detach().cpu().contiguous()
    size = plain.numel() * plain.element_size()
    if size == 0:
        return hashlib.sha256(b"").digest()
    # The tensor's memory as it is: no NumPy, which the package does not need, and every dtype.
    return hashlib.sha256((ctypes.c_char * size).from_address(plain.data_ptr())).digest()


def weights_sha256(module: nn.Module) -> str:
    """One SHA-256 over names and values of all parameters and buffers, as hexadecimal digits."""
    total = hashlib.sha256()
    for name, tensor in sorted(unwrap(module).state_dict().items()):
        if isinstance(tensor, Tensor):
            total.update(name.encode() + b"\0" + tensor_digest(tensor))
    return total.hexdigest()


def dataset_digest(dataset: Any) -> str:
    """SHA-256 of a map-style data set, as hexadecimal digits.

    A ``TensorDataset`` is read whole. Of any other, class, length and at most :data:`PROBES` samples spread
    over it are read: enough to notice that it was appended to, replaced or reordered, not every edited sample.
    """
    total = hashlib.sha256()
    if isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            total.update(_describe(tensor))
        return total.hexdigest()
    size = len(dataset) if hasattr(dataset, "__len__") else -1
    total.update(f"{type(dataset).__qualname__} {size}".encode())
    streams = rng_state()
    try:
        for index in sorted({(size - 1) * probe // (PROBES - 1) for probe in range(PROBES)} if size > 0 else ()):
            seed_all(0)  # a sample that is augmented at random is the same sample every time it is asked for here
            total.update(_describe(dataset[index]))
    finally:
        set_rng_state(streams)
    return total.hexdigest()


def _describe(value: Any) -> bytes:
    """Bytes that differ when `value`, a sample, differs; of objects of unknown kind only the class counts."""
    inner = _content(value)
    return f"{type(value).__qualname__} {len(inner)} ".encode() + inner  # or (1, 23) would read as (12, 3)


def _content(value: Any) -> bytes:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} ".encode() + tensor_digest(value)
    if isinstance(value, dict):
        return b"".join(_describe(key) + _describe(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return b"".join(map(_describe, value))
    if isinstance(value, str | bytes | int | float | bool | None):
        return repr(value).encode()
    if callable(getattr(value, "tobytes", None)):  # NumPy's arrays and scalars, Pillow's images
        shape, kind = (getattr(value, name, None) for name in ("shape", "dtype"))
        return f"{getattr(value, 'size', None)} {shape} {kind} ".encode() + hashlib.sha256(value.tobytes()).digest()
    return b""
