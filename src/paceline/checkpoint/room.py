"""Free space, compared with what a save needs before it writes anything."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from paceline.checkpoint.tensorfile import spec_of

ALIGNED = 64
"""Bytes."""
PER_TENSOR = 512
"""Bytes for a tensor's entries in the header and in the manifest, and its share of ``state.json``."""
MARGIN = 64 * 2**10
"""Bytes for all else: plain values, and what is lost to whole blocks."""


def aligned(size: int) -> int:
    """Return `size` bytes up to where the next tensor of any dtype may begin."""
    return -(-size // ALIGNED) * ALIGNED


def needed(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes `tensors` take in a checkpoint, without :data:`MARGIN`."""
    return sum(spec_of(tensor).nbytes + PER_TENSOR for tensor in tensors)


def expect_room(folder: Path, size: int) -> None:
    """Raise unless the file system of `folder` has room for `size` bytes; one that does not tell is trusted.

    Raises:
        OSError: with both figures, as a full disk raises it.
    """
    try:
        about = os.statvfs(folder)
    except OSError:
        return  # whatever is wrong with the folder shows when it is written to
    if about.f_blocks == 0:
        return  # as some network file systems say
    blocks = about.f_bfree if os.geteuid() == 0 else about.f_bavail  # what is kept for root is not for others
    free = blocks * about.f_frsize
    if free < size + MARGIN:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {readable(size + MARGIN)} are needed, {readable(free)} are free",
        )


def readable(size: float) -> str:
    """Return a number of bytes for people: ``512 B``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
