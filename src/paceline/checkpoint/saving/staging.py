"""Memory for the copy of rank 0's states that a background save writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.checkpoint.captures import Capture
from paceline.checkpoint.format.safetensors_file import spec_of
from paceline.checkpoint.storage.free_space import aligned


class Staging:
    """Memory for one copy of rank 0's states, reused by every save because new pages are expensive."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # bytes

    def copies(self, captures: Sequence[Capture]) -> list[Capture]:
        """Return copies of `captures` on the CPU in stored form, overwriting the previous copies."""
        tensors = [tensor for capture in captures for tensor in capture.tensors.values()]
        size = sum(aligned(spec_of(tensor).nbytes) for tensor in tensors)
        self._grow(size, pinned=any(tensor.is_cuda for tensor in tensors))
        self._used = 0
        return [
            replace(capture, tensors={name: self._copy(tensor) for name, tensor in capture.tensors.items()})
            for capture in captures
        ]

    def _grow(self, size: int, pinned: bool) -> None:
        if size <= self._memory.numel():
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # release the old buffer before a larger one is allocated
        try:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:  # raised by torch if memory is exhausted
            raise MemoryError(f"not enough memory for a copy of {size} bytes ({error})") from error

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        spec = spec_of(tensor)
        place = self._memory[self._used : self._used + spec.nbytes]
        self._used += aligned(spec.nbytes)
        if not spec.nbytes:
            return spec.empty()
        copy = place.view(getattr(torch, spec.dtype)).view(spec.shape)
        copy.copy_(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)
        return copy
