"""The gradients of a bucket, as flat real numbers for compressors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.state.flat_views import shaped_like
from paceline.errors import UsageError


@dataclass
class Gradients:
    """A bucket's gradients as flat real numbers, of at least single precision, and each parameter's part of them."""

    flat: Tensor
    """The bucket's memory, which the hook may overwrite, if its dtype is float32 or float64; otherwise a copy."""
    names: list[str]
    views: list[Tensor]
    """Views of `flat` with each parameter's shape and strides; for a complex parameter, with a last dimension of 2."""
    bucket: Any

    @classmethod
    def of(cls, bucket: Any, names: Mapping[int, str]) -> Gradients:
        """Read a ``GradBucket``; `names` maps the ``id`` of each parameter to its name."""
        parameters = bucket.parameters()
        if any(id(parameter) not in names for parameter in parameters):
            raise UsageError(
                "the communication hook got a gradient of a parameter that its state does not know; create the state "
                "from the model that it is registered with"
            )
        flat = _reals(bucket.buffer())
        if flat.dtype not in (torch.float32, torch.float64):  # half precision would round small residuals away
            flat = flat.float()
        return cls(flat, [names[id(parameter)] for parameter in parameters], views_of(flat, parameters), bucket)

    @property
    def bytes_uncompressed(self) -> int:
        """Size of the bucket without compression, in bytes."""
        return int(self.bucket.buffer().nbytes)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's view of `flat`, a tensor like :attr:`flat`."""
        return views_of(flat, self.bucket.parameters())

    def write(self, mean: Tensor) -> Tensor:
        """Write `mean`, a tensor like :attr:`flat`, into the bucket; returns the bucket's buffer."""
        buffer: Tensor = self.bucket.buffer()
        _reals(buffer).copy_(mean)
        return buffer


def views_of(flat: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return, for each of `parameters`, its view of `flat`, which holds their values as real numbers."""
    complex_flat = torch.view_as_complex(flat.view(-1, 2)) if any(p.is_complex() for p in parameters) else flat
    pieces = complex_flat.split([parameter.numel() for parameter in parameters])
    shaped = [shaped_like(parameter, piece) for parameter, piece in zip(parameters, pieces, strict=True)]
    return [torch.view_as_real(view) if view.is_complex() else view for view in shaped]


def _reals(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
