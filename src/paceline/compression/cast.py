"""Communication hook that sends gradients in half precision."""

from __future__ import annotations

import torch
from torch import nn

from paceline.compression.compressor import Compressor
from paceline.compression.gradients import Gradients
from paceline.compression.pipeline import Stages
from paceline.errors import UsageError


class Cast(Compressor):
    """Sends g/N in `dtype`; the sum over the ranks is then the mean. Keeps no residual.

    Because gradients are divided before they are cast, the sum does not overflow if the mean does not. fp16 has three
    more bits of precision; bf16 has the range of float32, which gradients of unknown scale need.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Raises:
        UsageError: if `dtype` is neither.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(model)
        if dtype not in (torch.bfloat16, torch.float16):
            raise UsageError(f"Cast(dtype={dtype}): give torch.bfloat16 or torch.float16")
        self.dtype = dtype

    def reduce(self, gradients: Gradients) -> Stages:
        """Sum g/N."""
        message = (gradients.flat / self.size).to(self.dtype)  # divided first: a sum in fp16 may overflow
        yield self._all_reduce(message)
        return self._finish(gradients, message)
