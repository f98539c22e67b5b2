"""Communication hooks that send gradients in half precision or in eight bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.compression.compressor import Compressor
from paceline.compression.pipeline import Gradients, Stages
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


CHUNK = 512
"""Number of elements that share a scale, so that the 4 bytes of the scale add less than one percent."""


class Int8(Compressor):
    """Sends eight-bit codes: a quarter of float32's bytes, for any number of ranks.

    Each rank quantizes its gradients and sends every other rank that rank's shard of them. Each rank then sums its
    shard over the ranks in full precision, so that the sum cannot overflow, quantizes the mean and sends it to all.
    This moves as much data as two all-to-alls. The sender keeps the error of the first rounding as a residual. The
    shard's owner keeps the error of the second rounding, times N, so that the mean of residuals and gradients is
    preserved. The scheme is from Tang et al., "1-bit Adam", ICML 2021, but with eight bits.
    """

    collectives = 2

    def reduce(self, gradients: Gradients) -> Stages:
        """Exchange quantized shards, then the quantized means."""
        self._residuals.add_to(gradients)
        flat, count = gradients.flat, gradients.flat.numel()
        shards = shards_of(flat, self.size)
        codes = encode(shards)
        flat.sub_(decode(*codes, flat.dtype).view(-1)[:count])
        # Scales and codes in one message, to pay one latency instead of two.
        message = torch.cat([part.view(self.size, -1) for part in codes], dim=1)
        received = torch.empty_like(message)
        self.bytes_on_wire += (self.size - 1) * message.numel() // self.size  # all but this rank's own shard
        yield dist.all_to_all_single(received, message, group=self.group, async_op=True)
        work, gathered = self._all_gather(self._rounded_mean(flat, received, shards.shape))
        yield work
        return self._finish(gradients, decode(*split(gathered, shards.shape), flat.dtype).view(-1)[:count])

    def _rounded_mean(self, flat: Tensor, received: Tensor, shape: torch.Size) -> Tensor:
        """Return the quantized mean of this rank's shard; its error stays in `flat`."""
        mean = decode(*split(received, shape), flat.dtype).sum(0).div_(self.size)
        rounded = encode(mean[None])
        error = mean.sub_(decode(*rounded, flat.dtype)[0]).view(-1)
        own_shard = flat[self.rank * error.numel() : (self.rank + 1) * error.numel()]
        own_shard.add_(error[: own_shard.numel()], alpha=self.size)
        return torch.cat([part.view(-1) for part in rounded])


def shards_of(flat: Tensor, size: int) -> Tensor:
    """Return `flat`, padded with zeros, in shape (`size`, chunks, elements per chunk)."""
    length = max(1, -(-flat.numel() // size))
    chunk = min(CHUNK, length)
    chunks = -(-length // chunk)
    padded = torch.zeros(size * chunks * chunk, dtype=flat.dtype, device=flat.device)
    padded[: flat.numel()] = flat
    return padded.view(size, chunks, chunk)


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode `values` as bytes: float32 scales (…, chunks, 1) and int8 codes (…, chunks, chunk).

    A chunk's scale is its largest magnitude divided by 127. A chunk that holds NaN or Inf is all NaN when decoded.
    """
    scales = (values.abs().amax(-1, keepdim=True) / 127).float()
    codes = (values / torch.where(scales > 0, scales, 1)).round_().clamp_(-127, 127)
    # int8 has no NaN; the chunk's scale preserves it for decode().
    return scales.view(torch.uint8), codes.nan_to_num_(0).to(torch.int8).view(torch.uint8)


def decode(scales: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode the bytes that :func:`encode` returned into numbers of `dtype`."""
    scale = scales.view(torch.float32).to(dtype)
    # An infinite scale would turn zero codes into NaN and all others into infinities.
    return codes.view(torch.int8).to(dtype).mul_(torch.where(scale.isfinite(), scale, torch.nan))


def split(messages: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the scales and codes in `messages`, (ranks, bytes), for shards of `shape`, (ranks, chunks, chunk)."""
    _, chunks, chunk = shape
    scales, codes = messages.split([4 * chunks, chunks * chunk], dim=1)
    return scales.reshape(-1, chunks, 4).contiguous(), codes.reshape(-1, chunks, chunk).contiguous()
