"""SHA-256 of tensors, weights and data sets, to compare replicas and runs bit by bit."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paceline.unwrapping import unwrap

PIECE = 2**14
"""64-bit words that are digested at once on the CPU: what fits the cache."""


def tensor_digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of a tensor's elements in logical order, on any device and with any strides."""
    plain = tensor.detach().cpu().contiguous()
    size = plain.numel() * plain.element_size()
    if size == 0:
        return hashlib.sha256(b"").digest()
    # The tensor's memory as it is: no NumPy, which the package does not need, and every dtype.
    return hashlib.sha256((ctypes.c_char * size).from_address(plain.data_ptr())).digest()


def quick_digest(tensor: Tensor) -> Tensor:
    """Return 64 bits that depend on every element of a tensor, as an int64 tensor without dimensions on its device.

    It takes about as long as reading the tensor. It is the sum, modulo 2**64, of the tensor's 64-bit words, each mixed
    and multiplied by an odd number of its own. One flipped bit always changes it, and so, almost always, do values that
    swapped places. It guards against accidents, not against attacks.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bytes_ = flat.view(torch.uint8)
    whole = len(bytes_) // 8 * 8
    if bytes_.storage_offset() % 8:
        bytes_ = bytes_.clone()  # words have to lie at multiples of their size
    words, tail = bytes_[:whole].view(torch.int64), bytes_[whole:]
    piece = PIECE if words.device.type == "cpu" else 64 * PIECE
    sums = [_mixed_sum(part) for part in words.split(piece)] if len(words) else []
    if len(tail):
        last = torch.zeros(8, dtype=torch.uint8, device=tail.device)
        last[: len(tail)] = tail
        sums.append(_mixed_sum(last.view(torch.int64)))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return _mixed_sum(torch.stack(sums))


def _mixed_sum(words: Tensor) -> Tensor:
    # High bits are folded onto low ones first: a product modulo 2**64 hands nothing down.
    return ((words ^ (words >> 32)) * _odd_numbers(len(words), words.device)).sum()


@cache
def _all_odd_numbers(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2**31 - 1)
    numbers = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64)
    return (2 * numbers + 1).to(device)


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Return random odd numbers, the same on every rank."""
    held = PIECE if count <= PIECE else 64 * PIECE
    return _all_odd_numbers(max(held, count), device)[:count]


def weights_sha256(module: nn.Module) -> str:
    """Return one SHA-256, in hexadecimal digits, over names and values of all parameters and buffers."""
    total = hashlib.sha256()
    for name, tensor in sorted(unwrap(module).state_dict().items()):
        if isinstance(tensor, Tensor):
            total.update(name.encode() + b"\0" + tensor_digest(tensor))
    return total.hexdigest()


def dataset_digest(dataset: Any) -> str:
    """Return the SHA-256 of a map-style data set, in hexadecimal digits.

    What counts is the data set's own ``fingerprint``, if that is a string; for a ``TensorDataset`` every element; for a
    ``Subset`` and a ``ConcatDataset`` the parts they are made of; for any other data set only its class and length.

    No sample is read: a data set with random numbers of its own would get another digest every time, and one that
    opens a file at its first sample would hand the open file to every worker. To have edits noticed, give your data set
    a ``fingerprint``, such as a version or a hash of its files.
    """
    total = hashlib.sha256()
    for part in _parts(dataset):
        total.update(hashlib.sha256(part).digest())  # of one size each, or ("a", "bc") would read as ("ab", "c")
    return total.hexdigest()


def _parts(dataset: Any) -> Iterator[bytes]:
    """Return the values that distinguish `dataset` from others."""
    fingerprint = getattr(dataset, "fingerprint", None)
    if isinstance(fingerprint, str):
        yield b"fingerprint " + fingerprint.encode()
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


PROBES = 16
"""Samples of a data set that :func:`outline_digest` looks at."""


def outline_digest(dataset: Any) -> int:
    """Return 63 bits that distinguish a data set from another rank's, in a time that does not grow with its size.

    What counts is the data set's own ``fingerprint`` (or ``_fingerprint``), if that is a string. Otherwise it is its
    class, its length, and a few elements of each attribute that is as long as the data set: tensors, arrays, lists of
    numbers, of names or of tuples, as lists of files or of targets are. Of a path only the name counts. A ``Subset``
    and a ``ConcatDataset`` are described by their parts.

    No sample is read, for the reasons that :func:`dataset_digest` gives.
    """
    total = hashlib.sha256()
    for part in _outline(dataset):
        total.update(hashlib.sha256(part).digest())
    return int.from_bytes(total.digest()[:8], "big") >> 1


def _outline(dataset: Any) -> Iterator[bytes]:
    fingerprint = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    if isinstance(fingerprint, str):
        yield b"fingerprint " + fingerprint.encode()
        return
    size = len(dataset) if hasattr(dataset, "__len__") else -1
    yield f"{type(dataset).__qualname__} {size}".encode()
    if isinstance(dataset, Subset):
        yield from _probed(dataset.indices, size)
        yield from _outline(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for member in dataset.datasets:
            yield from _outline(member)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield from _probed(tensor, size)
    elif isinstance(dataset, Tensor | list | tuple):
        yield from _probed(dataset, size)
    else:
        for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
            if size > 0 and is_sequence(value) and len(value) == size:
                yield name.encode()
                yield from _probed(value, size)


def is_sequence(value: Any) -> bool:
    """Return whether the value has elements that can be looked up by number at no cost."""
    return (
        isinstance(value, list | tuple | range)
        or (getattr(value, "ndim", 0) > 0 and hasattr(value, "tobytes"))
        or (isinstance(value, Tensor) and value.dim() > 0)
    )


def _probed(values: Any, size: int) -> Iterator[bytes]:
    for index in sorted({number * (size - 1) // (PROBES - 1) for number in range(PROBES)} if size > 0 else ()):
        yield element_bytes(values[index])


def element_bytes(value: Any) -> bytes:
    """Return the part of one element that counts: for unknown types, the type."""
    if isinstance(value, Tensor):
        start = value.detach().reshape(-1)[:PIECE] if value.layout is torch.strided else value.new_empty(0)
        return f"{tuple(value.shape)} {value.dtype} ".encode() + tensor_digest(start)
    if isinstance(value, str):
        return os.path.basename(value).encode(errors="surrogateescape")
    if isinstance(value, bytes):
        return value[:PIECE]
    if isinstance(value, int | float | complex):
        return repr(value).encode()
    if isinstance(value, tuple | list) and len(value) <= PROBES:
        return b"".join(hashlib.sha256(element_bytes(item)).digest() for item in value)
    if hasattr(value, "tobytes") and hasattr(value, "reshape") and not getattr(value.dtype, "hasobject", True):
        return f"{value.shape} {value.dtype} ".encode() + bytes(value.reshape(-1)[:PIECE].tobytes())
    return type(value).__qualname__.encode()
