"""Compares free space with the size of a save before anything is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from pathlib import Path

import torch

from paceline.checkpoint.format.safetensors_file import spec_of
from paceline.core.output.wording import nbytes

PER_TENSOR = 512
"""Bytes for a tensor's entries in the header, the manifest and ``state.json``."""
MARGIN = 64 * 2**10
"""Bytes for plain values, and for rounding to whole blocks."""


def needed(tensors: Collection[torch.Tensor]) -> int:
    """Return the number of bytes that `tensors` need in a checkpoint, without :data:`MARGIN`."""
    return sum(spec_of(tensor).nbytes for tensor in tensors) + PER_TENSOR * len(tensors)


def check_room(folder: Path, size: int) -> None:
    """Check that the file system of `folder` has space for `size` bytes, if it reports its free space."""
    free = _free(folder)
    if free is not None and free < size + MARGIN:
        figures = f"{nbytes(size + MARGIN)} are needed, but only {nbytes(free)} are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {figures}")


def nothing_is_kept(error: OSError, folder: Path) -> str:
    """Return the message for ranks that cannot rescue steps because the job's `folder` is full."""
    return (
        "a failure will cost the steps since the last save on disk, because the job's folder is full "
        f"({folder.parent.parent}: {error.strerror or error}); enlarge it (in a container: docker run --shm-size=8g), "
        "or choose another folder with PACELINE_JOBS"
    )


def _free(folder: Path) -> int | None:
    """Return the free bytes of the file system of `folder`; None if it does not report them."""
    try:
        about = os.statvfs(folder)
    except OSError:
        return None  # the write will report the problem
    if about.f_blocks == 0:
        return None  # on some network file systems
    blocks = about.f_bfree if os.geteuid() == 0 else about.f_bavail  # some blocks are reserved for root
    return blocks * about.f_frsize
