"""Digests of datasets, for comparing ranks and resumed runs without loading samples."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paceline.core.digests import PIECE, tensor_digest

PROBES = 16
"""Number of samples of each column that :func:`outline_digest` reads."""


def outline_digest(dataset: Any) -> int:
    """Return a 63-bit digest of a dataset's class, its length and a few rows of each of its :func:`columns`.

    The cost does not grow with the size of the dataset.
    """
    size = len(dataset) if hasattr(dataset, "__len__") else -1
    total = hashlib.sha256(f"{type(dataset).__qualname__} {size}".encode())
    for name, values in columns(dataset, ("fingerprint", "_fingerprint")):  # Hugging Face uses the second one
        rows = [values.encode()] if isinstance(values, str) else _probed(values)
        for part in (name.encode(), *rows):
            total.update(hashlib.sha256(part).digest())  # of fixed size, so that ("a", "bc") and ("ab", "c") differ
    return int.from_bytes(total.digest()[:8], "big") >> 1


def columns(dataset: Any, attributes: Sequence[str] = ("fingerprint",), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the columns that identify a dataset and can be read without loading a sample.

    If one of these attributes is a string, only this string is used. Otherwise the columns are the tensors
    of a ``TensorDataset``, the indices of a ``Subset``, the members of a ``ConcatDataset`` and, for other datasets,
    attributes that are arrays, tensors or lists with the dataset's length, and dicts that map labels to 0, 1, 2, ….

    No sample is loaded, because samples with random augmentation differ every time, and a dataset that opens a file
    for its first sample would pass the open file to every worker. To detect all edits, give your dataset a
    ``fingerprint``, such as a version or a hash of its files.
    """
    fingerprint = next((text for name in attributes if isinstance(text := getattr(dataset, name, None), str)), None)
    if fingerprint is not None:
        yield f"{prefix}fingerprint", fingerprint
    elif isinstance(dataset, TensorDataset):
        yield from ((f"{prefix}tensors[{number}]", tensor) for number, tensor in enumerate(dataset.tensors))
    elif isinstance(dataset, Subset):
        indices: Any = dataset.indices
        yield f"{prefix}indices", indices if isinstance(indices, list) else [int(index) for index in indices]
        yield from columns(dataset.dataset, attributes, f"{prefix}dataset.")
    elif isinstance(dataset, ConcatDataset):
        for number, member in enumerate(dataset.datasets):
            yield from columns(member, attributes, f"{prefix}datasets[{number}].")
    elif is_sequence(dataset):
        yield f"{prefix}elements", dataset
    else:
        size = len(dataset) if hasattr(dataset, "__len__") else -1
        for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
            if size > 0 and is_sequence(value) and len(value) == size:
                yield f"{prefix}{name}", value
            elif isinstance(value, dict) and (labels := _numbered(value)):
                yield f"{prefix}{name}", labels


def _numbered(labels: dict[Any, Any]) -> list[str]:
    """Return the keys of a dict that maps labels to 0, 1, 2, …, in that order; empty for any other dict.

    If the dict was built from a set, it differs between processes, because string hashes do.
    """
    if not all(type(label) is str and type(number) is int for label, number in labels.items()):
        return []
    by_number = {number: label for label, number in labels.items()}
    return [by_number[number] for number in range(len(labels))] if by_number.keys() == set(range(len(labels))) else []


def is_sequence(value: Any) -> bool:
    """Return whether looking up elements of the value by index is cheap."""
    return (
        isinstance(value, list | tuple | range)
        or (getattr(value, "ndim", 0) > 0 and hasattr(value, "tobytes"))
        or (isinstance(value, Tensor) and value.dim() > 0)
    )


def _probed(values: Any) -> Iterator[bytes]:
    size = len(values)
    for index in sorted({number * (size - 1) // (PROBES - 1) for number in range(PROBES)} if size else ()):
        yield element_bytes(values[index])


def element_bytes(value: Any) -> bytes:
    """Return the bytes of an element to include in a digest; for unknown types, only the type's name."""
    if isinstance(value, Tensor):
        start = value.detach().reshape(-1)[:PIECE] if value.layout is torch.strided else value.new_empty(0)
        return f"{tuple(value.shape)} {value.dtype} ".encode() + tensor_digest(start)
    if isinstance(value, str):
        return os.path.basename(value).encode(errors="surrogateescape")
    if isinstance(value, bytes):
        return value[:PIECE]
    if isinstance(value, int | float | complex):
        return repr(value).encode()
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if isinstance(value, tuple | list):
        head = b"" if len(value) <= PROBES else str(len(value)).encode()
        return head + b"".join(hashlib.sha256(element_bytes(item)).digest() for item in value[:PROBES])
    if hasattr(value, "tobytes") and hasattr(value, "reshape") and not getattr(value.dtype, "hasobject", True):
        return f"{value.shape} {value.dtype} ".encode() + bytes(value.reshape(-1)[:PIECE].tobytes())
    return type(value).__qualname__.encode()
