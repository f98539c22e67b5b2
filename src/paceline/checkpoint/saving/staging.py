"""Memory for the copy of rank 0's states that a background save writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.checkpoint.captures import Capture


class Staging:
    """Memory for one copy of rank 0's states, reused by every save because new pages are expensive."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, str], torch.Tensor] = {}
        """The copies, by the number of the capture and the name of the tensor."""

    def copies(self, captures: Sequence[Capture]) -> list[Capture]:
        """Return copies of `captures` on the CPU, overwriting the previous copies."""
        return [
            replace(capture, tensors={name: self._copy((number, name), of) for name, of in capture.tensors.items()})
            for number, capture in enumerate(captures)
        ]

    def _copy(self, key: tuple[int, str], tensor: torch.Tensor) -> torch.Tensor:
        memory = self._memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
            try:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu")
            except RuntimeError as error:  # raised by torch if memory is exhausted
                raise MemoryError(f"not enough memory for a copy of {tensor.nbytes} bytes ({error})") from error
            self._memory[key] = memory
        return memory.copy_(tensor)
