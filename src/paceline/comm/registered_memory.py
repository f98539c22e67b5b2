"""GPU memory registered with an NCCL communicator, which can then reduce it in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NEEDED = ("register_mem_pool", "mem_allocator", "supports_tensor_alloc")
"""Required members of torch's NCCL backend."""


def why_not(nccl: Any, device: torch.device) -> str | None:
    """Return why memory cannot be registered with the backend `nccl`; None if it can."""
    missing = [name for name in NEEDED if not hasattr(type(nccl), name)]  # properties of an instance may raise
    missing += [f"torch.cuda.{name}" for name in ("MemPool", "use_mem_pool") if not hasattr(torch.cuda, name)]
    if missing:
        return f"this torch, {torch.__version__}, lacks {', '.join(missing)}"
    if not nccl.supports_tensor_alloc(device):
        return f"{device}, its driver or this NCCL cannot register memory"
    return None


class RegisteredMemory:
    """Allocator on `device` whose pool is registered with the backend `nccl`. All ranks create it together."""

    def __init__(self, nccl: Any, device: torch.device) -> None:
        self.device = device
        if not nccl._is_initialized():
            nccl.eager_connect_single_device(device)  # memory needs a communicator, which is created lazily
        self._pool = torch.cuda.MemPool(nccl.mem_allocator)
        nccl.register_mem_pool(self._pool)  # includes later allocations

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat tensor."""
        with torch.cuda.use_mem_pool(self._pool, self.device):
            return torch.zeros(numel, dtype=dtype, device=self.device)
