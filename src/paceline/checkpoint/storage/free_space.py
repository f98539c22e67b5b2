"""Compares free space with the size of a save before anything is written."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Collection
from pathlib import Path

import torch

from paceline.checkpoint.format.safetensors_file import bytes_of_all
from paceline.core.output.wording import nbytes

ALIGNED = 64
"""Bytes, at whose multiples torch's own allocator begins tensors on a CPU, too."""
PER_TENSOR = 512
"""Bytes for a tensor's entries in the header and in the manifest, and its share of ``state.json``."""
MARGIN = 64 * 2**10
"""Bytes for everything else: plain values, and the rounding up to whole blocks."""


def aligned(size: int) -> int:
    """Return `size` rounded up to an offset where a tensor of any dtype may begin."""
    return -(-size // ALIGNED) * ALIGNED


def needed(tensors: Collection[torch.Tensor]) -> int:
    """Return how many bytes `tensors` take in a checkpoint, without :data:`MARGIN`."""
    return bytes_of_all(tensors) + PER_TENSOR * len(tensors)


def check_room(folder: Path, size: int) -> None:
    """Check that the file system of `folder` has room for `size` bytes; one that reports no free space is trusted."""
    free = _free(folder)
    if free is not None and free < size + MARGIN:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {_both(size, free)}")


def explained(error: OSError, reason: str, folder: Path, size: int) -> str:
    """Return the `reason` of a failed write of `size` bytes to `folder`, with the needed and the free space."""
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"{reason}: {nbytes(size + MARGIN)} are needed, {nbytes(limit)} are allowed for a file (ulimit -f)"
    free = _free(folder) if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    return reason if free is None or "are needed" in reason else f"{reason}: {_both(size, free)}"


def nothing_is_kept(error: OSError, folder: Path) -> str:
    """Return the message for ranks whose steps cannot be rescued because the job's `folder` is full."""
    remedy = "enlarge it (of a container: docker run --shm-size=8g), or name another place in PACELINE_JOBS"
    return (
        "a failure costs the steps since the last save on disk, as the job's folder takes no more "
        f"({folder.parent.parent}: {error.strerror or error}); "
        f"{'raise ulimit -f' if error.errno == errno.EFBIG else remedy}"
    )


def _free(folder: Path) -> int | None:
    """Return how many bytes the file system of `folder` has free; None if it does not tell."""
    try:
        about = os.statvfs(folder)
    except OSError:
        return None  # a problem with the folder shows when it is written to
    if about.f_blocks == 0:
        return None  # reported by some network file systems
    blocks = about.f_bfree if os.geteuid() == 0 else about.f_bavail  # some blocks are reserved for root
    return blocks * about.f_frsize


def _both(size: int, free: int) -> str:
    return f"{nbytes(size + MARGIN)} are needed, {nbytes(free)} are free"
