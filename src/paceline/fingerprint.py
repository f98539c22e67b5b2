"""SHA-256 of tensors, weights and data sets, to compare replicas and runs bit by bit."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paceline.modules import unwrap


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

    What counts: the data set's own ``fingerprint``, if it has one and that is a string; of a ``TensorDataset`` every
    element; of a ``Subset`` and a ``ConcatDataset`` what they are made of; of any other only class and length.

    No sample is asked for: a data set with random numbers of its own would have another digest every time, and one
    that opens a file at its first sample would hand the open file to every worker. So give your data set a
    ``fingerprint``, such as a version or a hash of its files, if edits shall be noticed.
    """
    total = hashlib.sha256()
    for part in _parts(dataset):
        total.update(hashlib.sha256(part).digest())  # of one size each, or ("a", "bc") would read as ("ab", "c")
    return total.hexdigest()


def _parts(dataset: Any) -> Iterator[bytes]:
    """What tells `dataset` from others."""
    own = getattr(dataset, "fingerprint", None)
    if isinstance(own, str):
        yield b"fingerprint " + own.encode()
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + tensor_digest(tensor)
    elif isinstance(dataset, Subset):
        yield " ".join(str(int(index)) for index in dataset.indices).encode()
        yield dataset_digest(dataset.dataset).encode()
    elif isinstance(dataset, ConcatDataset):
        for member in dataset.datasets:
            yield dataset_digest(member).encode()
    else:
        size = len(dataset) if hasattr(dataset, "__len__") else -1
        yield f"{type(dataset).__qualname__} {size}".encode()
