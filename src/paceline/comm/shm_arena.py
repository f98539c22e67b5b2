"""Memory shared by the ranks of one host.

The memory is an anonymous file (``memfd``), which has no name, is not limited by ``/dev/shm``, and disappears with the
last process that uses it. The file is sparse and as large as the host's memory. Pages are allocated on first use and
released when a piece is freed, so a rank maps the others' memory only once, and allocates in its own without notifying
them.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import sys
import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import UsageError

HEADER_BYTES = 64 * 1024
"""Size of the area at the start of each rank's memory that describes its operations."""
_PAGE = mmap.PAGESIZE
_MADV_REMOVE = getattr(mmap, "MADV_REMOVE", 9)
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MAP_FIXED = 0x10
_KEPT_OPERANDS = 512
_ADDRESSES = 2**46
"""Amount of address space that all groups together may use; x86-64 has twice as much."""
_GROUPS = 16
"""Number of groups that must fit in the address space; each wrapper has one."""


class Segment:
    """One rank's memory, mapped into this process."""

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        # Before 3.13 Python keeps a copy of the descriptor with each mapping.
        untracked = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        self.memory = mmap.mmap(descriptor, self.size, flags=mmap.MAP_SHARED | _MAP_NORESERVE, **untracked)
        # Later operations write to this memory, and an inference tensor cannot be written to outside inference mode.
        with torch.inference_mode(False):
            self.address = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()
        self._operands: dict[tuple[int, int, torch.dtype], Tensor] = {}
        """Tensors returned by :meth:`operand`; most are used in every step."""

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return `count` elements of `dtype` at `offset` bytes, in their own storage, so that copies stay small."""
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def operand(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return a cached result of :meth:`tensor`, for internal use only."""
        key = (offset, count, dtype)
        operand = self._operands.get(key)
        if operand is None:
            if len(self._operands) >= _KEPT_OPERANDS:
                self._operands.clear()
            with torch.inference_mode(False):
                operand = self._operands[key] = self.tensor(offset, count, dtype)
        return operand

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of a contiguous tensor in this memory; None if it lies elsewhere, 0 if it is empty."""
        if tensor.numel() == 0:
            return 0
        offset = tensor.data_ptr() - self.address
        # Checking the address is enough: the tensor may be any view of one that was allocated here.
        inside = 0 <= offset <= self.size - tensor.numel() * tensor.element_size()
        if not inside or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        return offset


class Arena(Segment):
    """This rank's memory, with an allocator of tensors."""

    def __init__(self, ranks: int = 1) -> None:
        """Create the memory of one of `ranks` ranks on this host."""
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # Every rank maps every rank's memory, in every group.
        size = min(physical, _ADDRESSES // (_GROUPS * ranks)) // _PAGE * _PAGE
        self.descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        """Close the descriptor. The memory exists as long as something uses it."""
        self.close.atexit = False
        os.ftruncate(self.descriptor, size)
        super().__init__(self.descriptor)
        self._used: dict[int, int] = {}
        """Size in bytes of each allocated piece, by offset; both are multiples of the page size."""
        self._free: list[tuple[int, int]] = [(HEADER_BYTES, size - HEADER_BYTES)]
        """Offset and size in bytes of each free piece, sorted by offset; no two are adjacent."""
        self._lock = threading.Lock()
        """Held while changing either of them."""
        self._is_ours = True
        """Whether this process created the memory; False in forked children."""

    def leave_to_parent(self) -> None:
        """In a process forked from the rank, keep the content, but write to private pages.

        The child has tensors in this memory, mainly gradients. Its ``zero_grad()`` must not affect the rank's.
        """
        # At the fork, the old lock may have been held by another thread, which does not exist in this process.
        self._lock = threading.Lock()
        self._is_ours = False
        if self.close.alive:
            _map_privately(self.address, self.size, self.descriptor)
            self.close()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed flat tensor of `numel` elements in shared memory."""
        if numel < 0:
            raise UsageError(f"cannot allocate a tensor of {numel} elements; request 0 or more")
        with torch.inference_mode(False):
            if numel == 0:
                return self.tensor(0, 0, dtype)
            length = -(-numel * dtype.itemsize // _PAGE) * _PAGE
            # The kernel allocates pages at the first write, and kills the process if it runs out.
            available = available_memory()
            if length > available:
                raise UsageError(
                    f"{numel * dtype.itemsize:,} bytes of shared memory were requested, but the host has "
                    f"{available:,} left; use fewer ranks or a smaller model"
                )
            with self._lock:
                offset = self._take(length)
            # Zeroed without writing: new pages, and pages that free() has returned, read as zeros.
            return self.tensor(offset, numel, dtype)

    def _take(self, length: int) -> int:
        """Take `length` bytes from the first free piece that is long enough; return their offset."""
        for index, (offset, held) in enumerate(self._free):
            if held >= length:
                self._free[index : index + 1] = [(offset + length, held - length)] if held > length else []
                self._used[offset] = length
                return offset
        raise UsageError(
            f"{length:,} bytes of shared memory were requested, but this rank's {self.size:,} have no free block "
            "of that size; free some first"
        )

    def free(self, tensor: Tensor) -> None:
        """Return a tensor's memory to the host. Do not use the tensor afterwards."""
        if tensor.numel() == 0:
            return
        offset = tensor.data_ptr() - self.address
        with self._lock:
            length = self._used.pop(offset, None)
            if length is None:
                raise UsageError("the tensor does not come from allocate() or was already freed; free it once")
            if self._is_ours:  # a child would release the rank's pages
                # Under the lock, because releasing pages after unlocking could discard another thread's writes.
                self.memory.madvise(_MADV_REMOVE, offset, length)
            index = bisect.bisect(self._free, (offset, 0))
            following = self._free[index : index + 1]
            if following and following[0][0] == offset + length:
                length += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == offset:
                start, held = self._free.pop(index - 1)
                self._free.insert(index - 1, (start, held + length))
            else:
                self._free.insert(index, (offset, length))


def _map_privately(address: int, size: int, descriptor: int) -> None:
    """Replace the shared mapping of the file at `address` by a private one, which Python's mmap cannot do."""
    c_mmap = ctypes.CDLL(None, use_errno=True).mmap
    c_mmap.restype = ctypes.c_void_p
    c_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    if c_mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, f"a forked child cannot map its memory privately: {os.strerror(error)}")


def available_memory() -> int:
    """Return how many bytes can be allocated now, on the host or in the container, whichever is less."""
    available = 1 << 62
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
                break
    try:
        group = Path("/sys/fs/cgroup")
        remaining = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "active_file ")):
                remaining += int(line.split()[1])  # the kernel would drop the page cache first
        return max(0, min(available, remaining))
    except (OSError, ValueError):  # no limit, or a different kind of container
        return available
