"""Memory that the ranks of one host share.

It is an anonymous file (``memfd``), so nothing has a name, ``/dev/shm`` does not limit it, and the last process that
ends takes it along. The file is sparse and as large as the host's memory: pages come with their first use and go
back when a piece is freed. So a rank maps the others' memory once, and allocates in its own without asking anyone.
"""

from __future__ import annotations

import mmap
import os
from math import prod

import torch
from torch import Tensor

from paceline.errors import UsageError

HEADER_BYTES = 64 * 1024
"""Bytes at the start of every rank's memory that describe its operations."""
_PAGE = mmap.PAGESIZE
_MADV_REMOVE = getattr(mmap, "MADV_REMOVE", 9)
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Segment:
    """One rank's memory, as this process sees it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements of `dtype` at `offset` bytes; its storage is just these, so that copies stay small."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where a contiguous tensor lies in this memory; None if elsewhere."""
        offset = tensor.data_ptr() - self.address
        inside = 0 <= offset <= self.size - tensor.numel() * tensor.element_size()
        return offset if inside and tensor.is_contiguous() else None


class Arena(Segment):
    """This rank's own memory, from which tensors are allocated."""

    def __init__(self) -> None:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        super().__init__(self.descriptor, size)
        self._next = HEADER_BYTES
        self._used: dict[int, int] = {}  # offset → bytes, in pages
        self._free: list[tuple[int, int]] = []  # (offset, bytes)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat tensor of `numel` elements in shared memory.

        Raises:
            UsageError: if the host has not that much memory.
        """
        length = max(_PAGE, -(-numel * dtype.itemsize // _PAGE) * _PAGE)
        if length > _available():
            raise UsageError(
                f"{prod((numel, dtype.itemsize)):,} bytes of shared memory were asked for, but the host has "
                f"{_available():,} left; use fewer ranks or a smaller model"
            )
        for at, (offset, held) in enumerate(self._free):
            if held >= length:
                self._free[at] = (offset + length, held - length)
                break
        else:
            offset = self._next
            if offset + length > self.size:
                raise UsageError(f"the shared memory of this rank, {self.size:,} bytes, is used up; free some first")
            self._next += length
        self._used[offset] = length
        return self.tensor(offset, numel, dtype)

    def free(self, tensor: Tensor) -> None:
        """Give a tensor's memory back to the host. It must not be used any more."""
        offset = tensor.data_ptr() - self.address
        length = self._used.pop(offset)
        self.memory.madvise(_MADV_REMOVE, offset, length)
        self._free.append((offset, length))


def _available() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
