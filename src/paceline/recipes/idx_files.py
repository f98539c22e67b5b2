"""Reads MNIST's idx files, plain or compressed: images and labels, checked byte by byte against their headers."""

from __future__ import annotations

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.explain.scene import counted

UNSIGNED_BYTES = 0x08
"""The idx format's code of the one kind of element that MNIST has."""
FILES = {
    "training images": ("train-images-idx3-ubyte", 3),
    "training labels": ("train-labels-idx1-ubyte", 1),
    "held-out images": ("t10k-images-idx3-ubyte", 3),
    "held-out labels": ("t10k-labels-idx1-ubyte", 1),
}
"""Each file's name, without ``.gz``, and its number of dimensions."""


def find_files(folder: Path) -> dict[str, Path]:
    """Return MNIST's four files in `folder`.

    Raises:
        UsageError: if it is no folder, or a file is not there; names it.
    """
    if not folder.is_dir():
        raise UsageError(f"--data {folder}: there is no such folder; give the one with MNIST's idx files")
    found = {}
    for what, (name, _) in FILES.items():
        paths = [folder / f"{name}.gz", folder / name]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise UsageError(f"--data {folder}: there is neither {paths[0].name} nor {name}, the {what} of MNIST")
        found[what] = path
    return found


def read_mnist(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and held-out images, (n, 1, rows, columns) uint8, each with its labels, (n,) int64.

    Raises:
        UsageError: if a file is missing, damaged, or does not belong to the others; names it.
    """
    paths = find_files(folder)
    tensors = {what: read_idx(path, FILES[what][1]) for what, path in paths.items()}
    for part in ("training", "held-out"):
        images, labels = tensors[f"{part} images"], tensors[f"{part} labels"]
        if len(images) != len(labels):
            raise UsageError(
                f"{paths[f'{part} images']} has {len(images):,} images but {paths[f'{part} labels']} has "
                f"{len(labels):,} labels; take both from one copy of the data"
            )
        if labels.max() > 9:
            raise UsageError(f"{paths[f'{part} labels']} has the label {int(labels.max())}; MNIST's are 0 to 9")
    shapes = [tuple(tensors[f"{part} images"].shape[1:]) for part in ("training", "held-out")]
    if shapes[0] != shapes[1]:
        raise UsageError(f"--data {folder}: training images have {shapes[0]} pixels but held-out ones {shapes[1]}")
    return tuple(  # type: ignore[return-value]
        (tensors[f"{part} images"].unsqueeze(1), tensors[f"{part} labels"].long()) for part in ("training", "held-out")
    )


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Return the contents of an idx file, uint8.

    Raises:
        UsageError: if it cannot be read, or its header does not fit `dimensions` or its length.
    """
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}; get the file anew") from error
    size = 4 + 4 * dimensions
    if len(content) < size or content[:4] != bytes([0, 0, UNSIGNED_BYTES, dimensions]):
        raise UsageError(
            f"{path} is no idx file of {counted(dimensions, 'dimension')} of bytes: it begins with "
            f"{content[:4].hex(' ') or 'nothing'}; get the file anew"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:size])
    if len(content) - size != prod(shape) or prod(shape) == 0:
        raise UsageError(
            f"{path} should hold {' x '.join(map(str, shape))} = {prod(shape):,} bytes, but has "
            f"{len(content) - size:,}; get the file anew"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=size).view(shape)
